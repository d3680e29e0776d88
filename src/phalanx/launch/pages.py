"""The memory that a process shares with those that it forks: what keeps it shared, and forks of it cheap."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import re
import time
from collections.abc import Iterator

from phalanx._memory import offers_huge_pages

_MADV_COLLAPSE = 25  # since Linux 6.1
_HUGE_BYTES = 2 << 20
_LEAST_USED = 3 / 4  # of a range that is worth whole huge pages
_FIRST_FORKS, _NEXT_FORKS = 16, 32  # what they save is what it costs
_LONG_S = 2.0  # the kernel has to search for memory: not again


def share_pages() -> None:
    """Have processes that this one forks go on sharing what it has imported, and be forked cheaply.

    A garbage collection in one of them would touch, and so copy, every page of it: a third of a second.
    """
    gc.freeze()
    fork_cheaply()


_forks = (0, itertools.count())  # whose are counted, by process, and their count


def fork_cheaply() -> None:
    """Have this process, if it forks often, lie in huge pages, where the kernel allows it.

    A fork copies the list of the pages and an end frees it: some 20 ms for the 70,000 pages of torch, 5 ms for huge
    ones. To put them together takes 0.2 to 0.6 s, and again some of it after more forks, for what was written to.
    """
    global _forks
    if not _forks[0]:
        os.register_at_fork(before=_count)
    if _forks[0] != os.getpid():
        _forks = os.getpid(), itertools.count(1)


def _count() -> None:
    pid, forks = _forks
    if pid == os.getpid() and next(forks) % _NEXT_FORKS == _FIRST_FORKS:
        _collapse()


_is_slow = False


def _collapse() -> None:
    global _is_slow
    if _is_slow or not offers_huge_pages():
        return
    begin_s = time.monotonic()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError):  # some systems that speak for Linux have no smaps
        for begin, end in list(_own_memory()):
            madvise(begin, end - begin, _MADV_COLLAPSE)
    _is_slow = time.monotonic() - begin_s > _LONG_S


def _own_memory() -> Iterator[tuple[int, int]]:
    """Yield begin and end of each range of whole huge pages that is this process's own and nearly all in use."""
    is_own = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)", line):
                begin, end = int(region[1], 16), int(region[2], 16)
                is_own = region[3] == "rw-p" and region[4] == "0" and region[5] in ("", "[heap]")
            elif is_own and line.startswith("Anonymous:"):
                first, last = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
                if first < last and int(line.split()[1]) * 1024 >= _LEAST_USED * (end - begin):
                    yield first, last
