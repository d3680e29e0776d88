"""A run's metrics.jsonl as a Trainer leaves it, written in no time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from phalanx.train.report.metrics import PHASES

BEGAN_S = 1_795_000_000.0


class FakeRun:
    """Writes records with a clock of its own; a step takes 0.1 s."""

    def __init__(self, folder: Path, *, num_ranks: int = 2, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.time_s = BEGAN_S
        self.attempt = -1
        self.origin = {"command": "python train.py --epochs 3", "optimizer": "SGD(lr=0.1)", "logs": "../logs"}
        self._num_ranks = num_ranks
        self._settings = {"max_epochs": 3, "max_steps": None, "precision": "bf16", **settings}

    def write(self, kind: str, **values: Any) -> None:
        record = {"time": self.time_s, "kind": kind, "attempt": self.attempt, **values}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def start(self, resumed_from: dict[str, Any] | None = None, *, gap_s: float = 2.5) -> None:
        self.attempt += 1
        self.time_s += gap_s if self.attempt else 0
        self.write(
            "start", world_size=self._num_ranks, backend="phalanx", settings=self._settings, resumed_from=resumed_from,
            origin=self.origin,
        )  # fmt: skip

    def steps(self, first: int, last: int, every: int = 1, **values: Any) -> None:
        for step in range(first, last + 1, every):
            self.time_s += 0.1 * every
            by_rank = [
                [0.004 + 0.002 * rank, 0.02, 0.04, 0.01, 0.0, 0.008, 0.0, 0.001] for rank in range(self._num_ranks)
            ]
            record = {
                "step": step, "epoch": step // 100, "loss": 2.0 * math.exp(-step / 40) + 0.01, "lr": 0.1,
                "samples_per_s": 900.0 + step % 7, "grad_norm": 1.0,
                "phases_s": dict(zip(PHASES, by_rank[0], strict=True)),
                "spread": [sum(by_rank[-1]), sum(by_rank[0])], "phases_by_rank": by_rank,
            }  # fmt: skip
            self.write("step", **(record | values))

    def evaluate(self, step: int, **values: float) -> None:
        self.write("evaluation", step=step, epoch=step // 100, **values)

    def end(self, step: int) -> None:
        self.write("end", step=step, epoch=3, seconds=self.time_s - BEGAN_S)
