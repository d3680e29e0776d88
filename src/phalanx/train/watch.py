"""What a run shows while it goes: one progress bar or plain lines, metrics of all ranks, where the time went."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.train.metrics import MetricsLog
from phalanx.train.objective import NamedParts
from phalanx.train.ranks import Ranks

PHASES = ("data", "forward", "backward", "optimizer", "snapshot")
_LINE_EVERY_S = 10.0


class Clock:
    """Seconds that this rank has spent in each phase since it was asked last."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._at = time.perf_counter()

    def restart(self) -> None:
        """Count from now on: what was before belongs to no phase."""
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now

    def take(self) -> list[float]:
        """Return the seconds of each phase, and begin anew."""
        taken = list(self.seconds.values())
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return taken


class Watch:
    """Shows and logs a run; every rank has one, rank 0's speaks.

    Args:
        folder: Of the run.
        num_steps: That the run will have at most.
    """

    def __init__(self, folder: str, num_steps: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self._log: MetricsLog | None = None
        self._num_steps = num_steps
        self._bar: Any = None
        self._said_missing: set[str] = set()
        self._said_s = time.monotonic()
        self.clock = Clock()
        self._losses: list[torch.Tensor] = []  # of the steps since `log` was called
        self._num_samples_since = 0
        self.last_loss = math.nan  # of all ranks, when it was logged last
        self.last_losses: list[float] = []  # of each
        if ranks.rank == 0:
            with self.sparing_the_training("metrics.jsonl"):
                self._log = MetricsLog(folder)

    def __enter__(self) -> Watch:
        if self._ranks.rank == 0 and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                self._bar = _Bar(self._num_steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self._ranks.rank == 0:
            try:
                print(text, flush=True)
            except UnicodeEncodeError:  # a folder's name, where the locale has no such letters
                print(ascii(text), flush=True)

    @contextlib.contextmanager
    def sparing_the_training(self, what: str) -> Iterator[None]:
        """Say which writing failed, once, and go on: what is told about a training must not change how it ends."""
        try:
            yield
        except Exception as error:
            if what not in self._said_missing:
                self._said_missing.add(what)
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self.say(f"can't write {what} ({why}); the training goes on")

    def record(self, kind: str, **values: Any) -> None:
        """Write a line of metrics.jsonl, on rank 0."""
        if self._log is not None:
            with self.sparing_the_training("metrics.jsonl"):
                self._log.write(kind, **values)

    @property
    def has_news(self) -> bool:
        """Whether steps came since `log` was called."""
        return bool(self._losses)

    def count(self, loss: torch.Tensor, num_samples: int) -> None:
        """Take in a step: this rank's loss, whose mean over the ranks is that of the step, and the samples of all."""
        self._losses.append(loss)
        self._num_samples_since += num_samples

    def log(
        self, step: int, epoch: int, lr: float, grad_norm: torch.Tensor | None, parts: NamedParts
    ) -> list[list[float]]:
        """Gather, show and write what came since the last call; return each rank's mean seconds by phase.

        Every rank calls it after the same step.
        """
        num = len(self._losses)
        phases = [seconds / num for seconds in self.clock.take()]
        own_loss = sum(torch.stack(self._losses).flatten().tolist()) / num
        table = self._ranks.gather_numbers([own_loss, *phases])
        self.last_losses = [row[0] for row in table]
        loss = self.last_loss = sum(self.last_losses) / len(table)
        by_rank = [row[1:] for row in table]
        totals = [sum(row) for row in by_rank]
        samples_per_s = self._num_samples_since / num / max(totals)
        norm = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        self.record(
            "step", step=step, epoch=epoch, loss=loss, lr=lr, samples_per_s=samples_per_s, **norm,
            **parts.take(self._ranks, num),
            phases_s=dict(zip(PHASES, by_rank[0], strict=True)), spread=[max(totals), min(totals)],
            phases_by_rank=by_rank,
        )  # fmt: skip
        behind = max(totals) / min(totals) - 1
        line = f"loss {loss:.4f}, {samples_per_s:,.0f} samples/s, slowest rank {behind:.0%} behind"
        self._show(step, epoch, line)
        self._losses = []
        self._num_samples_since = 0
        return by_rank

    def _show(self, step: int, epoch: int, line: str) -> None:
        if self._bar is not None:
            self._bar.update(step, f"epoch {epoch + 1}: {line}")
        elif time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            self.say(f"step {step} of {self._num_steps}, epoch {epoch + 1}: {line}")


class _Bar:
    """A progress bar of rich.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, transient=True)
        self._task = self._progress.add_task("starting", total=num_steps)
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        self._progress.stop()
