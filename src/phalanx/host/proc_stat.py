"""The one reader of ``/proc/PID/stat``. Imports nothing, because processes that fork and reap ranks use it, too."""

from __future__ import annotations


def stat_fields(process: int | str = "self") -> list[str]:
    """Return the fields of a process or thread, numbered as in proc_pid_stat(5): field 4 is the parent; the first is 1.

    Args:
        process: Process id, or a path below ``/proc``, such as ``12/task/13``.

    Raises:
        OSError: The process has ended, or ``/proc`` does not show it.
    """
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        head, _, tail = file.read().rpartition(")")  # a name may hold spaces and parentheses
    pid, _, name = head.partition("(")
    return ["", pid.strip(), name, *tail.split()]
