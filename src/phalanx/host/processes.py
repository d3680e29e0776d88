"""Processes as ``/proc`` shows them. A process that ends while it is being read counts as ended: there is no error."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
from collections.abc import Mapping

from phalanx.host.proc_stat import stat_fields

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PF_KTHREAD = 0x00200000  # include/linux/sched.h
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclasses.dataclass(frozen=True)
class Process:
    """A snapshot of a process's state; see proc_pid_stat(5).

    Attributes:
        state: Letter for the state: R running, S sleeping, D waiting for a disk or similar, T suspended by a signal, t
            traced, Z zombie.
        start_time: Clock ticks from the host's boot to the start of the process; together with the pid, this identifies
            the process, because pids are reused.
        cpu_s: CPU time of all threads of the process so far, in seconds.
        rss_bytes: Resident memory; a shared page counts in every process that maps it.
        is_kernel: Whether the process is a kernel thread rather than a program.
    """

    pid: int
    parent: int
    name: str
    state: str
    start_time: int
    cpu_s: float
    num_threads: int
    rss_bytes: int
    minor_faults: int
    major_faults: int
    is_kernel: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        with open("/proc/uptime") as file:
            return float(file.read().split()[0]) - self.start_time / _TICKS_PER_S


def process_of(pid: int) -> Process | None:
    """Return the state of the process with this pid; None if the process has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return Process(
        pid=pid,
        parent=int(fields[4]),
        name=fields[2],
        state=fields[3],
        start_time=int(fields[22]),
        cpu_s=(int(fields[14]) + int(fields[15])) / _TICKS_PER_S,
        num_threads=int(fields[20]),
        rss_bytes=int(fields[24]) * _PAGE_BYTES,
        minor_faults=int(fields[10]),
        major_faults=int(fields[12]),
        is_kernel=bool(int(fields[9]) & _PF_KTHREAD),
    )


def processes_of(user: int) -> dict[int, Process]:
    """Return all processes of a user, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user and (process := process_of(int(name))):
                found[process.pid] = process
    return found


def count_threads(user: int) -> int:
    """Return the number of threads in all processes of a user."""
    return sum(process.num_threads for process in processes_of(user).values())


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if the process has ended, or belongs to the kernel."""
    return [word.decode(errors="replace") for word in _read(pid, "cmdline").split(b"\0") if word]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it can't be read.

    Variables that the process has set since then are missing, including those that a launcher sets in a forked rank.
    """
    pairs = (word.decode(errors="replace").partition("=") for word in _read(pid, "environ").split(b"\0"))
    return {name: value for name, is_pair, value in pairs if is_pair}


def working_folder(pid: int) -> str:
    """Return the current folder of a process; empty if the process has ended, or if this user may not see it."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter under its usual name."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    return False


def open_files(pid: int | str = "self") -> dict[int, str]:
    """Return the target of each open descriptor of a process, such as ``socket:[123]``.

    Raises:
        FileNotFoundError: The process has ended.
        PermissionError: This user may not inspect the process.
    """
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def pss_of(pid: int) -> int | None:
    """Return a process's memory in bytes, in which each shared page is divided among its users; None if unreadable.

    The kernel visits all pages for this, and meanwhile holds a lock for which the process may have to wait.
    """
    for line in _read(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return None


def owner_of(pid: int) -> str:
    """Return the name or number of the user who owns a process; empty if the process has ended."""
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(user).pw_name
    except OSError:
        return ""
    except KeyError:
        return str(user)


def off_limits(pid: int) -> str:
    """Return a phrase that says why this user may not inspect a process; "" if it may, or if the process has ended."""
    try:
        os.readlink(f"/proc/{pid}/cwd")  # fails unless this user may read the process's memory
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):
            is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
            why = "this container lacks permission" if is_own else f"it belongs to {owner_of(pid)}"
            return f"may not be looked into: {why}"
    except OSError:
        pass
    return ""


def descendants(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return the descendants of process `root`, each after its parent."""
    found: list[Process] = []
    parents = {root}
    left = dict(processes)
    while parents:
        children = [process for process in left.values() if process.parent in parents]
        found += children
        parents = {child.pid for child in children}
        for pid in parents:
            del left[pid]
    return found


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def awaited_by(pid: int) -> set[int]:
    """Return the pids of the living processes for which a process holds a pidfd."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fdinfo"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{name}") as file:
                found |= {int(line.split()[1]) for line in file if line.startswith("Pid:")}
    return {one for one in found if one > 0}
