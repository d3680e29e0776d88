"""Room among our descriptors for the streams of many ranks."""

from __future__ import annotations

import contextlib
import os
import resource

_PER_RANK, _OF_OURS = 6, 32


def open_streams() -> None:
    """Open what we were started without, so that no socket of ours takes its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def raise_descriptor_limit() -> tuple[int, int]:
    """Make room for the streams of many ranks; return the limits that the user gave us, and that the ranks keep."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def descriptor_problem(num_ranks: int) -> str:
    """Return why the ranks can't have their streams; empty if they can."""
    needed = _OF_OURS + num_ranks * _PER_RANK
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (resource.RLIM_INFINITY, -1) or hard >= needed:
        return ""
    return f"{num_ranks} ranks need some {needed} open files, the limit is {hard}: start fewer, or raise it (ulimit -n)"
