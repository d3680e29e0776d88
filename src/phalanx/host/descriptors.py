"""The descriptors of a process: its standard streams, its terminal, and the limit on the number of open files."""

from __future__ import annotations

import contextlib
import os
import resource

from phalanx._text import counted
from phalanx.host.proc_stat import stat_fields

_PER_RANK, _OF_OURS = 6, 32


def open_streams() -> None:
    """Open /dev/null for each closed standard stream; otherwise a socket could get the stream's number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def take_streams(output_fd: int) -> None:
    """Replace the standard streams in a process that reads no input and writes all output to `output_fd`."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, number)
    if null > 2:
        os.close(null)


def is_in_background(pid: int) -> bool:
    """Whether process `pid` belongs to a shell's job that does not have the terminal."""
    with contextlib.suppress(OSError, IndexError):
        fields = stat_fields(pid)
        group, foreground = fields[5], fields[8]
        return group != foreground and int(foreground) > 0
    return False


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the limit on open files, for the streams of many ranks; return the old limits, which ranks are to have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def descriptor_problem(num_ranks: int) -> str:
    """Return why the limit of open files does not allow the streams of `num_ranks` ranks; empty if it does."""
    needed = _OF_OURS + num_ranks * _PER_RANK
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        return ""
    need = f"{counted(num_ranks, 'rank')} {'needs' if num_ranks == 1 else 'need'} some {needed} open files"
    return f"{need}, the limit is {hard}: {'' if num_ranks == 1 else 'start fewer, or '}raise it (ulimit -n)"
