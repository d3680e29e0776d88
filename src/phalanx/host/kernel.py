"""The state of a thread in the kernel: when it last ran, its system call, and which process traces it.

This module also finds a process's number in its pid namespace, and the rule (Yama) on which process may trace another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

from phalanx.host.proc_stat import stat_fields

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
_GO_ON_AFTER_A_HALT = {
    "", "futex", "nanosleep", "poll", "select", "wait4", "waitid", "read", "write", "open", "fcntl", "flock", "fsync",
    "fdatasync",
}  # fmt: skip
"""System calls that the kernel restarts after the process was halted and resumed, see signal(7); "" stands for no call
or an unknown call.
"""
_LOOPS = {"pt_tcpstore_uv", "gloo_tcp_loop"}
"""Names of torch's threads that wait for events, and that wait again after they were halted and resumed."""
_LOCK_COMMANDS = {7, 38}  # F_SETLKW, F_OFD_SETLKW
_WITH_DESCRIPTOR = {
    "read", "write", "fcntl", "flock", "fsync", "fdatasync", "connect", "accept", "sendto", "recvfrom", "recvmsg",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stand:
    """A thread as the kernel sees it.

    Attributes:
        state: Letter for the thread's state, as in `processes.Process`.
        still_s: Seconds since the thread last ran; None if it is running, or if the kernel does not report the time.
        place: Function of the kernel in which the thread sleeps; empty if it is running, or if the kernel does not
            report it.
        call: System call in which the thread is; empty if there is none, or if this user may not see it.
        descriptor: Descriptor on which `call` operates; -1 if there is none.
        path: File or device behind `descriptor`, such as ``/dev/pts/3``.
        tracer_pid: Process that traces the thread, such as a debugger; 0 if there is none.
    """

    state: str = ""
    still_s: float | None = None
    place: str = ""
    call: str = ""
    descriptor: int = -1
    path: str = ""
    tracer_pid: int = 0


def stand_of(pid: int, thread: int = 0) -> Stand:
    """Return a thread as the kernel sees it, by default the main thread; `state` is "" if the thread has ended."""
    folder = f"/proc/{pid}/task/{thread or pid}"
    status = status_of(pid, thread)
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


def status_of(pid: int, thread: int = 0) -> dict[str, str]:
    """Return the fields of a thread's ``/proc`` status, by default the main thread's; empty if the thread has ended."""
    lines = _read(f"/proc/{pid}/task/{thread or pid}/status").splitlines()
    return {name: value.strip() for name, found, value in (line.partition(":") for line in lines) if found}


def threads_of(pid: int) -> list[int]:
    """Return the kernel's ids of the threads of a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return list(map(int, os.listdir(f"/proc/{pid}/task")))
    return []


def number_inside(pid: int) -> int:
    """Return a process's number in its own pid namespace, such as a container's; `pid` if the process has ended."""
    return int(status_of(pid).get("NSpid", str(pid)).split()[-1])


def ptrace_scope() -> int:
    """Return Yama's rule on which process may trace another; 0 if any process of the same user may."""
    return int(_read("/proc/sys/kernel/yama/ptrace_scope") or 0)


def call_ended_by_a_halt(pid: int) -> str:
    """Return a process's system call if a short halt might end the call with EINTR; otherwise an empty text."""
    for thread in threads_of(pid):
        folder = f"/proc/{pid}/task/{thread}"
        call, descriptor = _call(_read(f"{folder}/syscall").split())
        is_special = call in ("read", "write") and _path(pid, descriptor).startswith(("socket:", "anon_inode:"))
        if (is_special or call not in _GO_ON_AFTER_A_HALT) and _read(f"{folder}/comm").strip() not in _LOOPS:
            return call
    return ""


def _call(words: list[str]) -> tuple[str, int]:
    """Return the system call in the words of ``/proc/PID/syscall``, and the call's descriptor."""
    if len(words) < 3 or not words[0].isdecimal():  # "running", or -1 for no system call
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
    """Return the seconds since a thread last ran, by the scheduler's clock of its last CPU; None if unknown."""
    then, cpu = _last_ran_ms(f"{folder}/sched"), _last_cpu(folder)
    now = _clock_ms(cpu) if then else 0.0
    # The CPU and the time are read again: the thread may have run since, or have moved to a CPU with another clock.
    is_same = cpu == _last_cpu(folder) and then == _last_ran_ms(f"{folder}/sched")
    return max(now - then, 0.0) / 1000 if then and now and is_same else None


def _last_cpu(folder: str) -> int:
    """Return the CPU on which a thread last ran; -1 if the thread has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(stat_fields(folder.removeprefix("/proc/"))[39])
    return -1


def _clock_ms(cpu: int) -> float:
    """Return the scheduler's clock of a CPU, in milliseconds; 0 if this thread may not run on that CPU."""
    try:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError):
        return 0.0
    try:
        return _last_ran_ms("/proc/thread-self/sched")
    finally:
        os.sched_setaffinity(0, allowed)


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
