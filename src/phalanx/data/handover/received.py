"""Maps the blocks in which workers hand over batches, and gives each back when the rank has no tensor in it any more.

Mapping 100 MiB anew costs half a copy, since each page causes a fault when it is first touched. So a mapping is kept as
long as the worker uses the block. Whether the rank still has a tensor in it is seen from the number of references to
the storage, whenever the next batch comes. That misses tensors of other processes, so a block is never given back if

- the rank has forked while it had tensors in the block, or
- the rank has sent such a tensor to another process, after which torch lists the block in `shared_cache`.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import shared_cache

from phalanx._torch import storages
from phalanx.data.handover.batch_blocks import COUNTS, NEVER
from phalanx.host.shared_blocks import Address, open_descriptor


class _Mapping:
    """A block of a worker as this rank maps it; an error of a signal handler, at whatever line, leaves none of it."""

    def __init__(self, address: Address, num_bytes: int) -> None:
        counts_at = address.size_bytes - COUNTS.size
        begin = counts_at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._counts_at = counts_at - begin
        with _opened(address) as fd:
            status = os.fstat(fd)
            self._key_of_torch = (status.st_ino, status.st_dev)
            self._counts = mmap.mmap(fd, address.size_bytes - begin, offset=begin)
            self._map(fd, num_bytes)
        self._num_received, self._num_given_back = COUNTS.unpack_from(self._counts, self._counts_at)

    def _map(self, fd: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.storage = storages.map_storage(fd, num_bytes)
        self._unused = self._holders()

    def receive(self, address: Address, num_bytes: int) -> torch.UntypedStorage:
        """Count the block as received once more and return its storage."""
        if num_bytes != self._num_bytes:  # the worker sends another length only in a block that was given back
            with _opened(address) as fd:
                self._map(fd, num_bytes)
        self._num_received += 1
        self._tell()
        return self.storage

    def give_back_if_unused(self) -> None:
        if self._num_given_back in (self._num_received, NEVER) or self._holders() != self._unused:
            return
        self._num_given_back = NEVER if self._key_of_torch in shared_cache else self._num_received
        self._tell()

    def note_fork(self) -> None:
        """Never give the block back if a child that is about to be forked has tensors in it."""
        if self._num_given_back != self._num_received:
            self._num_given_back = NEVER
            self._tell()

    def _holders(self) -> tuple[int, int]:
        return storages.holders_of_storage(self.storage)

    def _tell(self) -> None:
        COUNTS.pack_into(self._counts, self._counts_at, self._num_received, self._num_given_back)


@contextlib.contextmanager
def _opened(address: Address) -> Iterator[int]:
    fd = open_descriptor(address)
    try:
        yield fd
    finally:
        os.close(fd)


class ReceivedBlocks:
    """The blocks that the workers of one iterator have handed over."""

    def __init__(self) -> None:
        self._of_workers: dict[int, dict[int, _Mapping]] = {}

    def begin_batch(self, worker: int, kept: tuple[int, ...]) -> None:
        """Give back all blocks that are not used any more, and drop those that their worker has forgotten.

        Args:
            worker: Process that has sent the batch.
            kept: Inodes of the blocks that this worker still holds.
        """
        mine = self._of_workers.setdefault(worker, {})
        for inode in mine.keys() - kept:
            del mine[inode]
        for mappings in self._of_workers.values():
            for mapping in mappings.values():
                mapping.give_back_if_unused()

    def storage_at(self, address: Address, num_bytes: int) -> torch.UntypedStorage:
        """Return the storage of a block that a worker has sent.

        Raises:
            OSError: The worker has ended, or this process may not open more files.
        """
        mine = self._of_workers.setdefault(address.pid, {})
        if address.inode not in mine:
            mine[address.inode] = _Mapping(address, num_bytes)
        return mine[address.inode].receive(address, num_bytes)

    def note_fork(self) -> None:
        for mappings in self._of_workers.values():
            for mapping in mappings.values():
                mapping.give_back_if_unused()
                mapping.note_fork()

    def forget(self, worker: int) -> None:
        """Drop the mappings of a worker that has died; tensors keep theirs."""
        self._of_workers.pop(worker, None)

    def drop(self) -> None:
        """Drop all mappings; tensors keep theirs."""
        self._of_workers = {}


_of_iterators: weakref.WeakValueDictionary[int, ReceivedBlocks] = weakref.WeakValueDictionary()
lock = threading.RLock()
"""Held while blocks are received, by the rank or a thread that pins memory; no process is forked meanwhile."""


def of_iterator(number: int) -> ReceivedBlocks:
    """Return the blocks that the workers of an iterator have handed over, as long as somebody refers to them."""
    return _of_iterators.setdefault(number, ReceivedBlocks())


def _before_fork() -> None:
    lock.acquire()
    for blocks in list(_of_iterators.values()):
        blocks.note_fork()


def _in_child() -> None:
    for blocks in list(_of_iterators.values()):
        blocks.drop()
    lock.release()


@functools.cache
def watch_forks() -> None:
    """Note the forks of this process from now on; call this before the workers of a first iterator start."""
    os.register_at_fork(before=_before_fork, after_in_parent=lock.release, after_in_child=_in_child)
