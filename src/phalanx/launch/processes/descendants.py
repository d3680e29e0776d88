"""Descendants of this process: with which process they end, who adopts orphans, and how to end all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Sequence

from phalanx.host.proc_stat import children_of
from phalanx.launch.deadlines import CHILDREN_S

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_libc = ctypes.CDLL(None)  # loaded before any fork
SUPERVISORS_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`, where a process has something to do after its parent's end."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def hold_signals() -> None:
    """Hold back, in this process and what it executes, the signals that the supervisor obeys.

    Schedulers and service managers may send them to every process of a job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISORS_SIGNALS)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of every descendant whose own parent ends; with False, no longer."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def adopts_orphans() -> bool:
    """Return whether `adopt_orphans` is in effect."""
    value = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def end_children(keep: Collection[int] = ()) -> None:
    """Kill all descendants of this process; return when none is left, or at the limit.

    Args:
        keep: Children that stay.
    """
    deadline = time.monotonic() + CHILDREN_S
    while (pids := set(children_of(os.getpid())).difference(keep)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            reap(pid, deadline - time.monotonic())


def has_ended(pid: int, limit_s: float = 0.0) -> bool:
    """Wait for a process to end, at most `limit_s`; return whether it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(max(0.0, limit_s) * 1000))
    os.close(pidfd)
    return ended


def reap(pid: int, limit_s: float) -> int | None:
    """Wait for a child to end and return its wait status; None if it is still alive at the limit, or not our child."""
    if has_ended(pid, limit_s):
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            return status if ended else None
    return None


def start_helper(program: str, fds: Sequence[int], *words: str, pause_s: float = 0.0) -> int:
    """Start Python on `program` as a child that ends with this process, and return its pid.

    It leads a process group, and the signals that the supervisor obeys are blocked.

    Args:
        fds: Descriptors that it inherits; their numbers are its first arguments.
        words: Further arguments.
        pause_s: Seconds for which it sleeps first.
    """
    parent_pid = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(parent_pid)
        hold_signals()
        os.setpgid(0, 0)
        time.sleep(pause_s)
        for fd in fds:
            os.set_inheritable(fd, True)
        os.execv(sys.executable, [sys.executable, "-c", program, *map(str, fds), *words])
    finally:
        os._exit(1)
