"""Looks at all processes of a job at once, and finds whom it waits for."""

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
from phalanx.diagnose.why.findings import Finding, find
from phalanx.host.kernel import call_ended_by_a_halt, stand_of
from phalanx.host.processes import Process, is_python, off_limits, process_of
from phalanx.record.box import Box, box_of_process
from phalanx.record.losses import Loss, load_losses

TIME_S = 2.0
"""Within which a question about a running job is answered."""
_STACKS_S = 1.0
_RESERVE_S = 0.3  # of `TIME_S`, to start and to print


@dataclasses.dataclass(frozen=True)
class RankSeen:
    """A rank and the processes below it, as they were seen.

    Attributes:
        native: Threads of the rank with their native frames, where Python's alone do not tell; else none.
    """

    doing: Activity
    look: Look
    helpers: tuple[Look, ...] = ()
    native: tuple[Thread, ...] = ()


@dataclasses.dataclass(frozen=True)
class Heard:
    """What other hosts of a job have answered.

    Attributes:
        seen: Their ranks.
        hosts: Names of those that have answered, also without a rank.
        are_all: Whether no host is left that has not.
    """

    seen: tuple[RankSeen, ...] = ()
    hosts: tuple[str, ...] = ()
    are_all: bool = False


def left_record(seen: Iterable[RankSeen]) -> bool:
    """Whether anything is known of what a rank of a job that has ended did."""
    return any(one.doing.how != "unrecorded" for one in seen)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Why a job does not go on, and what shows it.

    Attributes:
        job: The job; ranks that `seen` lacks are on hosts that have not answered.
        seen: The ranks of this host, and of others that have answered; lowest first.
        asked: Answer that a rank got while the job still ran; empty if none asked, or the job runs.
        ended_by: End of ``phalanx run``, such as ``phalanx run got SIGTERM``; empty if a rank did, or it runs.
        losses: Losses of ranks and hosts after which the job was to go on, as far as its run has kept them.
    """

    job: Job
    finding: Finding
    seen: tuple[RankSeen, ...]
    asked: str = ""
    ended_by: str = ""
    losses: tuple[Loss, ...] = ()


def examine(job: Job, timeout_s: float = TIME_S, others: Callable[[], Heard] = Heard) -> Answer:
    """Return why a running job does not go on.

    Args:
        others: Function that returns what other hosts have answered, called when this one has been looked at.
    """
    deadline = time.monotonic() + timeout_s - _RESERVE_S
    seen = look_at(job, min(_STACKS_S, timeout_s - _RESERVE_S))
    here = {one.doing.rank for one in seen}
    heard = others()
    elsewhere = [one for one in heard.seen if one.doing.rank not in here]
    seen = tuple(sorted([*seen, *elsewhere], key=lambda one: one.doing.rank))
    finding = find([one.doing for one in seen], job.world_size)
    if finding.kind == "elsewhere" and heard.are_all:
        finding = dataclasses.replace(finding, hosts=tuple(sorted({*heard.hosts})))
    elif finding.kind == "elsewhere" and _joins(finding) and job.is_of_this_host:
        ages = [rank.process.age_s for rank in job.ranks if rank.process is not None]
        finding = dataclasses.replace(finding, alone_s=max(ages, default=None))
    culprits = [one for one in seen if one.doing.rank in finding.culprits and not one.doing.host]
    puzzling = [one.doing.pid for one in culprits if needs_native(one) and not halt_ends(one)]
    native = read_stacks(puzzling, max(deadline - time.monotonic(), 0.0), native=True)
    return Answer(
        job=job,
        finding=finding,
        seen=tuple(
            dataclasses.replace(one, native=native[one.doing.pid].threads)
            if one.doing.pid in native and not one.doing.host
            else one
            for one in seen
        ),
        losses=tuple(load_losses(Path(job.folder))) if job.folder else (),
    )


def _joins(finding: Finding) -> bool:
    return finding.call is not None and finding.call.op == "init_process_group"


def needs_native(one: RankSeen) -> bool:
    """Whether the frames of Python do not tell what a rank does: native code sleeps with the lock of all threads."""
    return bool(one.look.stacks.threads) and one.doing.how in ("gil", "starved")


def halt_ends(one: RankSeen) -> str:
    """Return the system call that might fail if the rank was halted to read native frames."""
    return call_ended_by_a_halt(one.doing.pid)


def look_at(job: Job, timeout_s: float = _STACKS_S, *, native: bool = False) -> tuple[RankSeen, ...]:
    """Return what the ranks of a job are doing, and the processes below them.

    Args:
        native: Whether to read native frames, too.
    """
    asking = os.getpid()  # below a rank that asks by itself
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
        process=process_of(pid),  # it may have ended while the stacks were read
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
    except OSError:  # it has just ended
        return None, ""


def _name(call: Call | None) -> object:
    return (call.op, call.seq, call.group, call.peer) if call else None


def group_alike(seen: Iterable[RankSeen], first: Sequence[int]) -> list[list[RankSeen]]:
    """Return ranks grouped by equal stacks of the user's code, those of `first` first and the largest groups last."""
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
