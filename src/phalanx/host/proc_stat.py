"""The only code that parses ``/proc/PID/stat`` or lists a process's children.

It imports little, because processes that fork and reap ranks also use it.
"""

from __future__ import annotations

import contextlib
import os


def stat_fields(process: int | str = "self") -> list[str]:
    """Return the stat fields of a process or thread, numbered from 1 as in proc_pid_stat(5): field 4 is the parent.

    Args:
        process: Process id, or a path below ``/proc``, such as ``12/task/13``.

    Raises:
        OSError: The process has ended, or ``/proc`` does not show it.
    """
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        head, _, tail = file.read().rpartition(")")  # the process's name may contain spaces and parentheses
    pid, _, name = head.partition("(")
    return ["", pid.strip(), name, *tail.split()]


def children_of(parent: int) -> list[int]:
    """Return the pids of the children of a process's main thread."""
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # the kernel was built without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == parent]


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(stat_fields(pid)[4])
    return 0
