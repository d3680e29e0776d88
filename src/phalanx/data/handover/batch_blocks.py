"""`BlockPool`: the memory in which a loader's worker hands large tensors to its rank.

A new page costs the kernel more than filling it: a fresh 100 MiB takes as long as five copies. So the worker uses a
block again once the rank has given it back. No message is needed for that: a block ends with two counts that the rank
writes. They say how often it has received the block and how often it has given it back (`received`).
A block is free if the rank has given it back as often as it was sent, and if no tensor of the worker lies in it.

If the rank keeps batches, their blocks do not come back. The pool then makes others and forgets the oldest, so it never
waits, and it holds no more blocks than a rank needs that keeps none. A block that the rank has not opened yet is never
forgotten, since the rank opens it through this process.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref

import torch

from phalanx.host.shared_blocks import Address, Block, path_of, unnamed_file

COUNTS = struct.Struct("<QQ")
"""At the end of each block: how often the rank has received the block, and how often it has given the block back."""
NEVER = (1 << 64) - 1
"""Second count of a block that the rank will never give back."""

_ALIGNMENT = 64
_STEPS = 8  # a block has up to 1/8 more room than was asked for, so that batches of similar lengths fit into it


def can_hand_over() -> bool:
    """Whether this process may make blocks that its rank can open: whether there is memfd_create, and /proc."""
    try:
        fd = unnamed_file("phalanx-batch")
    except (OSError, AttributeError):  # a sandbox, or another system
        return False
    try:
        os.close(os.open(path_of(fd), os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class BatchBlock:
    """One block of a worker.

    Attributes:
        num_sent: Number of times that the block was sent to the rank.
        num_bytes: Room for data.
    """

    def __init__(self, num_bytes: int) -> None:
        step = max(_ALIGNMENT, (1 << num_bytes.bit_length()) // (2 * _STEPS))
        self.num_bytes = -(-num_bytes // step) * step
        self.num_sent = 0
        self._block = Block.create(self.num_bytes + COUNTS.size, "batch")
        self._bytes = torch.frombuffer(self._block.memory, dtype=torch.uint8)
        self._lent: weakref.ref[memoryview] | None = None
        self._is_inherited = False

    @property
    def data_ptr(self) -> int:
        return self._bytes.data_ptr()

    @property
    def inode(self) -> int:
        return self._block.address.inode

    @property
    def is_lent(self) -> bool:
        """Whether a tensor of this process may lie in the block."""
        return self._lent is not None and self._lent() is not None

    @property
    def is_lost(self) -> bool:
        """Whether the block is never free again."""
        return self._is_inherited or self._counts()[1] == NEVER

    @property
    def is_free(self) -> bool:
        return not self._is_inherited and not self.is_lent and self._counts()[1] == self.num_sent

    @property
    def may_be_forgotten(self) -> bool:
        return not self.is_lent and self._counts()[0] == self.num_sent

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= self.num_bytes <= 2 * num_bytes

    def lend(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of this process in the block."""
        view = memoryview(self._block.memory)[:num_bytes]
        self._lent = weakref.ref(view)  # the storage keeps the view
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def fill(self, source: torch.Tensor) -> None:
        self._bytes[: len(source)].copy_(source)

    def send(self) -> Address:
        """Count the block as sent and return its address."""
        self.num_sent += 1
        return self._block.address

    def note_fork(self) -> None:
        """Mark the block as lost if a forked child has tensors in it, which this process can't see."""
        self._is_inherited = self._is_inherited or self.is_lent

    def _counts(self) -> tuple[int, int]:
        received, given_back = COUNTS.unpack_from(self._block.memory, self.num_bytes)
        return received, given_back


class BlockPool:
    """The blocks of this worker.

    Args:
        num_batches: Number of batches for which blocks are held at most, at least 1.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._most_in_batch = 1
        self._blocks: list[BatchBlock] = []  # the one that was used last is at the end
        self._lock = threading.Lock()  # collate functions may run threads
        os.register_at_fork(before=self._note_fork, after_in_child=self._leave_to_parent)

    @property
    def inodes(self) -> tuple[int, ...]:
        """Inodes of all blocks that the pool holds."""
        return tuple(block.inode for block in self._blocks)

    def lend(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage for a tensor of this process; `lent_at` finds its block, which can be sent without a copy.

        Raises:
            OSError: The memory of the host, a cgroup or this process does not suffice.
        """
        with self._lock:
            return self._take(num_bytes).lend(num_bytes)

    def lent_at(self, data_ptr: int) -> BatchBlock | None:
        """Return the block in which a storage of this process lies; None if it lies elsewhere."""
        return next((block for block in self._blocks if block.data_ptr == data_ptr and block.is_lent), None)

    def send(self, source: torch.Tensor) -> Address:
        """Copy bytes into a block and return its address for the rank.

        Args:
            source: Bytes, of dtype uint8 and shape ``(num_bytes,)``.

        Raises:
            OSError: The memory of the host, a cgroup or this process does not suffice.
        """
        with self._lock:
            block = self._take(len(source))
            address = block.send()  # from here on no other thread takes it
        block.fill(source)
        return address

    def end_batch(self, num_blocks: int) -> None:
        """Note that a batch is complete, which has that many blocks, and forget blocks beyond the limit."""
        self._most_in_batch = max(self._most_in_batch, num_blocks)
        with self._lock:
            excess = len(self._blocks) - self._num_batches * self._most_in_batch
            for block in list(self._blocks):
                if block.may_be_forgotten and (excess > 0 or block.is_lost):
                    self._blocks.remove(block)
                    excess -= 1

    def _take(self, num_bytes: int) -> BatchBlock:
        free = [block for block in reversed(self._blocks) if block.fits(num_bytes) and block.is_free]
        block = min(free, key=lambda block: block.num_bytes, default=None)
        if block is None:
            block = BatchBlock(num_bytes)
        else:
            self._blocks.remove(block)
        self._blocks.append(block)
        return block

    def _note_fork(self) -> None:
        for block in self._blocks:
            block.note_fork()

    def _leave_to_parent(self) -> None:
        self._blocks, self._lock = [], threading.Lock()
