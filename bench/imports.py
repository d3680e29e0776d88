"""``python -m bench.imports``: what phalanx adds to ``import torch``, with and without PHALANX_REPLACE=gloo.

torch looks for entry points at the end of its import in any case, so the benchmark times only loading and calling the
entry point of phalanx. Each sample uses a new interpreter, and both kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from bench import record
from bench.report import machine_facts

_PROGRAM = """
import time, torch
from importlib.metadata import entry_points
(ours,) = (one for one in entry_points(group="torch.backends") if one.name == "phalanx")
began = time.perf_counter()
ours.load()()
print(time.perf_counter() - began)
"""
_KINDS = {"installed": {}, "in the place of Gloo": {"PHALANX_REPLACE": "gloo"}}


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each sample, by kind."""
    # with PYTHONDONTWRITEBYTECODE, modules would be compiled each time
    ignored = ("PHALANX_", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    # the measured program calls the entry point itself, in place of torch
    environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    samples: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for round_ in range(num_rounds + 1):  # the first round does not count, because it compiles the modules
        for kind, added in _KINDS.items():
            command = [sys.executable, "-c", _PROGRAM]
            done = subprocess.run(command, env=environ | added, capture_output=True, text=True, check=True, timeout=60)
            if round_:
                samples[kind].append(float(done.stdout))
    return samples


def main() -> None:
    """Print the median and the quartiles of each kind, in ms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="fresh interpreters of each kind (default: 15)")
    record.add_arguments(parser)
    given = parser.parse_args()
    samples = measure(max(2, given.rounds))
    for kind, seconds in samples.items():
        low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4, method="inclusive"))
        print(f"{kind:22} {median:.2f} ms ({low:.2f} to {high:.2f})")
    rows = [[kind, statistics.median(seconds)] for kind, seconds in samples.items()]
    table = record.Table("imports", [("import torch, with phalanx", "text"), ("adds", "seconds")], rows)
    record.write(given.json, given.note, machine_facts(""), [table], {"samples": samples})


if __name__ == "__main__":
    main()
