"""Concludes from the evidence which ranks the others wait for.

The result is a `Finding`, which `wording` turns into a sentence. If boxes number the collectives (on phalanx, on Gloo
from torch 2.14 on, and on NCCL by its Flight Recorder), the numbers show which ranks are late: those whose last
collective in the group has a lower number. Otherwise, only stacks can be compared. If all ranks wait, in calls that do
not match, the smaller set of ranks counts as the culprits. For a run that has ended, the same findings are drawn from
saved boxes and error files (`past`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from phalanx.diagnose.why.activity import Activity, Call
from phalanx.diagnose.why.evidence import Evidence

WORLD = "default"
"""Name of the group of all ranks."""
_FAILED = ("raised", "killed", "exited")  # ways in which a rank fails on its own, not as a victim


@dataclasses.dataclass(frozen=True)
class Finding:
    """Why a job does not continue.

    Attributes:
        kind: ``absent``: the culprits have not made the call in which others wait. ``halted``: the culprits have made
            that call, and can't continue. ``fell``: the culprits failed, and ended the job. ``done``: all ranks
            finished. ``circle``: ranks wait for messages of each other. ``differ``: ranks wait in different calls.
            ``together``: all wait in one call, and none is missing here. ``elsewhere``: the missing ranks are on other
            hosts. ``apart``: no rank waits for another. ``starting``: no rank runs here yet.
        culprits: Ranks that the others wait for, lowest first.
        call: Operation in which most of the other ranks wait; None if none waits.
        waiters: Ranks that wait for the culprits.
        missing: Ranks that are not on this host, if the finding is ``elsewhere``.
        alone_s: Seconds since the first rank here was started, if the missing ranks have not called
            ``init_process_group`` and nothing suggests another host; otherwise None.
        hosts: Names of the other hosts. For a job that has ended, these are the hosts that are known. For a running
            job, they are all other hosts if all have answered and none has a missing rank; otherwise, there are none.
        since_s: Duration of the longest wait in seconds; None if that is unknown.
        since_is_least: Whether that wait may have lasted longer.
        is_over: Whether the job has ended, so that the finding describes its end.
    """

    kind: str
    culprits: tuple[int, ...] = ()
    call: Call | None = None
    waiters: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    alone_s: float | None = None
    hosts: tuple[str, ...] = ()
    since_s: float | None = None
    since_is_least: bool = False
    is_over: bool = False


def conclude(evidence: Evidence) -> Finding:
    """Return why the job does not continue, or why it ended."""
    job, doings = evidence.job, evidence.doings
    if job.has_ended:
        found = dataclasses.replace(find(doings, job.world_size), is_over=True, hosts=evidence.hosts)
        return _by_cause(found, doings)
    if not job.ranks:
        return Finding("starting")
    found = find(doings, job.world_size)
    if found.kind == "elsewhere" and evidence.has_all_hosts:
        return dataclasses.replace(found, hosts=tuple(sorted({*evidence.hosts})))
    is_joining = found.call is not None and found.call.op == "init_process_group"
    if found.kind == "elsewhere" and is_joining and job.is_of_this_host:
        ages = [rank.process.age_s for rank in job.ranks if rank.process is not None]
        return dataclasses.replace(found, alone_s=max(ages, default=None))
    return found


def _by_cause(found: Finding, doings: Sequence[Activity]) -> Finding:
    """Return the finding about a job that has ended, with the ranks that failed on their own as the culprits."""
    if doings and all(doing.how == "returned" for doing in doings):
        return Finding("done", tuple(doing.rank for doing in doings), is_over=True)
    how = {(doing.how, doing.detail) for doing in doings}
    if len(doings) > 1 and len(how) == 1 and doings[0].how == "killed":  # all were killed at once: find what hung
        hung = find([dataclasses.replace(doing, call=doing.was_in) for doing in doings])
        if hung.kind not in ("apart", "elsewhere", "together"):
            return dataclasses.replace(hung, is_over=True, hosts=found.hosts)
    failed = tuple(doing.rank for doing in doings if doing.how in _FAILED)
    if not failed:
        return found
    waiters = tuple(doing.rank for doing in doings if doing.call is not None)
    return dataclasses.replace(found, kind="fell", culprits=failed, waiters=waiters, since_s=None)


def find(activities: Sequence[Activity], world_size: int = 0) -> Finding:
    """Return the ranks for which the others wait.

    Args:
        world_size: Number of ranks on all hosts; 0 if it is unknown.
    """
    waiting = [doing for doing in activities if doing.call is not None and not doing.is_halted]
    if not waiting:
        halted = tuple(doing.rank for doing in activities if doing.is_halted and doing.how != "ended")
        return Finding("halted" if halted else "apart", halted)
    found = _of_waiting(waiting, activities, world_size)
    timed = [
        (doing.call.since_s, doing.call.since_is_least)
        for doing in waiting
        if doing.call and doing.call.since_s is not None
    ]
    since_s, is_least = max(timed, default=(None, False))
    return dataclasses.replace(found, since_s=since_s, since_is_least=is_least)


def _of_waiting(waiting: Sequence[Activity], activities: Sequence[Activity], world_size: int) -> Finding:
    by_rank = {doing.rank: doing for doing in activities}
    awaited = {doing.rank: _awaited(doing, activities) for doing in waiting}
    roots = sorted(rank for rank in set().union(*awaited.values()) if rank not in awaited)
    call = _most_common([doing.call for doing in waiting if doing.call is not None])
    waiters = tuple(rank for rank in awaited if rank not in roots)
    if roots:
        of_them = [doing.call for doing in waiting if doing.call is not None and awaited[doing.rank] & {*roots}]
        call = _most_common(of_them)
        has_called = all((theirs := by_rank[rank].call) is not None and theirs.is_same(call) for rank in roots)
        return Finding("halted" if has_called else "absent", tuple(roots), call, waiters)
    if circle := _circle(awaited, by_rank):
        return Finding("circle", circle, by_rank[circle[0]].call, waiters)
    if any(awaited.values()) or any(_is_at_odds(doing.call, call) for doing in waiting if doing.call is not None):
        return _differing(waiting, call)
    missing = tuple(rank for rank in range(world_size) if rank not in by_rank)
    return Finding("elsewhere" if missing else "together", (), call, waiters, missing)


def _awaited(doing: Activity, activities: Sequence[Activity]) -> set[int]:
    """Return the ranks of this host that a waiting rank waits for."""
    call = doing.call
    assert call is not None
    others = [one for one in activities if one.rank != doing.rank]
    if call.is_message and call.group in ("", WORLD) and call.peer is not None:
        return {one.rank for one in others if one.rank == call.peer}
    if call.is_message:  # any member may be the peer, because a smaller group has numbers of its own
        return {
            one.rank for one in others if one.call is None and (not one.progress or call.group in ("", *one.progress))
        }
    if call.seq:
        late = {one.rank for one in others if _is_late(one, call)}
        if not late:  # a box may have dropped the rank's last call in this group
            late = {
                one.rank for one in others if one.has_forgotten and one.call is None and call.group not in one.progress
            }
        return late or {one.rank for one in others if one.is_halted and one.progress.get(call.group, 0) == call.seq}
    return {one.rank for one in others if one.is_halted or one.call is None or not one.call.is_same(call)}


def _circle(awaited: Mapping[int, set[int]], by_rank: Mapping[int, Activity]) -> tuple[int, ...]:
    """Return ranks in a circle, each of which waits for a message of the next; empty if there are none."""
    for first in awaited:
        path = [first]
        while (call := by_rank[path[-1]].call) is not None and call.is_message and len(awaited[path[-1]]) == 1:
            (following,) = awaited[path[-1]]
            if following in path:
                return tuple(path[path.index(following) :])
            path.append(following)
    return ()


def _is_late(one: Activity, call: Call) -> bool:
    """Whether a rank has not begun a numbered collective of its group.

    If the rank's box shows which collectives the rank has begun, a rank outside the group is not late. Otherwise
    membership is unknown, and a rank is late if it is not seen waiting in the same call.
    """
    if one.progress:
        is_member = call.group == WORLD or call.group in one.progress
        return is_member and one.progress.get(call.group, 0) < call.seq
    return one.call is None or not one.call.is_same(call)


def _is_at_odds(call: Call, other: Call) -> bool:
    """Whether two calls should be the same by their number or line, but are different operations."""
    return call.is_same(other) and call.op != other.op


def _differing(waiting: Sequence[Activity], call: Call) -> Finding:
    """Return the finding if all ranks wait, but in different calls: the culprits are the ranks not in `call`."""
    alike = tuple(
        doing.rank
        for doing in waiting
        if doing.call is not None and doing.call.is_same(call) and doing.call.op == call.op
    )
    others = tuple(doing.rank for doing in waiting if doing.rank not in alike)
    return Finding("differ", others, call, alike)


def _most_common(calls: Sequence[Call]) -> Call:
    """Return the call in which most ranks wait; among equals, the one with the longest wait."""

    def rank(call: Call) -> tuple[int, float]:
        return sum(call.is_same(other) for other in calls), call.since_s or 0.0

    return max(calls, key=rank)
