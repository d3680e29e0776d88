"""Where a thread stands in the kernel: since when it has not run, in which system call, and who traces it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept",
        44: "sendto", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 65: "semop", 72: "fcntl", 73: "flock", 74: "fsync",
        75: "fdatasync", 128: "sigtimedwait", 202: "futex", 208: "io_getevents", 220: "semop", 230: "nanosleep",
        232: "epoll_wait", 247: "waitid", 257: "open", 270: "select", 271: "poll", 281: "epoll_wait", 288: "accept",
    },
    "aarch64": {
        4: "io_getevents", 22: "epoll_wait", 25: "fcntl", 32: "flock", 56: "open", 63: "read", 64: "write",
        72: "select", 73: "poll", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep",
        115: "nanosleep", 137: "sigtimedwait", 192: "semop", 193: "semop", 202: "accept", 203: "connect",
        206: "sendto", 207: "recvfrom", 212: "recvmsg", 242: "accept", 260: "wait4",
    },
}  # fmt: skip
_BY_NUMBER = _CALLS.get(os.uname().machine, {})
_ENDED_BY_A_HALT = {"epoll_wait", "io_getevents", "semop", "sigtimedwait"}  # see signal(7)
_LOCK_COMMANDS = {7, 38}  # F_SETLKW, F_OFD_SETLKW
_WITH_DESCRIPTOR = {
    "read", "write", "fcntl", "flock", "fsync", "fdatasync", "connect", "accept", "sendto", "recvfrom", "recvmsg",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stand:
    """A thread as the kernel sees it.

    Attributes:
        state: Letter of its state, as of `processes.Process`.
        still_s: Seconds since it last ran; None if the kernel does not tell, or it runs.
        place: Function of the kernel in which it sleeps; empty if it runs or the kernel does not tell.
        call: System call in which it is; empty if it is in none, or this user may not know.
        descriptor: Descriptor in that call; -1 if the call has none.
        path: File or device behind that descriptor, such as ``/dev/pts/3``.
        tracer_pid: Process that traces it, such as a debugger; 0: none.
    """

    state: str = ""
    still_s: float | None = None
    place: str = ""
    call: str = ""
    descriptor: int = -1
    path: str = ""
    tracer_pid: int = 0


def stand_of(pid: int, thread: int = 0) -> Stand:
    """Return where a thread stands; without a thread, the main one. One that has ended has no state."""
    folder = f"/proc/{pid}/task/{thread or pid}"
    status = dict(line.split(":\t", 1) for line in _read(f"{folder}/status").splitlines() if ":\t" in line)
    state = status.get("State", " ")[0].strip()
    place = _read(f"{folder}/wchan").strip()
    call, descriptor = _call(_read(f"{folder}/syscall").split())
    return Stand(
        state=state,
        still_s=None if state == "R" else _still_s(folder),
        place="" if place == "0" else place,
        call=call,
        descriptor=descriptor,
        path=_path(pid, descriptor),
        tracer_pid=int(status.get("TracerPid", "0")),
    )


def call_ended_by_a_halt(pid: int, threads: Iterable[int]) -> str:
    """Return a system call of these threads that would fail with EINTR after a short halt; empty if none would."""
    calls = (_call(_read(f"/proc/{pid}/task/{thread}/syscall").split())[0] for thread in threads)
    return next((call for call in calls if call in _ENDED_BY_A_HALT), "")


def _call(words: list[str]) -> tuple[str, int]:
    """Return the system call that ``/proc/PID/syscall`` tells of, and its descriptor."""
    if len(words) < 3 or not words[0].isdecimal():  # it runs, or is in none: -1
        return "", -1
    call = _BY_NUMBER.get(int(words[0]), f"system call {words[0]}")
    first, second = (int(word, 16) for word in words[1:3])
    if call not in _WITH_DESCRIPTOR or (call == "fcntl" and second not in _LOCK_COMMANDS):
        return call, -1
    return call, first


def _path(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}") if descriptor >= 0 else ""
    except OSError:
        return ""


def _still_s(folder: str) -> float | None:
    """Return how long a thread has not run, by the scheduler's clock, which only another thread can tell."""
    then, now = _last_ran_ms(f"{folder}/sched"), _last_ran_ms("/proc/thread-self/sched")
    return max(now - then, 0.0) / 1000 if then and now else None


def _last_ran_ms(path: str) -> float:
    for line in _read(path).splitlines():
        name, is_pair, value = line.partition(":")
        if is_pair and name.strip() == "se.exec_start":
            return float(value)
    return 0.0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
