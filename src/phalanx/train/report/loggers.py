"""Loggers of a run besides metrics.jsonl: TensorBoard, Weights & Biases, or an object of the script's own.

metrics.jsonl is written first and remains the record of the run; a logger gets the same numbers, on rank 0 only. The
random state is restored after a logger begins, because a run's bits must not depend on its loggers. After its first
failure, a logger is not called again, because it may have waited long for a network and would wait again. The run
reports the failure once and trains on. A logger has 10 s to close, because a job that must end has little time. Steps
that a resumption repeats are not sent to Weights & Biases a second time, because the run continues there; TensorBoard
is asked to drop the first records of these steps. There is no logger for MLflow or CSV files: for MLflow, an object
with two methods is enough, and `write_csv` writes the CSV into the run's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import netrc
import os
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from phalanx import _env
from phalanx._text import one_line
from phalanx.data.random_state import random_state_kept
from phalanx.train.report.metrics import numbers_of
from phalanx.wire.files import write_whole
from phalanx.wire.rank_group import RankGroup

WANDB_ID = "wandb.id"
"""File in the run's folder that holds the run's id at Weights & Biases."""
CLOSE_S = 10.0
"""Time that each logger may take to close: less than a scheduler grants to a job that it preempts."""
_CONNECT_S = 20.0


class Logger(Protocol):
    """Interface of a `Trainer`'s logger, which is called on rank 0 only.

    A run that resumes from an earlier step repeats the steps after it, so `log` may get the same step twice.
    """

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log numbers by name, such as ``loss``, ``lr``, ``epoch_loss`` and ``validation/loss``."""
        ...

    def close(self) -> None:
        """Write out everything. Called once, at the end of `fit`, unless the process is killed."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts about the run, which a logger gets when it is opened.

    Attributes:
        folder: Folder of the run.
        settings: Settings of the trainer, by name.
        resumed_step: Number of the step after which this attempt resumes; 0 at the beginning.
        attempt: Number of this start in the folder, from 0.
    """

    folder: str
    settings: Mapping[str, Any]
    resumed_step: int
    attempt: int


class Loggers:
    """All loggers of a trainer; every rank makes this object, but only rank 0 logs.

    Args:
        given: Name of a logger, a `Logger`, or a sequence of them.
        ranks: All ranks of the job.

    Raises:
        ValueError: There is no logger of that name.
        TypeError: An object has no ``log`` or no ``close``.
        ImportError: The package of a logger is missing on rank 0; raised on every rank.
    """

    def __init__(self, given: str | Logger | Sequence[str | Logger], ranks: RankGroup) -> None:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        self._given: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
        self._open: dict[str, Any] = {}
        for one in self._given:
            if isinstance(one, str) and one not in _KINDS:
                near, known = _env.did_you_mean(one, _KINDS), f"; there are {', '.join(_KINDS)}"
                raise ValueError(f"Trainer: no logger is named {one!r}{near or known}")
            if isinstance(one, type):
                raise TypeError(
                    f"Trainer: a logger is the class {one.__qualname__} itself; right: {one.__qualname__}(...)"
                )
            if not isinstance(one, str) and not (hasattr(one, "log") and hasattr(one, "close")):
                raise TypeError(f"Trainer: a logger has log(metrics, step) and close(), and {one!r} does not")
        self._is_told = ranks.rank == 0
        problems = ranks.gather(self._missing() if self._is_told else "")  # every rank calls, even without loggers
        if problems[0]:
            raise ImportError(problems[0])

    def _missing(self) -> str:
        for name in (one for one in self._given if isinstance(one, str)):
            module, needed, package = _KINDS[name].needs
            try:
                getattr(importlib.import_module(module), needed)  # fails for a mere folder, which can be imported, too
            except Exception as error:
                return (
                    f"Trainer: loggers={name!r} needs a package that rank 0 can't import: pip install {package} "
                    f"({one_line(error)})"
                )
        return ""

    @property
    def can_open_again(self) -> bool:
        """Whether all loggers were given by name; a logger object of the script may be unusable once closed."""
        return all(isinstance(one, str) for one in self._given)

    def open(self, run: Run, attempt: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        """Open all loggers.

        Args:
            run: Facts about the run.
            attempt: Function that takes the name of an action and returns a context that reports the action's error.
        """
        self._attempt = attempt
        for one in self._given if self._is_told else ():
            name = one if isinstance(one, str) else type(one).__qualname__
            with random_state_kept(), attempt(f"to the logger {name}"):  # a run's bits must not depend on its loggers
                self._open[f"{len(self._open)} {name}"] = _KINDS[one](run) if isinstance(one, str) else one

    def log(self, kind: str, record: Mapping[str, Any], *, is_repeated: bool) -> None:
        """Pass a record of metrics.jsonl to all loggers.

        Args:
            kind: Kind of the record.
            record: Fields of the record, by name.
            is_repeated: Whether an earlier attempt has logged that step.
        """
        metrics = numbers_of(kind, record) if self._open else {}
        for key, logger in list(self._open.items()) if metrics else ():
            if is_repeated and getattr(logger, "is_continued", False):
                continue
            failed = True
            with self._attempt(f"to the logger {key.split(' ', 1)[1]}"):
                logger.log(metrics, record["step"])
                failed = False
            if failed:  # not called again, because it may have waited long for a network
                del self._open[key]

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Close all loggers, and abandon those that do not close in time."""
        for key, logger in self._open.items():
            with self._attempt(f"the end to the logger {key.split(' ', 1)[1]}"):
                _within(limit_s, logger.close)
        self._open = {}


def _within(limit_s: float, close: Callable[[], None]) -> None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            close()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="phalanx-close", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"it did not close within {limit_s:g} s")
    if raised:
        raise raised[0]


class _TensorBoard:
    needs = "torch.utils.tensorboard", "SummaryWriter", "tensorboard"

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Makes TensorBoard forget steps that this resumption will repeat.
        purge_step = run.resumed_step + 1 if run.attempt else None
        self._writer = SummaryWriter(os.path.join(run.folder, "tensorboard"), purge_step=purge_step)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # now, because a killed rank never closes the writer

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    needs = "wandb", "init", "wandb"

    def __init__(self, run: Run) -> None:
        import wandb

        if wandb.run is not None:  # a run of the script's own, which the script also ends
            self._run, self._is_ours, self.is_continued = wandb.run, False, False
            return
        id_file = Path(run.folder, WANDB_ID)
        known = id_file.read_text(encoding="utf-8") if id_file.exists() else None
        self._is_ours, self.is_continued = True, known is not None
        self._run = wandb.init(
            dir=run.folder,
            name=os.path.basename(os.path.abspath(run.folder)),
            id=known,
            resume="allow" if known else None,
            config=dict(run.settings),
            mode=None if _is_wandb_configured() else "offline",
            settings=wandb.Settings(console="off", init_timeout=_CONNECT_S),
        )
        write_whole(id_file, self._run.id)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


def _is_wandb_configured() -> bool:
    """Return whether wandb has a mode or a key; without either, wandb would prompt for a key."""
    environ = _env.environment()
    if environ.get("WANDB_MODE") or environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return host in netrc.netrc(environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    return False


_KINDS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb}
