"""Watches one rank: each look returns the rank's activity, and the resources that the rank uses."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from phalanx.diagnose.jobs import Rank
from phalanx.diagnose.top.gpu import Gpu
from phalanx.diagnose.top.record import Activity, Recorded
from phalanx.host.kernel import stand_of
from phalanx.host.processes import Process, off_limits, process_of, pss_of
from phalanx.record.box import Box, open_box

_IDLE_PERCENT = 3.0
_POLL_PERCENT = 20.0  # a rank that uses less CPU than this may be polling for the others
_LONG_S = 0.5  # a sleep longer than any poll interval
_ENDED = ("X", "Z")


@dataclasses.dataclass(frozen=True)
class RankView:
    """State and resource use of a rank. A value of None is unknown, or not known yet.

    Attributes:
        note: Reason why the rank's record can't be read; empty if it can be read, or if there is none.
        step: Number of the rank's newest optimizer step.
        num_steps: Number of the last step of the training.
        samples_per_s: Samples per second of all ranks together, as this rank counts them.
        step_times_s: Mean seconds of a step in each of the last intervals in which a step ended, oldest first.
        cpu_percent: CPU use of the rank's threads in percent of one CPU.
        pss_bytes: Proportional memory, see `pss_of`; measured every ten seconds or less often.
        minor_faults_per_s: Page faults without I/O.
        num_helpers: Number of the rank's descendants, such as the workers of a data loader.
        cost: Time that the rank costs the others, as a fraction of a step; 0 if it is not named as a straggler.
    """

    rank: int
    pid: int
    state: str
    what: str
    site: str
    since_s: float | None
    note: str
    step: int | None
    num_steps: int | None
    steps_per_s: float | None
    samples_per_s: float | None
    step_times_s: list[float]
    cpu_percent: float | None
    rss_bytes: int | None
    pss_bytes: int | None
    num_threads: int | None
    minor_faults_per_s: float | None
    major_faults_per_s: float | None
    num_helpers: int
    gpus: tuple[Gpu, ...]
    cost: float = 0.0


class Seldom:
    """Decides when something expensive is due again.

    Args:
        every_s: Shortest time between two looks.
        share: Largest share of a CPU that the looks may take.
    """

    def __init__(self, every_s: float, share: float) -> None:
        self._every_s, self._share = every_s, share
        self._next = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def hasten(self, after_s: float) -> None:
        """Make the next look due in at most `after_s` seconds."""
        self._next = min(self._next, time.monotonic() + after_s)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the CPU time of the body, which decides when the next look is due."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._next = time.monotonic() + max(self._every_s, (time.thread_time() - begun) / self._share)


class WatchedRank:
    """One rank, with what the last look saw, because rates are differences between two looks.

    Args:
        rank: Rank to watch.
        bar_s: Seconds that a bar of the step times stands for.
        most: Largest number of events that a look decodes, see `Recorded`.
        first: Largest number of events that the first look reads.

    Attributes:
        pss_measured_at: Time of the last `measure_pss`; 0 if there was none.
    """

    def __init__(self, rank: Rank, bar_s: float, most: int = 0, first: int = 8192) -> None:
        self._rank = rank
        self._start_time = rank.process.start_time if rank.process is not None else None
        self._before: tuple[float, Process] | None = None
        self._pss: int | None = None
        self.pss_measured_at: float = 0.0
        self._recorded: Recorded | None = None
        self._finding_record = Seldom(2.0, share=0.001)
        self._note = ""
        self._bar_s, self._most, self._first = bar_s, most, first

    @property
    def news(self) -> Box | None:
        """Box with the events that the last look has read; None if it has read nothing."""
        return self._recorded.news if self._recorded is not None else None

    def takes(self, rank: Rank) -> bool:
        """Adopt new facts about this rank; return False if they are about another process."""
        if rank.process is not None and rank.process.start_time != self._start_time:
            return False
        self._rank = rank
        return True

    def look(self, gpus: tuple[Gpu, ...]) -> RankView:
        now, process = time.monotonic(), process_of(self._rank.pid)
        if process is not None and (process.state in _ENDED or process.start_time != self._start_time):
            process = None  # the rank has ended, and another process may have its pid
        self._look_at_record()
        rates = (None, None, None) if process is None else self._rates(now, process)
        activity = self._activity(process, rates[0])
        steps = self._recorded.steps if self._recorded is not None else None
        speeds = (steps.rates(time.monotonic_ns()) if steps is not None and process is not None else None) or (
            None,
        ) * 2
        if process is not None:
            self._before = now, process
        return RankView(
            rank=self._rank.rank,
            pid=self._rank.pid,
            state=activity.state,
            what=activity.what,
            site=activity.site,
            since_s=activity.since_s,
            note=self._note,
            step=steps.step if steps is not None else None,
            num_steps=steps.num_steps if steps is not None else None,
            steps_per_s=speeds[0],
            samples_per_s=speeds[1],
            step_times_s=steps.times_s if steps is not None else [],
            cpu_percent=rates[0],
            rss_bytes=process.rss_bytes if process is not None else None,
            pss_bytes=self._pss if process is not None else None,
            num_threads=process.num_threads if process is not None else None,
            minor_faults_per_s=rates[1],
            major_faults_per_s=rates[2],
            num_helpers=len(self._rank.helpers) if process is not None else 0,
            gpus=gpus,
        )

    def measure_pss(self) -> None:
        """Measure the proportional memory, which takes some 20 ms for a rank that has imported torch."""
        self._pss, self.pss_measured_at = pss_of(self._rank.pid), time.monotonic()

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.close()

    def _look_at_record(self) -> None:
        pid = self._rank.pid
        try:
            if self._recorded is None and self._finding_record.is_due():
                with self._finding_record.measured():
                    place = open_box(pid)
                    self._recorded = None if place is None else Recorded(*place, self._bar_s, self._most, self._first)
            if self._recorded is not None:
                self._recorded.look()
        except PermissionError:
            self._note = f"pid {pid} {off_limits(pid)}"
        except ValueError as error:
            self._note = f"the black box of pid {pid} can't be read: {error}"
        except OSError:  # the process has ended
            pass

    def _activity(self, process: Process | None, cpu_percent: float | None) -> Activity:
        if process is None:
            last = self._recorded.activity(self._rank.pid) if self._recorded is not None else None
            return Activity("gone") if last is None else Activity("gone", last.what, last.site)
        if process.state == "T":
            return Activity("stopped", "by a signal")
        if process.state == "t":
            return Activity("stopped", "by a debugger")
        if self._recorded is not None and (activity := self._recorded.activity(self._rank.pid)) is not None:
            return activity
        if process.state == "D":
            return Activity("waiting", "for a disk or the like")
        if self._most:  # what the kernel and the last call tell would take a look at all ranks four times as long
            return Activity("computing" if (cpu_percent or 0.0) >= _IDLE_PERCENT else "waiting")
        asleep = self._recorded.asleep() if self._recorded is not None else None
        stand = stand_of(self._rank.pid) if process.state == "S" else None
        if asleep is None and stand is not None and stand.call == "nanosleep" and (cpu_percent or 0.0) < _POLL_PERCENT:
            is_long = stand.still_s is not None and stand.still_s >= _LONG_S
            return Activity("asleep", since_s=stand.still_s) if is_long else Activity("waiting")  # it polls
        if stand is None or (cpu_percent or 0.0) >= _IDLE_PERCENT:
            return Activity("computing")
        if stand.call == "read" and stand.descriptor == 0:  # input(), or a debugger that the script has opened
            return Activity("reading", "its standard input")
        return asleep or Activity("waiting")

    def _rates(self, now: float, process: Process) -> tuple[float | None, float | None, float | None]:
        """Return CPU percentage, and minor and major faults per second, since the last look."""
        if self._before is None:
            return None, None, None
        then, before = self._before
        seconds = max(now - then, 1e-3)
        return (
            100 * (process.cpu_s - before.cpu_s) / seconds,
            (process.minor_faults - before.minor_faults) / seconds,
            (process.major_faults - before.major_faults) / seconds,
        )
