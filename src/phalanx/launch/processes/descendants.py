"""Descendants of this process: whether they end with their parent, who adopts orphans, and how all are killed."""

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
    """Make the kernel kill this process when its parent ends for any reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the line above
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`, for a process that has work to do after its parent has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def hold_signals() -> None:
    """Block the signals that the supervisor handles, in this process and in programs that it executes.

    Schedulers and service managers may send these signals to every process of a job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISORS_SIGNALS)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of every descendant whose own parent ends; with ``adopt=False``, no longer do so."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def adopts_orphans() -> bool:
    """Return whether `adopt_orphans` is in effect."""
    value = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def end_children(keep: Collection[int] = ()) -> None:
    """Kill all descendants of this process; return when none is left, or after `CHILDREN_S` at the latest.

    Args:
        keep: Children to spare.
    """
    deadline = time.monotonic() + CHILDREN_S
    while (pids := set(children_of(os.getpid())).difference(keep)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            reap(pid, deadline - time.monotonic())


def has_ended(pid: int, limit_s: float = 0.0) -> bool:
    """Wait at most `limit_s` for a process to end; return whether it has ended."""
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
    """Wait for a child to end, and return its wait status; None if it is alive after `limit_s`, or not our child."""
    if has_ended(pid, limit_s):
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            return status if ended else None
    return None


def start_helper(program: str, fds: Sequence[int], *words: str, pause_s: float = 0.0) -> int:
    """Start a child that runs the Python code `program` and ends with this process; return its pid.

    The child leads a process group, and blocks the signals that the supervisor handles.

    Args:
        fds: Descriptors that the child inherits; their numbers are its first arguments.
        words: Further arguments.
        pause_s: Seconds that the child sleeps before it begins.
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
