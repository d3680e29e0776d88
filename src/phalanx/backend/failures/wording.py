"""Turns a failure into words: what happened, on which rank, in which operation, and what to do.

**A failure is data until it is raised.** A `Failure` (`phalanx._errors`, ``csrc/control/failure.h``) holds facts and no
sentence: kind, rank, operation, the culprits with process and host, what each awaited rank is doing, what each rank
called. The core throws it, ranks on several hosts share it as JSON, stall reports are made from it, and the exception
carries it. Only this module turns it into sentences, on the rank that raises, so nothing ever parses text that was
written for people. A failure received from another process is checked against the types of the fields.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

from phalanx._errors import KINDS, Failure, PhalanxError, RankFailed
from phalanx._errors.facts import MadeCall, Peer, Standing
from phalanx._text import enumerated, joined, plural, signal_name
from phalanx.backend.failures.abort_hooks import run_hooks_of
from phalanx.backend.failures.answer import answer_to, ask_about, is_first
from phalanx.debugging import HELD_BY
from phalanx.failure.notices import notice
from phalanx.record import writer
from phalanx.record.box import FAILED
from phalanx.record.sites import IN_THREAD

_ORDER = "ake every rank of the group call the same collectives in the same order."
_FEWER_CALLS = (
    "If it printed no error, it made fewer calls: look for one under a condition that only some ranks meet "
    "(if rank == 0), or give every rank equally many batches (DistributedSampler, drop_last=True; or join())."
)
_LATER = "Pass a larger timeout to init_process_group if a wait this long is expected."
_NO_SIGNAL = (
    "Each wait_signal() needs a signal() by that rank: have one of them signal before it waits, or pass a larger "
    "timeout to init_process_group if the signal is merely late."
)
_BREAK = (
    "Have one of them make the matching call first, or start all messages before any wait: "
    "batch_isend_irecv, or isend and irecv."
)
_OF_A_THREAD = (
    "A thread that is not running the script made one of these calls while others use the group: two threads that "
    "share a group mix their calls. Give each a group of its own: new_group()."
)
_NEW_GROUP = (
    "Call new_group on every rank of the world, in the same order, also on ranks that are not in the new group; look "
    "for a call under a condition (if rank == 0)."
)
_OTHER_GROUPS = f"These ranks wait in groups of different names, which never meet. {_NEW_GROUP}"
_ALL_CALL = "Call new_group on every rank, in the same order, member or not."
_TRANSMIT_ALIKE = "Make input_split_sizes[j] of rank i equal output_split_sizes[i] of rank j."
_LISTS_ALIKE = "Give every rank a list of the same sizes."
_MEETINGS = {"join": "", "reconfigure": "reconfigure", "shrink": "shrink_group"}
"""Calls in which ranks meet, by the `op` of their failures; for ``join``, see `join_call`."""
_MEET_ALIKE = {
    "reconfigure": "Every rank with a handle in the list must call it, with the same uuid and the same handles in the "
    "same order: collect the handles of the ranks that live, and call it again with another uuid.",
    "shrink": "Every rank that stays must call it, with the same ranks_to_exclude.",
}
_ANEW = "Destroy the group and make a new one: destroy_process_group(), then init_process_group()."


def error_of(failure: Failure) -> PhalanxError:
    """Return the exception for a failure, with its facts as attributes; the group's abort hooks run first."""
    run_hooks_of(failure)
    kind = KINDS[failure.kind]
    facts: dict[str, Any] = {}
    if kind is RankFailed:
        pid = failure.culprits[0].pid if failure.culprits else None
        facts = {"pid": pid, "exit_code": failure.exit_code, "signal": failure.signal}
    text = words(failure)
    writer.note(f"{FAILED}{text.splitlines()[0]}")
    return kind(text, op=failure.op, seq=failure.seq, ranks=failure.ranks, failure=failure, **facts)


_reported: dict[str, tuple[str, int]] = {}
"""The operation that this rank has last reported as waiting, by group."""


def report_due_s(num_reports: int, stall_s: float) -> float:
    """Return how long a wait must have lasted before its next report.

    The first report is due after `stall_s`, the second 3 times `stall_s` later, and each further one 6 times `stall_s`
    after the previous one.
    """
    return stall_s * (6 * num_reports - 2 if num_reports else 1)  # 10, 40, 100, 160 s if `stall_s` is 10


def report_stall(failure: Failure, waited_s: float) -> None:
    """Print that an operation is waiting, for which ranks, and what each of them is doing; then ask why (`answer`).

    Every rank reports a wait once. If it is known which rank is the lowest waiting one, only that rank reports again.
    """
    call = failure.op, failure.seq
    if _reported.get(failure.group) == call and not is_first(failure):
        return
    _reported[failure.group] = call
    missing, stuck = several(failure.culprits), _stuck(failure)
    head = f"{_head(failure)} has waited {waited_s:.1f} s for {missing} (timeout {failure.timeout_s or 0:.1f} s)"
    advice = [_ALL_CALL] if _makes_group(failure) and _OTHER_GROUPS not in stuck else []
    writer.note(f"phalanx: {head}")
    notice([f"phalanx: {head}", *stuck, *advice])
    ask_about(failure, waited_s)


# ---- parts of sentences --------------------------------------------------------------------------------------------


def describe(peer: Peer) -> str:
    """Return ``rank 3 (pid 123) on host b``, or as much of it as is known."""
    pid = f" (pid {peer.pid})" if peer.pid is not None else ""
    return f"rank {peer.rank}{pid}" + f" on host {peer.host}" * bool(peer.host)


def several(peers: Sequence[Peer]) -> str:
    """Return ``ranks 1, 2``; on several hosts, each with its process and host."""
    if any(peer.host for peer in peers):
        return joined([describe(peer) for peer in peers])
    return enumerated("rank", [peer.rank for peer in peers])


def call_text(call: MadeCall) -> str:
    """Return a call much as the user wrote it."""
    facts = [call.dtype] if call.dtype else []
    if call.dtype:
        sizes = f"sizes={list(call.sizes)}" if call.sizes else "split sizes"
        facts.append(sizes if call.count is None else f"count={call.count}")
    if call.reduce_op:
        facts.append(f"op={call.reduce_op}")
    if call.root is not None:
        facts.append(f"{root_name(call.op)}={call.root}")
    if call.tag is not None:
        facts.append(f"tag={call.tag}")
    return f"{call.op}({', '.join(facts)})"


def join_call(group: str, op: str = "join") -> str:
    """Return the call with which a rank joins the meeting of a group of this name."""
    if op != "join":
        return _MEETINGS[op]
    return "init_process_group" if group in ("", "default") else "new_group"


def root_name(op: str) -> str:
    """Return the name of the argument that gives an operation's root: ``src`` or ``dst``."""
    return "src" if op in ("broadcast", "scatter", "recv") else "dst"


def _by_host(failure: Failure) -> str:
    """Return ``host b (ranks 2 and 3)`` for a host whose ranks are all lost, else ``rank 2 on host b``."""
    named = []
    for host in dict.fromkeys(peer.host for peer in failure.culprits):
        meant = [peer.rank for peer in failure.culprits if peer.host == host]
        numbers = f"{plural(len(meant), 'rank')} {joined(meant)}"
        named.append(f"host {host} ({numbers})" if host in failure.hosts else f"{numbers} on host {host}")
    return joined(named)


def _standings(failure: Failure) -> list[str]:
    return [f"  {describe(stand)} {_stands(stand, failure.seq)}" for stand in failure.standings]


def _stuck(failure: Failure) -> list[str]:
    """Return a line for each awaited rank, or for each rank of the circle if ranks wait for each other."""
    if not failure.circle:
        is_apart = any(stand.is_apart for stand in failure.standings)
        return [*_standings(failure), *([_OTHER_GROUPS] if is_apart else [])]
    lines = [f"  {describe(one)} waits for rank {one.awaits} in {one.where or 'a call'}" for one in failure.circle]
    return ["This is a deadlock: each of these ranks waits for the next.", *lines, _BREAK]


def _stands(stand: Standing, seq: int) -> str:
    if not stand.has_joined:
        return f"has not joined: it waits in {stand.waits_in}" if stand.waits_in else "has not joined"
    if stand.waits_in.startswith(HELD_BY):
        return f"is held by {stand.waits_in}"
    if stand.waits_in:
        return f"waits in {stand.waits_in}"
    if not seq:
        return "has not made the matching call"
    if stand.last is None:
        return f"has not called #{seq}, or only just"
    if stand.last >= seq:
        return f"is in #{stand.last} but makes no progress"
    last = f"its last collective here was #{stand.last}" if stand.last else "it has made no collective here yet"
    return f"has not called #{seq}; {last}"


def _head(failure: Failure) -> str:
    """Return the start of every message: the rank that reports the failure, and its operation."""
    if failure.op in _MEETINGS:
        called = join_call(failure.group, failure.op)
        return f"rank {failure.rank}: {called}" + f" at {failure.site}" * bool(failure.site)
    if failure.kind == "aborted" and not failure.op:
        return f"rank {failure.rank}"
    op = "the wait for " * (failure.kind == "nested_wait") + (failure.op or "an operation")
    number = f" #{failure.seq}" if failure.seq else ""
    site = f" at {failure.site}" if failure.site else ""
    return f"rank {failure.rank}: {op}{number} of group '{failure.group}'{site}"


def _look_at(peer: Peer) -> str:
    return f"\nLook at what rank {peer.rank} printed last"


def _culprit(failure: Failure) -> Peer:
    return failure.culprits[0] if failure.culprits else Peer(rank=-1)


def _reporter(failure: Failure) -> str:
    return describe(failure.by or Peer(rank=failure.rank))


# ---- the sentences -------------------------------------------------------------------------------------------------


def words(failure: Failure) -> str:
    """Return the message of a failure."""
    head = _head(failure)
    if failure.op in _MEETINGS and failure.by is not None and KINDS[failure.kind] is not RankFailed:
        head += f": rank {failure.by.rank} could not join"
    return head + _SENTENCES[failure.kind](failure)


def _calls_differ(failure: Failure) -> str:
    if not failure.calls:
        told = f"as rank {(failure.by or Peer(rank=failure.rank)).rank} reports; see its message"
        return f": the ranks of this group made calls that do not fit together, {told}"
    what, advice = _difference([call for call in failure.calls if call.op])
    threads = [_OF_A_THREAD] if any(IN_THREAD in call.site for call in failure.calls) else []
    return "\n".join([f": the ranks of this group {what}", *_table(failure), *threads, advice])


def _table(failure: Failure) -> list[str]:
    rows = []
    for call in failure.calls:
        at = f" at {call.site}" if call.site else ""
        late = "waits, or has not called yet" if call.host else "has not called yet"
        on_host = f" (host {call.host})" if call.host else ""
        rows.append(f"  rank {call.rank}: {call_text(call) + at if call.op else late}{on_host}")
    return rows


def _difference(calls: Sequence[MadeCall]) -> tuple[str, str]:
    """Return how the calls differ, and what to do about it."""
    facts: dict[str, Callable[[MadeCall], object]] = {
        "dtypes": lambda call: call.dtype,
        "sizes": lambda call: (call.count, call.sizes),
        "reduce operations": lambda call: call.reduce_op,
        "roots": lambda call: call.root,
    }
    names = [name for name, fact in facts.items() if len({fact(call) for call in calls}) > 1]
    if len({call.op for call in calls}) > 1 or not names:
        return "called different collectives", f"M{_ORDER}"
    fields = joined(names)
    advice = f"Make the {fields} the same on every rank; if these calls do not belong together, m{_ORDER}"
    return f"called {calls[0].op} with different {fields}", advice


def _sizes_differ(failure: Failure) -> str:
    sizes = failure.sizes
    if sizes is None:
        return _calls_differ(failure)
    one, other = describe(sizes.one), f"rank {sizes.other.rank}"
    elements = f"{sizes.count} {plural(sizes.count, 'element')}"
    if sizes.of is None:
        what = f"{one} sends {elements} to {other}, which expects {sizes.other_count}"
        return "\n".join([f": {what}", *_table(failure), _TRANSMIT_ALIKE])
    what = f"{one}'s list has {elements} for rank {sizes.of}, {other}'s has {sizes.other_count}"
    return "\n".join([f": {what}", *_table(failure), _LISTS_ALIKE])


def _message_differs(failure: Failure) -> str:
    if len(failure.calls) != 2:
        return _calls_differ(failure)
    expected, sent = failure.calls
    return (
        f": {call_text(expected)} does not fit: {describe(sent)} sent {call_text(sent)}\n"
        "Give recv a tensor of the dtype and size that send was given."
    )


def _rank_ended(failure: Failure) -> str:
    if failure.detail:  # the launcher's words
        how = failure.detail
    elif failure.signal is not None:
        how = f"was killed by {signal_name(failure.signal)}"
    elif failure.exit_code == 0:
        return f": {describe(_culprit(failure))} exited with code 0 without leaving the group\n{_FEWER_CALLS}"
    elif failure.exit_code is not None:
        how = f"exited with code {failure.exit_code}"
    else:
        how = "ended (its exit code was already collected by its parent)"
    return _is_victim_of(failure, how)


def _is_victim_of(failure: Failure, how: str) -> str:
    culprit = _culprit(failure)
    return f": {describe(culprit)} {how}{_look_at(culprit)}; this rank failed only as a consequence."


def _rank_left(failure: Failure) -> str:
    named, have = joined([describe(peer) for peer in failure.culprits]), "have" if len(failure.culprits) > 1 else "has"
    return f": {named} {have} left the group (destroy_process_group)\n{_FEWER_CALLS}"


def _rank_failed(failure: Failure) -> str:
    return f": {describe(_culprit(failure))} has failed, as {_reporter(failure)} reports"


def _rank_lost(failure: Failure) -> str:
    if len(failure.culprits) == 1:
        named = describe(_culprit(failure))
        text = f"{named} is gone: its process has ended, or the network to its host is broken"
    else:
        is_one_host = {peer.host for peer in failure.culprits} == set(failure.hosts[:1])
        are = "is" if is_one_host else "are"
        text = f"{_by_host(failure)} {are} not responding: their processes have ended, or the network is broken"
    text += "\nLook at what was printed there last; this rank failed only as a consequence."
    if failure.rank in failure.ranks and failure.by is not None:
        text += f"\nThis process runs: {describe(failure.by)} has lost the connection to it."
    return f": {text}"


def _rank_missing(failure: Failure) -> str:
    if failure.by is not None and failure.rank in failure.ranks:
        return _came_late(failure)
    missing = several(failure.culprits) if failure.culprits else failure.detail or "other ranks"
    if failure.by is not None:
        text = f": {_reporter(failure)} has reached its deadline and ended the group; still missing: {missing}"
    else:
        text = f" timed out after {failure.timeout_s or 0:.1f} s waiting for {missing}"
    answer = answer_to(failure)
    asked = [f"phalanx why: {answer}"] if answer else []
    return "\n".join([text, *_stuck(failure), *([] if failure.circle else [_advice(failure)]), *asked])


def _advice(failure: Failure) -> str:
    """Return what to do about ranks that did not arrive within the timeout."""
    if failure.op == "wait_signal":
        return _NO_SIGNAL
    return _NEW_GROUP if _makes_group(failure) else _LATER


def _makes_group(failure: Failure) -> bool:
    """Whether this rank waits in new_group, or every missing rank waits there for the ranks that wait here."""
    if failure.op == "join":
        return join_call(failure.group) == "new_group"
    return bool(failure.standings) and all(stand.waits_in.startswith("new_group") for stand in failure.standings)


def _came_late(failure: Failure) -> str:
    return f" came too late: {_reporter(failure)} has reached its deadline and ended the group; see its message"


def _no_turn(failure: Failure) -> str:
    return (
        f" timed out after {failure.timeout_s or 0:.1f} s: another thread of this rank is in a collective of the "
        "group, which runs one at a time\nGive each thread that calls collectives a group of its own: new_group()."
    )


def _not_met(failure: Failure) -> str:
    if failure.op in ("reconfigure", "shrink"):
        advice = _MEET_ALIKE[failure.op]
    elif join_call(failure.group) == "new_group":
        advice = _NEW_GROUP
    else:
        advice = "Start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method)."
    whose = f"the timeout of {_reporter(failure)}, which gave up" if failure.by else "the timeout"
    return "\n".join([f": {failure.detail} within {whose}. {advice}", *_stuck(failure)])


def _aborted(failure: Failure) -> str:
    if failure.by is None:
        return f": {failure.detail}"
    why = f" ({failure.detail})" if failure.detail else ""
    return f": {_reporter(failure)} aborted the group{why}{_look_at(failure.by)}."


def _interrupted(failure: Failure) -> str:
    if failure.by is None:
        return " was interrupted by a signal"
    return f": a signal interrupted {_reporter(failure)}, which ended the group{_look_at(failure.by)}."


def _destroyed(failure: Failure) -> str:
    who = "this rank" if failure.by is None else _reporter(failure)
    return f": {who} destroyed the group while operations were in flight"


def _unusable(failure: Failure) -> str:
    why = "it was destroyed on this rank" if failure.cause is None else words(failure.cause)
    return f", which can no longer be used: {why}\n{_ANEW}"


def _forked(failure: Failure) -> str:
    return (
        f": this process was forked from rank {failure.rank} after the group was created and is not a rank of it; call "
        "init_process_group in the child"
    )


def _nested(failure: Failure) -> str:
    return (
        f" was called by a signal handler that interrupted {failure.detail or 'a call'}\nThe group can do nothing else "
        "until that call returns. Set a flag in the handler, and act on it when the call has returned."
    )


def _no_memory(failure: Failure) -> str:
    if failure.by is not None and failure.op not in _MEETINGS:
        return f": {_reporter(failure)} found no memory for the group's buffers"
    what = f"no memory for {failure.size_bytes >> 10} KiB of shared buffers" if failure.size_bytes else "no memory"
    if failure.num_ranks is not None:
        what = f"no shared memory for a group of {failure.num_ranks} ranks"
    why = f" ({failure.detail})" if failure.detail else ""
    return f": {what}{why}; raise the memory limit of the job or container, and see ulimit -f and -v"


def _system(failure: Failure) -> str:
    if failure.by is not None and failure.op not in _MEETINGS:
        return f": {_reporter(failure)} hit a system error and ended the group{_look_at(failure.by)}."
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        return f": no file descriptor is left ({failure.detail}); raise the limit of open files (ulimit -n)"
    if failure.errno == errno.EAGAIN:
        return (
            f": {failure.detail}; no thread could be started: raise the limit of processes (ulimit -u, the container's "
            "pids limit) or of memory (ulimit -v)"
        )
    return f": {failure.detail}; a sandbox may forbid it: run phalanx doctor there"


_SENTENCES: dict[str, Callable[[Failure], str]] = {
    "calls_differ": _calls_differ,
    "sizes_differ": _sizes_differ,
    "message_differs": _message_differs,
    "rank_ended": _rank_ended,
    "rank_replaced": lambda failure: _is_victim_of(failure, "runs another program now (exec)"),
    "rank_left": _rank_left,
    "rank_fell": lambda failure: _is_victim_of(failure, f"has left the group because of {failure.detail}"),
    "rank_failed": _rank_failed,
    "rank_lost": _rank_lost,
    "rank_missing": _rank_missing,
    "came_late": _came_late,
    "no_turn": _no_turn,
    "not_met": _not_met,
    "aborted": _aborted,
    "interrupted": _interrupted,
    "destroyed": _destroyed,
    "unusable": _unusable,
    "forked": _forked,
    "nested": _nested,
    "nested_wait": _nested,
    "no_memory": _no_memory,
    "system": _system,
    "refused": lambda failure: f": {failure.detail}",
}
