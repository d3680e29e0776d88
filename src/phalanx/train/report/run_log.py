"""The output of a run while it trains: one progress bar or plain lines, metrics of all ranks, time by phase.

The phase "exchange" is the time that our DistributedDataParallel spends on averaging at the end of backward, plus the
time that ranks spend on agreements (see `consensus`). On the phalanx backend, averaging is one call, so timing it costs
nothing. The core measures how long a rank waited in that call for all ranks to arrive; that time is the phase "wait".
Between hosts the wait is part of "exchange". torch's wrappers average during backward, so with them, both phases are
part of "backward".
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from phalanx._errors import RankFailed
from phalanx._text import broken, is_terminal, one_line
from phalanx.checkpoint import Loaded
from phalanx.record import writer
from phalanx.session.session import Session
from phalanx.train.report.loggers import CLOSE_S, Loggers, Run
from phalanx.train.report.metrics import PHASES, RECORDED, MetricsLog, write_csv
from phalanx.train.report.progress import ProgressBar
from phalanx.train.report.report import write_report
from phalanx.train.settings import Settings
from phalanx.train.step.objective import NamedParts
from phalanx.wire.rank_group import RankGroup

_LINE_EVERY_S = 10.0
_VICTIMS_CLOSE_S = 0.5


class Clock:
    """Seconds that this rank has spent in each phase since the last `take`.

    Attributes:
        step: Number of the step that the phases belong to.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.step: int = 0
        self._at = time.perf_counter()
        self._event = 0

    def restart(self) -> None:
        """Restart the clock; the time since the last lap belongs to no phase."""
        self._at = time.perf_counter()

    def begin(self, phase: str) -> None:
        """Record the beginning of a phase in the black box; the next `lap` ends it."""
        writer.end(self._event)  # the previous phase, which an error may have left open
        self._event = writer.begin_phase(RECORDED.get(phase, phase), self.step)

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        writer.end(self._event)
        self._event = 0
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` from one phase to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def take(self) -> list[float]:
        """Return the seconds of each phase, and reset them."""
        taken = list(self.seconds.values())
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return taken


class RunLog:
    """Shows and logs a run; every rank has this object, but only rank 0 prints and writes.

    Args:
        folder: Folder of the run.
        num_steps: Largest number of steps that the run can have.
        ranks: All ranks of the job.
        loggers: Loggers that get the numbers of metrics.jsonl, after `begin`.

    Attributes:
        num_steps: Largest number of steps that the run can have.
        clock: Clock of this rank's phases.
        last_losses: Mean loss of each rank over the steps of the last log.
    """

    def __init__(self, folder: str, num_steps: int, ranks: RankGroup, loggers: Loggers) -> None:
        self._folder = folder
        self._ranks = ranks
        self._loggers = loggers
        self._log: MetricsLog | None = None
        self.num_steps = num_steps
        self._bar: ProgressBar | None = None
        self._said_missing: set[str] = set()
        self._said_s = time.monotonic()
        self.clock: Clock = Clock()
        self._losses: list[torch.Tensor] = []  # losses of the steps since the last `log`
        self._num_samples: list[int] = []
        self._epoch = _Mean(1, is_whole=True)
        self.last_losses: list[float] = []
        if ranks.rank == 0:
            with self.sparing_the_training("metrics.jsonl"):
                self._log = MetricsLog(folder)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close_bar()
        is_victim = kind is not None and issubclass(kind, RankFailed)  # such a rank must not delay the restart
        self._loggers.close(_VICTIMS_CLOSE_S if is_victim else CLOSE_S)
        if self._log is not None:
            self._log.close()

    def begin(self, session: Session, settings: Settings, loaded: Loaded | None, origin: Mapping[str, Any]) -> None:
        """Record the start of this attempt, and open the loggers."""
        given = dataclasses.asdict(settings)
        resumed = None if loaded is None else dataclasses.asdict(loaded)
        self.record(
            "start", pid=os.getpid(), world_size=session.world_size, backend=session.backend, settings=given,
            resumed_from=resumed, origin=origin,
        )  # fmt: skip
        if self._ranks.rank == 0:
            attempt = 0 if self._log is None else self._log.attempt
            run = Run(self._folder, given, 0 if loaded is None else loaded.step, attempt)
            self._loggers.open(run, self.sparing_the_training)

    def say(self, text: str) -> None:
        """Print a line on rank 0, broken between words if it is longer than the terminal."""
        if self._ranks.rank == 0:
            text = "\n".join(broken([text]))
            try:
                print(text, flush=True)
            except UnicodeEncodeError:  # such as a folder's name that the locale can't encode
                print(ascii(text), flush=True)

    @contextlib.contextmanager
    def sparing_the_training(self, what: str) -> Iterator[None]:
        """Keep an error in the body, such as a full disk, from ending the training; report it once."""
        try:
            yield
        except Exception as error:
            if what not in self._said_missing:
                self._said_missing.add(what)
                words = f"can't write {what} ({one_line(error)}); training continues"
                writer.note(words)
                self.say(words)

    def record(self, kind: str, **values: Any) -> None:
        """Write a record to metrics.jsonl and pass it to the loggers, on rank 0."""
        if self._log is not None:
            with self.sparing_the_training("metrics.jsonl"):
                self._log.write(kind, **values)
        if self._ranks.rank == 0:
            logged = {} if self._log is None else self._log.last_steps
            self._loggers.log(kind, values, is_repeated=values.get("step", 0) <= logged.get(kind, -1))

    @property
    def has_news(self) -> bool:
        """Whether there were steps since the last `log`."""
        return bool(self._losses)

    def begin_epoch(self, first_step: int, *, is_whole: bool) -> None:
        """Begin the mean loss of an epoch. `is_whole` is False if an earlier attempt trained a part of the epoch."""
        if self._bar is None and self._ranks.rank == 0 and is_terminal(sys.stdout):
            self._bar = ProgressBar.open(self.num_steps, first_step - 1)
        self._epoch = _Mean(first_step, is_whole)

    def count(self, loss: torch.Tensor, num_samples: int) -> None:
        """Count a step with its loss on this rank (the step's loss is the mean over ranks) and all ranks' samples."""
        self._losses.append(loss)
        self._num_samples.append(num_samples)

    def log(
        self, step: int, epoch: int, lr: float, grad_norm: torch.Tensor | None, parts: NamedParts
    ) -> list[list[float]]:
        """Gather, show and write the steps since the last call; return each rank's mean seconds by phase.

        Every rank must call this after the same step.
        """
        writer.note_memory()
        num = len(self._losses)
        phases = [seconds / num for seconds in self.clock.take()]
        losses = torch.stack(self._losses).flatten().tolist()
        weights = [size or 1 for size in self._num_samples]  # batches of unknown size weigh the same
        weighted = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
        table = self._ranks.gather_numbers([sum(losses) / num, weighted, *phases])
        self.last_losses = [row[0] for row in table]
        loss = sum(self.last_losses) / len(table)
        self._epoch.add(sum(row[1] for row in table) / len(table), sum(weights))
        by_rank = [row[2:] for row in table]
        totals = [sum(row) for row in by_rank]
        samples_per_s = sum(self._num_samples) / num / max(totals)
        norm = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        self.record(
            "step", step=step, epoch=epoch, loss=loss, lr=lr, samples_per_s=samples_per_s, **norm,
            **parts.take(self._ranks, num),
            phases_s=dict(zip(PHASES, by_rank[0], strict=True)), spread=[max(totals), min(totals)],
            phases_by_rank=by_rank,
        )  # fmt: skip
        meeting = [PHASES.index("exchange"), PHASES.index("wait")]  # the phases in which ranks wait for each other
        busy = [sum(row) - sum(row[place] for place in meeting) for row in by_rank]
        behind = max(busy) / min(busy) - 1
        parts_of_line = f"{samples_per_s:,.0f} samples/s", f"slowest rank {behind:.0%} behind"
        self._show(step, f"loss {loss:#.4g}", f"epoch {epoch + 1}", *parts_of_line)
        self._losses = []
        self._num_samples = []
        return by_rank

    def end_epoch(self, step: int, epoch: int, evaluation: Mapping[str, float], *, has_ended: bool) -> None:
        """Show and write the result of an epoch, or of the part of it that this attempt trained, which may be empty."""
        mean, values = self._epoch, [f"{name} {value:#.4g}" for name, value in evaluation.items()]
        values[:1] = [f"val {first}" for first in values[:1]]  # short, so that the line fits 80 columns
        if mean.has_steps:
            self.record("epoch", step=step, epoch=epoch, loss=mean.value, first_step=mean.first_step)
            part = "" if mean.is_whole else f" (since step {mean.first_step})"
            values.insert(0, f"loss {mean.value:#.4g}{part}")
        which = f"epoch {epoch + 1}" if has_ended else f"in epoch {epoch + 1}"
        self.say(f"{which}, step {step}: {', '.join(values) or 'no steps were left to train'}")

    def record_evaluation(self, step: int, epoch: int, evaluation: Mapping[str, float]) -> None:
        """Record an evaluation, and show which of its values are not finite."""
        self.record("evaluation", step=step, epoch=epoch, **evaluation)
        if bad := [f"{name} {value}" for name, value in evaluation.items() if not math.isfinite(value)]:
            self.say(f"evaluation after step {step}: {', '.join(bad)}; not finite, so never the best")

    def report(self) -> None:
        """End the progress bar, and write metrics.csv and report.html, on rank 0."""
        self._close_bar()
        if self._ranks.rank == 0:
            with self.sparing_the_training("metrics.csv"):
                write_csv(self._folder)
            with self.sparing_the_training("report.html"):
                self.say(f"report: {write_report(self._folder)}")

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, step: int, loss: str, epoch: str, *more: str) -> None:
        if self._bar is not None:
            self._bar.update(step, loss, (epoch, *more))
        elif time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            self.say(f"step {step} of {self.num_steps}, {epoch}: {', '.join((loss, *more))}")


@dataclasses.dataclass
class _Mean:
    """Mean loss over an epoch's samples.

    Attributes:
        first_step: First step that counts.
        is_whole: Whether the mean covers the epoch from its first step.
    """

    first_step: int
    is_whole: bool
    _sum: float = 0.0
    _weight: int = 0

    def add(self, weighted: float, weight: int) -> None:
        self._sum += weighted
        self._weight += weight

    @property
    def has_steps(self) -> bool:
        return self._weight > 0

    @property
    def value(self) -> float:
        return self._sum / self._weight
