"""Lends a block's memory to a user for writing, and calls it back while the user may still have tensors in it.

Once other processes read the block, writes to the lent memory must no longer reach the block. If the memory were
unmapped or made read-only, a process that still writes to it by mistake would die of SIGSEGV. Instead, the memory keeps
its address and content but is no longer shared: the kernel copies each page before the next write to it, so the write
never reaches the block.

Mapping 1 GiB again at the same address would free 262,144 entries of the page table (65 ms), and the next loan would
cause a page fault for each of them. So ``mremap`` first moves whole page tables to another address, which must have the
same offset within 2 MiB. Moving and mapping together then take 0.2 ms, and the pages of the next loan are already
mapped. This needs Linux 5.13, where MREMAP_DONTUNMAP works on shared memory, so the address is never unmapped for other
threads. On an older kernel, the memory is mapped again in the slow way.

A child that is forked while memory is lent keeps the shared mapping, which no process can call back;
`Loans.are_inherited` says whether there may be such a child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

_MAY_MOVE, _FIXED_ADDRESS, _KEEP_OLD = 1, 2, 4  # flags of mremap(2)
_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_TABLE_BYTES = 2 << 20  # memory that one page of the page table maps
_FAILED = ctypes.c_void_p(-1).value


_num_forks = 0  # forks of this process since its first loan


@functools.cache
def _count_forks() -> None:
    def count() -> None:
        global _num_forks
        _num_forks += 1

    os.register_at_fork(before=count)


class Loans:
    """The loans of one block's memory; there is at most one loan at a time.

    Args:
        fd: Descriptor of the block; it must stay open for as long as this object is used.
        size_bytes: Size of the block.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd, self._size = fd, size_bytes
        self._ready: int | None = None  # address of a writable mapping that is not lent
        self._lent: weakref.ref[memoryview] | None = None
        self._forks = 0  # value of `_num_forks` at the last loan

    @property
    def are_lent(self) -> bool:
        """Whether the memory is lent, so that its user may write to it."""
        return self._lent is not None and self._lent() is not None

    @property
    def are_inherited(self) -> bool:
        """Whether this process has forked since the loan.

        If so, a child may still be able to write to the block after `call_back`, which can't reach the child's mapping.
        """
        return self._lent is not None and self._forks != _num_forks

    def lend(self) -> memoryview:
        """Return a view that keeps the block's memory mapped. Writes reach the block until `call_back`.

        Raises:
            OSError: There is no address space left.
        """
        _count_forks()
        self._forks = _num_forks
        address, self._ready = self._ready, None
        if address is None:
            address = _map(None, self._size, _READ_WRITE, mmap.MAP_SHARED | _MAP_POPULATE, self._fd)
        view = memoryview((ctypes.c_uint8 * self._size).from_address(address)).cast("B")
        weakref.finalize(view, _libc().munmap, address, self._size).atexit = False
        self._lent = weakref.ref(view)
        return view

    def call_back(self) -> None:
        """Keep later writes to the lent memory out of the block.

        Raises:
            OSError: The kernel can't map the memory again.
        """
        if (view := self._lent() if self._lent else None) is not None:
            address = ctypes.addressof(ctypes.c_uint8.from_buffer(view))
            self._ready = self._moved(address)
            _map(address, self._size, _READ_WRITE, _PRIVATE | _MAP_FIXED, self._fd)
        self._lent = None

    def _moved(self, address: int) -> int | None:
        """Move the pages mapped at `address`; return their new address, or None if they can't be moved."""
        libc = _libc()
        room = self._size + _TABLE_BYTES
        try:
            start = _map(None, room, _NO_ACCESS, _PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            return None
        target = start + (address - start) % _TABLE_BYTES
        flags = _MAY_MOVE | _FIXED_ADDRESS | _KEEP_OLD
        is_moved = libc.mremap(address, self._size, self._size, flags, target) == target
        if not is_moved:
            libc.munmap(start, room)
            return None
        end = target + -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
        for begin, stop in ((start, target), (end, start + room)):
            if begin < stop:
                libc.munmap(begin, stop - begin)
        return target

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # the interpreter is ending, or `__init__` failed
            if self._ready is not None:
                _libc().munmap(self._ready, self._size)


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc().mmap(address, size_bytes, protection, flags, fd, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.mremap.argtypes = (pointer, size, size, number, pointer)
    libc.munmap.argtypes = (pointer, size)
    return libc
