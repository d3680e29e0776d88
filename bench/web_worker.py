"""One rank of ``python -m bench.web``: records steps without computing; rank 0 has written metrics of many steps."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from phalanx import _env
from phalanx.record import writer
from phalanx.train.report.metrics import MetricsLog

_PHASES = ("load data", "forward", "backward", "optimizer")
_PAST_STEPS = 1500  # that fill the box
_STEP_S = 0.2


def _record_step(step: int, num_steps: int) -> None:
    event = writer.begin_step(step, 64, num_steps)
    for name in _PHASES:
        writer.end(writer.begin_phase(name, step))
    writer.end(writer.begin_collective("all_reduce", 0, "world", step, 1000, "train.py:31"))
    writer.end(event)


def _write_past(folder: Path, num_steps: int) -> MetricsLog:
    """Write the records of steps that a run has made before; return the log, still open."""
    folder.mkdir(parents=True)
    now = time.time()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, num_steps + 1):
            values = {"loss": 1 / step + 0.01 * math.sin(step), "lr": 0.01, "samples_per_s": 640.0, "grad_norm": 1.0}
            place = {"time": now, "kind": "step", "attempt": 0, "step": step, "epoch": 0}
            file.write(json.dumps(place | values) + "\n")
    return MetricsLog(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="steps in metrics.jsonl")
    given = parser.parse_args()
    environ = _env.environment()
    rank = int(environ["RANK"])
    writer.begin(rank, int(environ["WORLD_SIZE"]))
    log = _write_past(Path("runs/bench"), given.steps) if rank == 0 else None
    for step in range(given.steps - _PAST_STEPS, 1 << 40):
        _record_step(step, 1 << 20)
        if step > given.steps:
            if log is not None:
                log.write("step", step=step, epoch=0, loss=0.01 * math.sin(step), lr=0.01, samples_per_s=640.0)
            time.sleep(_STEP_S)


if __name__ == "__main__":
    main()
