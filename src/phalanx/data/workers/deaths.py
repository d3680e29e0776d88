"""`Death`: how a worker has died, and what the user is told of it."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from phalanx._text import counted, joined, listed, plural, shortened, signal_description, signal_name
from phalanx.data.workers.line import ALL_LOADED

_MOST_SAMPLES = 16  # that a message names
_CRASHED = (
    "Native code crashed in it. Some libraries can't be used in a forked process: open their files in __getitem__, or "
    'pass multiprocessing_context="spawn".'
)
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "Probably memory ran out: fewer workers, a smaller prefetch_factor or smaller batches take less.",
    signal.SIGBUS: "A file that it had mapped was cut short, or its disk or the memory was full.",
    signal.SIGSEGV: _CRASHED,
    signal.SIGABRT: _CRASHED,
}


@dataclasses.dataclass(frozen=True)
class Death:
    """How a worker has died, and at what.

    Attributes:
        worker: Torch's number of the worker.
        pid: Process that has died.
        exitcode: Exit code; negative for a signal.
        samples: Samples of the batch that it was working on, or was to load next; None if there is none.
        num_begun: Number of these samples that it had begun, `ALL_LOADED` after the last; 0 if they are not counted.
        is_begun: Whether it had begun that batch.
        num_deaths: Number of workers that have died at that batch.
        site: User's line at which native code has crashed; empty if unknown.
    """

    worker: int
    pid: int
    exitcode: int
    samples: Any
    num_begun: int
    is_begun: bool
    num_deaths: int
    site: str

    def failure(self, rank: int, num_retries: int) -> str:
        """Return the message of a death that is not made good; it begins with torch's words, which programs look for.

        Args:
            rank: Rank whose worker has died.
            num_retries: Number of deaths in this epoch that were made good.
        """
        if self.exitcode < 0:
            words = f"is killed by signal: {signal_description(-self.exitcode)}."
        else:
            words = f"exited unexpectedly with exit code {self.exitcode}."
        sentences = [
            f"DataLoader worker (pid {self.pid}) {words}",
            f"It was worker {self.worker} of rank {rank}{self._at}.",
            f"It crashed at {self.site}." if self.site else "",
        ]
        if num_retries:
            tried = f" This batch was tried {counted(self.num_deaths, 'time')}." if self.samples is not None else ""
            sentences.append(f"worker_retries={num_retries} is used up.{tried}")
        sentences.append(_ADVICE.get(-self.exitcode, "") if self.exitcode < 0 else _advice_of_exit(self.exitcode))
        return " ".join(filter(None, [*sentences, "See: phalanx explain dataloader-worker"]))

    def notice(self, rank: int, num_left: int) -> str:
        """Return the line that says that a death is made good."""
        how = (
            f"was killed by {signal_name(-self.exitcode)}" if self.exitcode < 0 else f"exited with code {self.exitcode}"
        )
        return (
            f"phalanx: rank {rank}: DataLoader worker {self.worker} (pid {self.pid}) {how}{self._at}; a new worker "
            f"does its work again. Retries left in this epoch: {num_left}"
        )

    @property
    def _at(self) -> str:
        if self.samples is None:
            return ""
        if not self.is_begun:
            return f", before it began {_name(self.samples)}"
        if type(self.samples) is not list or not self.num_begun:
            return f", {words_of_batch(self.samples)}"
        if self.num_begun == ALL_LOADED:
            return f", which had loaded {_name(self.samples)}"
        return f", at sample {self.samples[self.num_begun - 1]} {words_of_batch(self.samples)}"


def _advice_of_exit(exitcode: int) -> str:
    if exitcode == 0:
        return "The dataset, or what it calls, has ended the process."
    return "If it has printed an error, that is above; num_workers=0 shows the real exception and its line."


def words_of_batch(samples: Any) -> str:
    """Return ``in the batch of samples 3, 5 and 9``, or ``at sample 3`` if there are no batches."""
    name = _name(samples)
    return f"{'at' if name.startswith('sample') else 'in'} {name}"


def _name(samples: Any) -> str:
    if hasattr(samples, "tolist"):  # of a sampler that yields tensors or arrays
        samples = samples.tolist()
    if not isinstance(samples, list | tuple):
        return f"sample {shortened(str(samples))}"
    names = joined(samples) if len(samples) <= _MOST_SAMPLES else listed(samples, _MOST_SAMPLES)
    return f"the batch of {plural(len(samples), 'sample')} {names}"
