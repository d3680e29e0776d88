"""Evidence about a job: all its processes, examined at the same time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from phalanx.diagnose.jobs import NO_RANK, Job
from phalanx.diagnose.stacks import Stacks, Thread, read_stacks
from phalanx.diagnose.why import flight
from phalanx.diagnose.why.activity import HAS_ENDED, Activity, Call, Look, activity_of, has_collectives
from phalanx.failure.losses import Loss, load_losses
from phalanx.host.kernel import call_ended_by_a_halt, stand_of
from phalanx.host.processes import Process, is_python, off_limits, process_of
from phalanx.record.box import Box, box_of_process

_STACKS_S = 1.0


@dataclasses.dataclass(frozen=True)
class RankSeen:
    """What was seen of a rank and of its descendants.

    Attributes:
        native: Threads with native frames; empty if these were not read.
    """

    doing: Activity
    look: Look
    helpers: tuple[Look, ...] = ()
    native: tuple[Thread, ...] = ()

    @property
    def needs_native(self) -> bool:
        """Whether native frames are needed to explain what the rank does, because native code sleeps with the GIL."""
        return bool(self.look.stacks.threads) and self.doing.how in ("gil", "starved")

    @property
    def interruptible_call(self) -> str:
        """System call that would fail if the process were halted to read native frames; "" if none would."""
        return call_ended_by_a_halt(self.doing.pid)


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Evidence from the other hosts of a job.

    Attributes:
        seen: Ranks of the other hosts.
        hosts: Names of the hosts that have answered, with or without ranks.
        is_complete: Whether all other hosts have answered.
    """

    seen: tuple[RankSeen, ...] = ()
    hosts: tuple[str, ...] = ()
    is_complete: bool = False


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything known about a job: what its ranks do, or did when it ended.

    Attributes:
        job: The job; ranks that `seen` lacks are on hosts that have not answered.
        seen: The ranks of this host and of the other hosts that have answered, lowest first.
        hosts: Names of the other hosts: if the job runs, those that have answered, else those that are known.
        has_all_hosts: Whether every other host of a running job has answered.
        asked: Answer of ``phalanx why`` that a waiting rank got before the job ended; empty if there is none.
        ended_by: Event that ended ``phalanx run``, such as ``phalanx run got SIGTERM``; empty if a rank ended it.
        losses: Losses of ranks and hosts after which the job was to continue, if its run has recorded them.
    """

    job: Job
    seen: tuple[RankSeen, ...] = ()
    hosts: tuple[str, ...] = ()
    has_all_hosts: bool = False
    asked: str = ""
    ended_by: str = ""
    losses: tuple[Loss, ...] = ()

    @property
    def doings(self) -> list[Activity]:
        """What each rank does."""
        return [one.doing for one in self.seen]

    @property
    def has_record(self) -> bool:
        """Whether anything is known about any rank; always True while the job runs."""
        return not self.job.has_ended or any(doing.how != "unrecorded" for doing in self.doings)


def gather(job: Job, others: Callable[[], Elsewhere] = Elsewhere) -> Evidence:
    """Return what the ranks of a running job do.

    Args:
        others: Function that returns the evidence from other hosts, called after this host was examined.
    """
    seen = look_at(job)
    here = {one.doing.rank for one in seen}
    elsewhere = others()
    seen += tuple(one for one in elsewhere.seen if one.doing.rank not in here)
    return Evidence(
        job,
        seen=tuple(sorted(seen, key=lambda one: one.doing.rank)),
        hosts=elsewhere.hosts,
        has_all_hosts=elsewhere.is_complete,
        losses=tuple(load_losses(Path(job.folder))) if job.folder else (),
    )


def with_native(evidence: Evidence, ranks: Sequence[int], timeout_s: float) -> Evidence:
    """Return the evidence, with native frames of those of the `ranks` that need such frames and can be halted."""
    pids = [
        one.doing.pid
        for one in evidence.seen
        if one.doing.rank in ranks and not one.doing.host and one.needs_native and not one.interruptible_call
    ]
    stacks = read_stacks(pids, timeout_s, native=True)

    def completed(one: RankSeen) -> RankSeen:
        is_read = one.doing.pid in stacks and not one.doing.host
        return dataclasses.replace(one, native=stacks[one.doing.pid].threads) if is_read else one

    return dataclasses.replace(evidence, seen=tuple(map(completed, evidence.seen)))


def look_at(job: Job, timeout_s: float = _STACKS_S, *, native: bool = False) -> tuple[RankSeen, ...]:
    """Return what the ranks of a job and their descendants are doing.

    Args:
        native: Whether to read native frames, too.
    """
    asking = os.getpid()  # left out: a rank may have started this very process
    pids = [
        one.pid
        for rank in job.ranks
        for one in (rank.process, *rank.helpers)
        if one and one.state not in "ZX" and one.pid != asking
    ]
    ends_s = time.monotonic() + flight.ANSWERS_S
    asked = {rank.pid: flight.ask(rank.rank, rank.process) for rank in job.ranks if rank.process and rank.pid in pids}
    stacks = read_stacks(pids, timeout_s, native=native)
    seen = []
    for rank in job.ranks:
        look = _look(rank.pid, rank.process, stacks)
        if rank.rank == NO_RANK and not look.stacks.threads and not is_python(rank.pid):
            why_not = off_limits(rank.pid) or "is no Python process of this user"
            stacks_of_none = Stacks(problem=f"it {why_not}")
            look = dataclasses.replace(look, stacks=stacks_of_none, box_problem="")
        if (question := asked.get(rank.pid)) and not has_collectives(look.box) and (box := question.answer(ends_s)):
            look = dataclasses.replace(look, box=box, box_problem="")
        living = [helper for helper in rank.helpers if helper.pid in stacks and process_of(helper.pid) is not None]
        helpers = tuple(_look(helper.pid, helper, stacks) for helper in living)
        seen.append(RankSeen(activity_of(rank.rank, look, helpers), look, helpers))
    return tuple(seen)


def _look(pid: int, process: Process | None, stacks: dict[int, Stacks]) -> Look:
    if process is None or process.state in "ZX":
        return Look(pid, process)
    box, problem = _box(pid)
    return Look(
        pid=pid,
        process=process_of(pid),  # again, because the process may have ended while the stacks were read
        stacks=stacks[pid],
        stand=stand_of(pid),
        box=box,
        box_problem=problem,
    )


def _box(pid: int) -> tuple[Box | None, str]:
    try:
        return box_of_process(pid), ""
    except ValueError as error:
        return None, f"its black box can't be read: {error}"
    except PermissionError:
        return None, "its black box can't be read: permission denied"
    except OSError:  # the process has just ended
        return None, ""


def _name(call: Call | None) -> object:
    return (call.op, call.seq, call.group, call.peer) if call else None


def group_alike(seen: Iterable[RankSeen], first: Sequence[int]) -> list[list[RankSeen]]:
    """Return ranks grouped by equal stacks of the user's code: groups with ranks in `first`, then small, then large."""
    groups: dict[object, list[RankSeen]] = {}
    for one in seen:
        doing = one.doing
        threads = tuple(
            tuple((frame.function, frame.file, frame.line) for frame in thread.own_frames)
            for thread in one.look.stacks.threads
            if thread.own_frames
        )
        what = [doing.how, doing.gave_up, _name(doing.call)]
        if doing.how in HAS_ENDED:
            what += [doing.detail, doing.frame.site if doing.frame else "", _name(doing.was_in or doing.last)]
        groups.setdefault((threads, *what, one.look.stacks.problem), []).append(one)
    return sorted(groups.values(), key=lambda group: (group[0].doing.rank not in first, len(group)))
