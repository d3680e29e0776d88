"""Parts of sentences about a job: its ranks, a call, a time, and a clause for what a rank is doing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx._text import counted, duration, joined, plural
from phalanx.diagnose.jobs import NO_RANK
from phalanx.diagnose.why.activity import Activity, Call, joining_call

_MANY_FRAMES = 100
NO_TIME_S = 0.05
"""Durations below this many seconds are left out, because they would read 0.0 s."""
MOMENT_S = 0.5
"""Seconds for which ranks wait for each other even in a healthy job."""
_SYSTEM_CALLS = {
    "read": "reading {path}",
    "recvfrom": "receiving from {path}",
    "recvmsg": "receiving from {path}",
    "write": "writing to {path}",
    "sendto": "sending to {path}",
    "open": "opening a file",
    "poll": "waiting for data",
    "select": "waiting for data",
    "epoll_wait": "waiting for data",
    "nanosleep": "sleeping",
    "connect": "connecting",
    "accept": "waiting for a connection",
    "wait4": "waiting for a child process",
    "waitid": "waiting for a child process",
    "fcntl": "waiting for the lock of {path}",
    "flock": "waiting for the lock of {path}",
    "fsync": "waiting for {path} to be written",
    "fdatasync": "waiting for {path} to be written",
}
_PERFECT = re.compile("^has been ")
NAMES = {"backward": "the backward pass", "wait": "the operation awaited"}
"""Words for values of `Call.op` that are not names of operations."""


def ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2 and 3``; of many, the first four and a count; ``process`` if no rank."""
    if tuple(numbers) == (NO_RANK,):
        return "process"
    shown = [str(number) for number in numbers]
    if len(shown) > 6:
        shown = [*shown[:4], f"{len(shown) - 4} more"]
    return f"{plural(len(numbers), 'rank')} {joined(shown)}"


def call_text(call: Call, with_site: bool = False) -> str:
    """Return a call as error messages name it: by its number, or else by its line."""
    if call.is_message:
        peer = "" if call.peer is None else f" {'to' if 'send' in call.op else 'from'} rank {call.peer}"
        text = f"{call.op}{peer}"
    elif call.op == "join":
        text = joining_call(call.group)
    else:
        name = NAMES.get(call.op, call.op)
        text = f"{name} #{call.seq}" if call.seq else name
    if call.group and text != "init_process_group":
        text += f" of group '{call.group}'"
    return f"{text} at {call.site}" if call.site and (with_site or not call.group) else text


def clause(doing: Activity, *, is_culprit: bool = False) -> str:
    """Return what a rank is doing, as a predicate: ``has been in load_image at data.py:88 for 41 s``.

    Args:
        is_culprit: Whether to describe the rank's activity even if the rank waits for others as well.
    """
    if doing.call is not None and not doing.is_halted and not is_culprit:
        lasting = _lasting(doing.call.since_s, doing.call.since_is_least)
        waits = "waited" if doing.how in _OVER else "waits"
        raised = f", and raised {doing.gave_up}" * bool(doing.gave_up)
        return f"{waits} in {call_text(doing.call, True)}{lasting}{raised}"
    on_host = f" on host {doing.host}" if doing.host else ""
    manner, lasting, after = _manner(doing), _lasting(doing.since_s, doing.since_is_least), _after(doing)
    if after and (doing.since_s or 0.0) < MOMENT_S:  # a thread that polls has slept only for a moment
        manner, lasting = _PERFECT.sub("is ", manner), ""
    return manner + lasting + _with_others(doing) + on_host + after


def _after(doing: Activity) -> str:
    """Return the time since a rank's last operation or step, if the rank runs, or if its sleep is a lower bound."""
    after_s = doing.last.since_s if doing.last is not None else None
    what = "recorded operation"
    if after_s is not None and doing.stepped_s is not None and doing.stepped_s < after_s:  # as in training on one rank
        after_s, what = doing.stepped_s, "step"
    is_told = doing.how == "runs" or doing.since_is_least
    if after_s is None or after_s < MOMENT_S or not is_told:
        return ""
    return f", {duration(after_s)} after its last {what}"


def _lasting(seconds: float | None, is_least: bool) -> str:
    """Return a duration in words; empty if it is unknown or too short."""
    if seconds is None or seconds < NO_TIME_S:
        return ""
    return f" for {'at least ' * is_least}{duration(seconds)}"


def _manner(doing: Activity) -> str:
    where = _where(doing)
    if doing.how == "asleep":
        return f"has been {_asleep(doing)}{where}" if _asleep(doing) else f"has been{where}"
    if doing.how == "silent" and doing.last is not None:
        return f"last called {call_text(doing.last, True)}"
    return _MANNERS.get(doing.how, _MANNERS["unknown"]).format(where=where, detail=doing.detail, other=doing.other_pid)


def _asleep(doing: Activity) -> str:
    if doing.within:  # `within` is printed elsewhere, and says more than a system call
        return ""
    words = _SYSTEM_CALLS.get(doing.system_call, "")
    return words.format(path=doing.path or "a file") if words else "" if doing.frame else "asleep"


def _where(doing: Activity) -> str:
    if doing.frame is None and doing.was_in is not None:
        return f" in {call_text(doing.was_in, True)}"
    if doing.frame is None:
        return "" if doing.last is None else f" after {call_text(doing.last, True)}"
    if not doing.frame.function:
        return "" if f" at {doing.frame.site}" in doing.detail else f" at {doing.frame.site}"
    deep = f", {counted(doing.depth, 'call')} deep" if doing.depth >= _MANY_FRAMES else ""
    within = f" (in {doing.within})" if doing.within and doing.how == "asleep" else ""
    return f" in {doing.frame.name} at {doing.frame.site}{within}{deep}"


def _with_others(doing: Activity) -> str:
    there = f" in {doing.other.name} at {doing.other.site}" if doing.other else ""
    if doing.how == "loader" and doing.other_pid:
        state = {"stopped": "has been stopped", "ended": "has ended", "disk": "waits for a disk"}.get(
            doing.detail, "is"
        )
        return f", whose worker (pid {doing.other_pid}) {state}{there}"
    if doing.how == "starved":
        return f", which thread {doing.detail or doing.other_pid} holds while it sleeps{there}"
    if doing.how == "lock" and there:
        return f", and thread {doing.detail or doing.other_pid} waits for one{there}"
    return ""


_OVER = ("silent", "interrupted", "unrecorded")
_MANNERS = {
    "runs": "is running{where}",
    "stopped": "has been stopped (SIGSTOP or Ctrl-Z){where}",
    "traced": "is held by {detail} (pid {other}){where}",
    "disk": "has been waiting for a disk ({detail}){where}",
    "breakpoint": "has been at a breakpoint{where}",
    "loader": "has been waiting for its data loader{where}",
    "gil": "has been in native code that holds the GIL{where}",
    "starved": "has been waiting for the GIL{where}",
    "lock": "has been waiting for a lock{where}",
    "input": "has been reading its input{where}",
    "idle": "has been idle{where}",
    "ended": "has ended{where}",
    "returned": "ended with exit code 0{where}",
    "exited": "ended with exit code {detail}{where}",
    "raised": "raised {detail}{where}",
    "killed": "was killed by {detail}{where}",
    "interrupted": "was interrupted{where}",
    "silent": "made no call",
    "unrecorded": "left no record of what it did",
    "unreadable": "left a record that can't be read",
    "unknown": "can't be looked into{where}",
}
