"""Keeps memory shared between a process and its forks, and makes the forks cheap.

Imported modules are hidden from the garbage collector (`gc.freeze`), so that their pages stay shared, and so that the
interpreter does not visit the modules when it ends; unfreezing them at the end took 0.3 s per rank. Each rank gets a
new ``__main__``, because the collector would never finalize the objects of a frozen one.

Some processes fork often: the servers of `phalanx.testing` and ``--fast-ranks``, pytest with our mark, and a warm
process. Their memory is collapsed into huge pages. Otherwise, copying and freeing the page table of 70,000 pages would
take a third of the time of a test with two ranks. Huge pages occupy memory even for their unused parts. So memory is
collapsed only if these parts are at most a quarter of the free memory, and for at most a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import time
from collections.abc import Iterator

from phalanx.host.block_pool import offers_huge_pages
from phalanx.host.cgroups import known_memory

_MADV_COLLAPSE = 25  # since Linux 6.1
_HUGE_BYTES, _PIECE_BYTES = 2 << 20, 64 << 20
_LEAST_USED = 3 / 4  # huge pages are worthwhile if at least this fraction of a range is used
_MOST_OF_ROOM = 1 / 4  # the unused parts of huge pages may take at most this fraction of the free memory
_FIRST_FORKS, _NEXT_FORKS = 16, 32  # memory is collapsed after 16 forks, and again after every 32 more
_LONG_S = 1.0  # if collapsing takes longer, it is not repeated: there is too much memory, or too little is contiguous


def share_pages() -> None:
    """Freeze all objects, so that later forks share their pages, and install a fork hook that makes the forks cheap.

    Without the freeze, a garbage collection in a fork would touch, and so copy, every page, which takes a third of a
    second. The hook calls `fork_cheaply`. Do not call this function in a process whose signal handlers raise: Python
    prints an exception in a fork hook and drops it.
    """
    global _sharing
    gc.freeze()
    if not _sharing:
        os.register_at_fork(before=lambda: fork_cheaply(1) if os.getpid() == _sharing else None)
    _sharing = os.getpid()


_sharing = 0  # pid of the process that shares its pages; its forks inherit the hook, but must not run it
_forks = (0, 0)  # pid of the process whose forks are counted, and their number


def fork_cheaply(num_forks: int) -> None:
    """Collapse this process's memory into huge pages before it forks, if it forks often and the kernel allows it.

    A fork copies the page table, and the copy is freed when the forked process ends. Together, this takes some 20 ms
    for the 70,000 pages of torch, and 5 ms with huge pages. Collapsing takes 0.2 to 0.6 s. It is repeated after more
    forks, for the pages that were written in the meantime, and is then faster.

    Args:
        num_forks: Number of forks that are about to follow.
    """
    global _forks
    before = _forks[1] if _forks[0] == os.getpid() else 0
    _forks = os.getpid(), before + num_forks
    if (_forks[1] - _FIRST_FORKS) // _NEXT_FORKS > (before - _FIRST_FORKS) // _NEXT_FORKS:
        _collapse()


_is_slow = False


def _collapse() -> None:
    global _is_slow
    if _is_slow or not offers_huge_pages():
        return
    ranges = []
    with contextlib.suppress(OSError):  # emulations of Linux may have no /proc/self/smaps
        ranges = list(_own_memory())
    room_bytes = min((memory.left_bytes for memory in known_memory()), default=0)
    if sum(unused for _, _, unused in ranges) > _MOST_OF_ROOM * room_bytes:
        return
    begin_s = time.monotonic()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end, _ in ranges:
        for piece in range(begin, end, _PIECE_BYTES):
            madvise(piece, min(_PIECE_BYTES, end - piece), _MADV_COLLAPSE)
            if time.monotonic() - begin_s > _LONG_S:
                _is_slow = True
                return


def _own_memory() -> Iterator[tuple[int, int, int]]:
    """Yield, for each nearly full memory range: begin and end of the whole huge pages in it, and its unused bytes."""
    is_own = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)", line):
                begin, end = int(region[1], 16), int(region[2], 16)
                is_own = region[3] == "rw-p" and region[4] == "0" and region[5] in ("", "[heap]")
            elif is_own and line.startswith("Anonymous:"):
                first, last = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
                unused = end - begin - int(line.split()[1]) * 1024
                if first < last and unused <= (1 - _LEAST_USED) * (end - begin):
                    yield first, last, unused
