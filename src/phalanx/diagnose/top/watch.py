"""Watches jobs: each look returns the activities of their ranks, and the resources that the ranks use.

``phalanx top`` looks once a second, on the CPUs that the job uses, so a look must cost little. Each look reads
``/proc/PID/stat`` and what is new in each box, through a `Tail` that decodes only steps and unfinished events: 1,000
events take 0.4 ms, and 2.5 ms if all are decoded. Everything else is done as often as a fixed share of a CPU allows
(`Seldom`): looking for jobs (8 ms among 160 processes), looking for the box of a rank that had none, and PSS, one rank
at a time, because the kernel locks a rank's memory while it walks all pages (8 to 20 ms if torch is imported).
nvidia-smi runs in the background; only ``--once`` and ``--json`` wait for it. A single picture takes two looks half a
second apart, because rates are differences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence

from phalanx.diagnose.jobs import Job, find_job, find_jobs, told_where
from phalanx.diagnose.top.gpu import Gpus
from phalanx.diagnose.top.rank import RankView, Seldom, WatchedRank
from phalanx.launch.screen.stragglers import StragglerWatch
from phalanx.record.box import Box, open_box

FIRST_S = 0.5
"""Time between the first two looks, which are needed because rates are differences."""
_PSS_S = 0.2  # limit for the measuring of new ranks in one look
_FIRST_EVENTS, _LEAST_FIRST_EVENTS = 16_384, 256  # read from new ranks: from all together, and from each at least
_MOST_EVENTS = 4_000  # limit for the events that a look decodes if it decodes all kinds; the newest are a sample
_LEAST_EVENTS = 50  # at least this many events are decoded of each rank, however many ranks there are


@dataclasses.dataclass(frozen=True)
class JobView:
    """A job, and those of its ranks that run on this host.

    Attributes:
        name: Script or module that the job runs, such as ``train.py``.
        world_size: Number of ranks on all hosts; 0 if it is not known.
        seconds: Time since the first of these ranks was started; None if all have ended.
        folder: Folder of the job's logs; empty if it is not known.
        state: Activity of the job's launcher while no rank of the job runs here; empty if ranks run here, or have
            ended.
        straggler: Line about the rank that slows the other ranks down; empty if there is none.
    """

    name: str
    launcher: str
    launcher_pid: int
    world_size: int
    seconds: float | None
    folder: str
    state: str
    straggler: str
    ranks: list[RankView]


class _Stragglers:
    """The ranks of a job, compared by their black boxes.

    Args:
        pids: Processes of the ranks; they are compared only if all of them have boxes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._places: list[tuple[int, int]] = []
        with contextlib.suppress(OSError, ValueError):
            self._places = [place for place in map(open_box, pids) if place is not None]
        self._watch = StragglerWatch(self._places if len(self._places) == len(pids) else (), lambda _: None)

    def look(self) -> None:
        """Compare the ranks, if a second has passed since the last look."""
        self._watch.look()

    @property
    def line(self) -> str:
        """Line about a straggler; empty if there is none."""
        return self._watch.line

    @property
    def costs(self) -> dict[int, float]:
        """Cost of each rank that the line names."""
        return self._watch.costs

    def close(self) -> None:
        for fd, _ in self._places:
            os.close(fd)


def _is_same(one: Job, other: Job) -> bool:
    """Whether two looks saw the same job; its launcher may have started other ranks since."""
    if one.launcher_pid or other.launcher_pid:
        return (one.name, one.launcher_pid) == (other.name, other.launcher_pid)
    return bool(one.pids & other.pids)


class Watch:
    """Jobs of this host that are looked at repeatedly.

    Args:
        wanted: Job or pid to watch; empty for all jobs of this user.
        interval_s: Seconds between two looks.
        counts: Whether each look decodes the events of all kinds, for `news_of`. PSS is then not measured, ranks are
            compared only by `compare`, and a rank that is in no recorded operation is only known to compute or not.

    Attributes:
        where: Line about the folder of a job that was found by its name; empty if the job runs in this folder.

    Raises:
        LookupError: There is no such job, or there are several.
    """

    def __init__(self, wanted: str, interval_s: float, *, counts: bool = False) -> None:
        self._interval_s, self._counts = interval_s, counts
        self._gpus = Gpus()
        self._ranks: dict[int, WatchedRank] = {}  # by pid
        self._only = find_job(wanted) if wanted else None
        self.where: str = told_where(self._only, wanted) if self._only is not None else ""
        self._jobs: list[Job] = []
        self._finding = Seldom(10.0, share=0.001)
        self._measuring_pss = Seldom(10.0, share=0.001)
        self._stragglers: dict[tuple[int, ...], _Stragglers] = {}  # by the pids of a job's ranks

    def look(self, wait_s: float = 0.0) -> list[JobView]:
        """Return the jobs as they are now, newest last.

        Args:
            wait_s: Seconds to wait for other programs, such as nvidia-smi.
        """
        if self._finding.is_due():
            with self._finding.measured():
                self._find()
        self._gpus.look(wait_s)
        if not self._counts:
            self._measure_pss(max(wait_s, _PSS_S))
        if not self._counts:
            self.compare()
        views = [self._view(job) for job in self._jobs]
        if any(view.state or any(rank.state == "gone" for rank in view.ranks) for view in views):
            self._finding.hasten(1.0)
        return views

    def compare(self) -> None:
        """Compare the ranks of each job, for the stragglers that the next look tells."""
        for job in self._jobs:
            self._compared(job).look()

    def news_of(self, pid: int) -> Box | None:
        """Return the events of a rank that the last look has read; None if it has read nothing."""
        watched = self._ranks.get(pid)
        return watched.news if watched is not None else None

    def close(self) -> None:
        self._gpus.close()
        for rank in self._ranks.values():
            rank.close()
        for stragglers in self._stragglers.values():
            stragglers.close()

    def _find(self) -> None:
        jobs = find_jobs()
        if (only := self._only) is not None:
            jobs = [job for job in jobs if _is_same(job, only)] or [
                dataclasses.replace(job, state="") for job in self._jobs or [only]
            ]
        self._jobs = jobs
        found = {rank.pid: rank for job in jobs for rank in job.ranks}
        for pid, rank in found.items():
            watched = self._ranks.get(pid)
            if watched is None or not watched.takes(rank):
                most = max(_LEAST_EVENTS, _MOST_EVENTS // len(found)) if self._counts else 0
                first = max(_LEAST_FIRST_EVENTS, _FIRST_EVENTS // len(found))
                self._ranks[pid] = WatchedRank(rank, self._interval_s, most, first)
        for pid in self._ranks.keys() - found.keys():
            self._ranks.pop(pid).close()
        for pids in [pids for pids in self._stragglers if not found.keys() >= {*pids}]:
            self._stragglers.pop(pids).close()

    def _measure_pss(self, limit_s: float) -> None:
        """Measure new ranks, as many as the limit allows, then one rank at a time in turn."""
        ends_s = time.monotonic() + limit_s
        for rank in self._ranks.values():
            if not rank.pss_measured_at and time.monotonic() < ends_s:
                rank.measure_pss()
        if self._ranks and self._measuring_pss.is_due():
            with self._measuring_pss.measured():
                min(self._ranks.values(), key=lambda rank: rank.pss_measured_at).measure_pss()

    def _compared(self, job: Job) -> _Stragglers:
        pids = tuple(rank.pid for rank in job.ranks if rank.process is not None)
        if pids not in self._stragglers:
            self._stragglers[pids] = _Stragglers(pids)
        return self._stragglers[pids]

    def _view(self, job: Job) -> JobView:
        living = [rank.process for rank in job.ranks if rank.process is not None]
        stragglers = self._compared(job)
        looks = [self._ranks[rank.pid].look(self._gpus.of(rank.pid)) for rank in job.ranks]
        return JobView(
            name=job.name,
            launcher=job.launcher,
            launcher_pid=job.launcher_pid,
            world_size=job.world_size,
            seconds=min(living, key=lambda process: process.start_time).age_s if living else None,
            folder=job.folder,
            state=job.state,
            straggler=stragglers.line or (job.straggler and f"phalanx run has said: {job.straggler}"),
            ranks=[dataclasses.replace(look, cost=stragglers.costs.get(look.rank, 0.0)) for look in looks],
        )
