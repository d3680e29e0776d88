"""Puts findings into words: one sentence for the answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence

from phalanx._text import columns, counted, duration, enumerated, plural, shortened
from phalanx.debugging import AT_BREAKPOINT
from phalanx.diagnose.jobs import NO_JOB
from phalanx.diagnose.stacks import Thread
from phalanx.diagnose.why.activity import JOINING, Activity, Call
from phalanx.diagnose.why.clauses import MOMENT_S, NAMES, NO_TIME_S, call_text, clause, ranks
from phalanx.diagnose.why.evidence import Evidence
from phalanx.diagnose.why.findings import Finding
from phalanx.failure.losses import Loss, sign_of, who_of, words_of
from phalanx.host.processes import off_limits

_SAME_CALLS = "all ranks of a group must make the same calls in the same order"
_SAME_GROUPS = "every rank must call new_group, in the same order, member or not"


def answer(evidence: Evidence, finding: Finding) -> str:
    """Return the answer in one sentence, with a remark on missing evidence."""
    job = evidence.job
    if finding.kind == "starting":
        return job.waits
    if job.launcher == NO_JOB:
        (one,) = evidence.seen
        is_none = off_limits(one.doing.pid) or "is no rank of a job"
        return f"process {one.doing.pid} ({job.name}) {is_none}; it {clause(one.doing)}"
    said = sentence(finding, evidence.doings)
    unread = [one for one in evidence.seen if one.look.stacks.problem and not one.look.has_ended and not one.look.box]
    if finding.kind == "apart" and unread:
        stacks = f"the {plural(len(unread), 'stack')} of {ranks([one.doing.rank for one in unread])} can't be read"
        return f"as far as is known, {said}; {stacks}: {unread[0].look.stacks.problem}"
    return said if evidence.has_record else f"{said}: {why_no_record(evidence)}"


def why_no_record(evidence: Evidence) -> str:
    """Return why a run has left no record."""
    return evidence.ended_by or "phalanx run itself was probably killed"


def sentence(finding: Finding, activities: Sequence[Activity]) -> str:
    """Return a finding about ranks in one sentence."""
    killed = ""
    if finding.is_over and finding.kind != "fell" and activities and all(one.how == "killed" for one in activities):
        killed = f"{ranks([one.rank for one in activities])} were killed by {activities[0].detail}: "
        activities = [dataclasses.replace(one, how="silent", call=one.was_in) for one in activities]
    by_rank = {doing.rank: doing for doing in activities}
    culprits = [by_rank[rank] for rank in finding.culprits if rank in by_rank]
    return killed + _SENTENCES[finding.kind](finding, culprits, list(activities))


def _absent(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    assert finding.call is not None
    have = _have(finding, len(culprits))
    not_done = f"{ranks(finding.culprits)} {have} not {_missing(finding, finding.call, activities)}"
    said = "; ".join([not_done, *_each(culprits), _wait(finding, activities)])
    return f"{said}: {_SAME_GROUPS}" if finding.call.op == "new_group" else said


def _missing(finding: Finding, call: Call, activities: Sequence[Activity]) -> str:
    """Return what others wait for and the culprits have not done, such as ``called all_reduce #7``."""
    if call.is_message:
        return _missing_message(finding, call, activities)
    if call.op == AT_BREAKPOINT:
        done = "left"
    elif call.op in NAMES:
        done = "reached"
    else:  # not "called": a rank that has ended may have called the operation before its worker thread began it
        done = "begun" if finding.is_over else "called"
    return f"{done} {call_text(call)}"


def _missing_message(finding: Finding, call: Call, activities: Sequence[Activity]) -> str:
    waiters = [one.rank for one in activities if one.rank in finding.waiters and one.call and one.call.is_same(call)]
    if call.peer is None or len(finding.culprits) > 1:  # the sender is not known for certain
        return f"made the call that {call_text(call, True)} {_waits(finding)} for"
    at = f" at {call.site}" if call.site else ""
    awaited = f"{plural(len(waiters), 'message')} that {ranks(waiters)} {_waits(finding, len(waiters))}"
    return f"received the {awaited} to send{at}" if "send" in call.op else f"sent the {awaited} for in {call.op}{at}"


def _halted(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    named = [f"rank {doing.rank} {clause(doing, is_culprit=True)}" for doing in culprits[:3]]
    if finding.call is not None and all(doing.call is not None for doing in culprits):
        named[-1] += f", within {call_text(finding.call)}"
    return "; ".join([*named, *([_wait(finding, activities)] if finding.waiters else [])])


def _fell(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    waiting = (
        f"; {_wait(finding, activities)} in {call_text(finding.call, True)}" if finding.call and finding.waiters else ""
    )
    alike: dict[str, list[int]] = {}
    for doing in culprits:
        words = clause(doing)
        alike.setdefault(words if doing.how in ("raised", "exited") else f"{words} {doing.rank}", []).append(doing.rank)
    if (once := _raised_together(culprits)) and len(alike) > 1:
        return once + waiting
    by_rank = {doing.rank: doing for doing in culprits}
    return "; ".join(f"{ranks(of)} {clause(by_rank[of[0]])}" for of in [*alike.values()][:3]) + waiting


def _raised_together(culprits: list[Activity]) -> str:
    """Return the error that all ranks raised, each about its own call, such as a mismatch; "" if they did not."""
    said = [doing.detail.split(": ") for doing in culprits if doing.how == "raised"]
    if len(said) < len(culprits) or any(len(words) < 3 for words in said):
        return ""
    if len({(words[0], words[-1]) for words in said}) > 1:
        return ""
    by_place: dict[str, list[int]] = {}
    for doing, words in zip(culprits, said, strict=True):
        by_place.setdefault(": ".join(words[1:-1]), []).append(doing.rank)
    shown = [f"{ranks(of)} in {place}" for place, of in [*by_place.items()][:3]]
    more = [f"{len(by_place) - 3} more"] if len(by_place) > 3 else []
    return f"{ranks([one.rank for one in culprits])} raised {said[0][0]}: {'; '.join([*shown, *more])}: {said[0][-1]}"


def _done(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    return f"nothing went wrong: {ranks(finding.culprits)} ended with exit code 0"


def _differ(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    waits = _waits(finding)
    theirs = [
        f"{ranks((doing.rank,))} {waits} in {call_text(doing.call, True)}" for doing in culprits[:3] if doing.call
    ]
    found = f"{'; '.join(theirs)}, while {_waiting(finding, ranks(finding.waiters))}"
    makes_group = any(doing.call is not None and doing.call.op == "new_group" for doing in activities)
    return found if _may_run(finding) else f"{found}: {_SAME_GROUPS if makes_group else _SAME_CALLS}"


def _circle(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    each = [
        f"{ranks((doing.rank,))} {_waits(finding)} in {call_text(doing.call, True)}"
        for doing in culprits[:4]
        if doing.call
    ]
    wait = _waits(finding, len(finding.culprits))
    return f"{ranks(finding.culprits)} {wait} for each other's messages: {'; '.join(each)}"


def _together(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    assert finding.call is not None
    calls = [(doing.rank, doing.call) for doing in activities if doing.call is not None]
    if all(call.is_message for _, call in calls):
        each = [f"rank {rank} {_waits(finding)} in {call_text(call, True)}" for rank, call in calls[:4]]
        senders = [rank for rank, call in calls if "send" in call.op]
        why = "nobody sends one" if not senders else "nobody takes one" if len(senders) == len(calls) else "none fits"
        return f"{'; '.join(each)}: all wait for a message, and {why}"
    call = call_text(finding.call, True)
    if finding.is_over:
        return f"{_all(finding.waiters, was=True)} in {call}, and no rank was missing: data was under way"
    found = f"{_all(finding.waiters)} in {call}, and no rank is missing"
    if finding.call.op in JOINING:
        return f"{found}: they are making a group"
    if finding.call.seq:
        return f"{found}: they are exchanging data, or the network between hosts is slow"
    if _may_run(finding):
        return f"{found}: data is under way"
    return f"{found}: a rank made an extra call or skipped one earlier, or data is still in flight; {_SAME_CALLS}"


def _elsewhere(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    waiting = _waiting(finding, ranks(finding.waiters))
    if finding.is_over:
        where = enumerated("host", finding.hosts) if finding.hosts else "another host"
        there = "on that host" if len(finding.hosts) < 2 else "there"
        return f"{waiting}, for {ranks(finding.missing)}, on {where}; run phalanx why {there}"
    if finding.alone_s is not None:
        one = len(finding.missing) == 1
        absent = f"{ranks(finding.missing)} of {len(activities) + len(finding.missing)}"
        absent += f" {'does' if one else 'do'} not run here and {'has' if one else 'have'} not come to it"
        begun = f"{ranks(finding.waiters)} began {duration(finding.alone_s)} ago and "
        waits = waiting.removeprefix(ranks(finding.waiters)).strip()
        where = "it, or ask on its host" if one else "them, or ask on their hosts"
        return f"{begun}{waits}; {absent}: start {where}"
    if finding.hosts:
        have = "has" if len(finding.missing) == 1 else "have"
        return f"{waiting}; {ranks(finding.missing)} {have} not started yet on {enumerated('host', finding.hosts)}"
    there = f"{ranks(finding.missing)} {'runs' if len(finding.missing) == 1 else 'run'}"
    return f"{waiting}; {there} on other hosts that have not answered: type phalanx why there"


def _apart(finding: Finding, culprits: list[Activity], activities: list[Activity]) -> str:
    if not activities:
        return "no rank of this job runs on this host"
    if all(doing.how == "unrecorded" for doing in activities):
        return "it ended without a record"
    if len(activities) == 1:
        (doing,) = activities
        return f"{f'rank {doing.rank}' if doing.rank >= 0 else f'pid {doing.pid}'} {clause(doing)}"
    if ended := [doing for doing in activities if doing.how == "ended"]:
        living = [f"rank {doing.rank} {clause(doing)}" for doing in activities if doing.how != "ended"]
        have = "has" if len(ended) == 1 else "have"
        return "; ".join([*living[:3], f"{ranks([doing.rank for doing in ended])} {have} ended"])
    same = len({(doing.how, doing.frame) for doing in activities}) == 1
    each = [f"{'each' if same else f'rank {doing.rank}'} {clause(doing)}" for doing in activities]
    known = f"no rank {_waits(finding)} for another"
    if any(doing.how == "silent" for doing in activities):  # other backends do not record messages
        known = "no wait for another rank is on record"
    return "; ".join([known, *each[: 1 if same else 3]])


_SENTENCES = {
    "absent": _absent,
    "halted": _halted,
    "fell": _fell,
    "done": _done,
    "circle": _circle,
    "differ": _differ,
    "together": _together,
    "elsewhere": _elsewhere,
    "apart": _apart,
}


def words_of_loss(loss: Loss) -> str:
    """Return a sentence on which rank or host a job has lost, when, and how it continued."""
    at = time.strftime("%H:%M:%S UTC", time.gmtime(loss.at_s))
    return f"Lost earlier, at {at}: {who_of(loss)}, {sign_of(loss)}; {words_of(loss, 'resumed')}"


def caution(finding: Finding) -> str:
    """Return a warning that a finding may mean nothing; "" if there is no reason for one."""
    is_joining = finding.kind == "together" and finding.call is not None and finding.call.op in JOINING
    if finding.since_s is None and is_joining:
        return "The job may well be running. Ask again to be sure."
    if finding.since_s is None or not _may_run(finding) or finding.alone_s is not None:
        return ""
    lasted = f"{'at least ' * finding.since_is_least}{duration(finding.since_s)}"
    return f"The longest wait has lasted {lasted}: the job may well be running. Ask again to be sure."


def _may_run(finding: Finding) -> bool:
    """Whether all waits are so short that ranks may have moved on while they were examined one after another."""
    return not finding.is_over and finding.since_s is not None and finding.since_s < MOMENT_S


def thread_lines(
    threads: Sequence[Thread], pid: int, most_frames: int, *, without: Collection[str] = ()
) -> Iterator[str]:
    """Yield the threads of a process that are in the user's code, each with at most `most_frames` of its frames.

    Args:
        without: Owners whose frames are counted instead of shown where they are a thread's innermost frames.
    """
    for thread in threads:
        if thread.number != pid:
            if not thread.own_frames:
                continue
            yield f"  thread {thread.name or thread.number}"
        own = next((number for number, frame in enumerate(thread.frames) if not frame.owner), 0)
        inner = next((number for number, frame in enumerate(thread.frames) if frame.owner not in without), 0)
        last = [own] if own >= inner + most_frames else []  # the user's frame, if too many library frames hide it
        shown = [*range(inner, min(inner + most_frames - len(last), len(thread.frames))), *last]
        lines = columns([(shortened(thread.frames[number].function), thread.frames[number].site) for number in shown])
        num_passed = 0
        for number, line in zip(shown, lines, strict=True):
            if number > num_passed:
                yield _left_out(number - num_passed)
            yield f"    {line}"
            num_passed = number + 1
        if more := len(thread.frames) - num_passed:
            yield _left_out(more)


def _left_out(num_frames: int) -> str:
    return f"    ... {counted(num_frames, 'more frame')}"


# ---- parts of sentences --------------------------------------------------------------------------------------------


def _each(culprits: Sequence[Activity]) -> list[str]:
    if len(culprits) == 1:
        return [f"it {clause(culprits[0], is_culprit=True)}"]
    more = [f"{len(culprits) - 2} more"] if len(culprits) > 2 else []
    return [*(f"rank {doing.rank} {clause(doing, is_culprit=True)}" for doing in culprits[:2]), *more]


def _waiting(finding: Finding, who: str) -> str:
    assert finding.call is not None
    return f"{who} {_waits(finding, len(finding.waiters))} in {call_text(finding.call, True)}"


def _wait(finding: Finding, activities: Sequence[Activity]) -> str:
    them = "it" if len(finding.culprits) == 1 else "them"
    number = len(finding.waiters)
    gave_up = [doing.gave_up for doing in activities if doing.rank in finding.waiters]
    raised = f", and raised {gave_up[0]}" if gave_up and gave_up[0] and len({*gave_up}) == 1 else ""
    who = counted(number, "rank")
    if finding.since_s is not None and finding.since_s >= NO_TIME_S:
        have = "" if finding.is_over else f"{_have(finding, number)} "
        if finding.since_is_least and number > 1:
            return f"{who} {have}waited for {them}, the longest for at least {duration(finding.since_s)}{raised}"
        about = "at least " if finding.since_is_least else "" if number == 1 else "up to "
        return f"{who} {have}waited {about}{duration(finding.since_s)} for {them}{raised}"
    return f"{who} {_waits(finding, number)} for {them}{raised}"


def _waits(finding: Finding, number: int = 1) -> str:
    return "waited" if finding.is_over else "waits" if number == 1 else "wait"


def _have(finding: Finding, number: int) -> str:
    return "had" if finding.is_over else "has" if number == 1 else "have"


def _all(numbers: Sequence[int], *, was: bool = False) -> str:
    one, several = ("was", "were") if was else ("is", "are")
    few = {1: f"rank {numbers[0]} {one}", 2: f"both ranks {several}"} if numbers else {}
    return few.get(len(numbers), f"all {len(numbers)} ranks {several}")
