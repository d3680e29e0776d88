"""`allocate_tensor`: CPU tensors in memory that other ranks of the host can map, and the reuse of that memory.

Each tensor has a block of its own (`phalanx.host.shared_blocks`). FSDP2 asks for two tensors per collective and frees
them after it, and the kernel clears each new page. So a block that was never handed to another process is kept when its
tensor is freed, and reused for the next tensor of about the same size: 16 MiB then cost 16 us instead of 18 ms. A block
that was handed over is closed instead: peers may still map it, and must never see another tensor in it.

Blocks are kept for 20 s, and in total at most as many bytes as tensors have needed at once. All kept blocks are freed
when a new block is refused, or when memory runs short. Allocating and freeing a tensor check for this, at most once per
second; at other times no memory is freed, because no thread runs for that.

Two descriptors are open while a tensor lives: one for the block and one for its mapping (Python's ``mmap`` duplicates
the first). The alternative was a range within one large block, with two descriptors in all. But then the kernel would
not know which ranges peers still map, and a rank that died at the wrong moment would leave a reference that nobody
releases.
"""

from __future__ import annotations

import bisect
import contextlib
import time
import weakref

import torch

from phalanx._errors import ArgumentError, OutOfSharedMemory
from phalanx._text import in_units
from phalanx.backend.deadlines import KEPT_S, MEMORY_LOOK_S
from phalanx.backend.types import DTYPE_CODES
from phalanx.host.cgroups import known_memory
from phalanx.host.shared_blocks import Block

PURPOSE = "tensors"
_MOST_WASTE = 8  # a kept block serves a tensor that needs at least 7/8 of it
_LEAST_SHARE = 16  # memory is short if less than 1/16 of a limit is left
_PAGE = 4096
_ADVICE = "free memory, raise the limit that is named, or allocate smaller tensors"


class Pool:
    """The blocks of this process's shared tensors: those in use, and free ones that are kept.

    A tensor may be freed in any thread at any moment, even during these methods. So the methods hold no lock, and
    change the lists only by single, atomic operations.
    """

    def __init__(self) -> None:
        self._used: dict[int, Block] = {}  # by address
        self._kept: list[tuple[int, float, Block]] = []  # size, and when it was freed
        self._shown: set[int] = set()  # addresses of blocks in use that were handed over
        self._peak_bytes = 0
        self._looked_s = 0.0

    def take(self, size_bytes: int) -> tuple[memoryview, int]:
        """Return a view of at least `size_bytes` of memory, and its address. Freeing the view gives the memory back.

        Raises:
            OSError: There is no memory.
        """
        self.look()
        wanted = -(-size_bytes // _PAGE) * _PAGE
        block = self._take_kept(wanted)
        if block is None:
            try:
                block = Block.create(wanted, PURPOSE)
            except OSError:
                if not self._kept:
                    raise
                self.give_back()
                block = Block.create(wanted, PURPOSE)
        view = memoryview(block.memory)
        address = torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()
        self._used[address] = block
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        weakref.finalize(view, self._free, address).atexit = False
        return view, address

    def _take_kept(self, wanted: int) -> Block | None:
        for entry in sorted(self._kept, key=lambda entry: entry[0]):
            size, _, block = entry
            if wanted <= size <= wanted + wanted // (_MOST_WASTE - 1) and not block.is_inherited:
                with contextlib.suppress(ValueError):  # another thread has taken it
                    self._kept.remove(entry)
                    return block
        return None

    def _free(self, address: int) -> None:
        """Keep or close the block of a tensor that is gone."""
        block = self._used.pop(address)
        if address in self._shown or block.is_inherited:  # others may use it: peers, or the parent
            self._shown.discard(address)
            block.close()
            return
        self._kept.append((block.size_bytes, time.monotonic(), block))
        self._trim(self._peak_bytes - self.used_bytes)
        self.look()

    def look(self) -> None:
        """Give back blocks that have long been unused, or all if memory is short; check at most once per second."""
        now_s = time.monotonic()
        if not self._kept or now_s < self._looked_s + MEMORY_LOOK_S:
            return
        self._looked_s = now_s
        if any(memory.left_bytes < memory.limit_bytes // _LEAST_SHARE for memory in known_memory()):
            self.give_back()
            return
        if any(now_s > freed_s + KEPT_S for _, freed_s, _ in self._kept):
            self._peak_bytes = self.used_bytes
            self._kept[:] = [entry for entry in self._kept if now_s <= entry[1] + KEPT_S]

    def _trim(self, most_bytes: int) -> None:
        """Give back the blocks that have been unused longest, until at most `most_bytes` are kept."""
        while sum(size for size, _, _ in self._kept) > most_bytes:
            with contextlib.suppress(IndexError):
                del self._kept[0]

    def give_back(self) -> None:
        """Give back all kept blocks."""
        self._kept.clear()
        self._peak_bytes = self.used_bytes

    def find(self, tensor: torch.Tensor) -> tuple[Block, int] | None:
        """Return the block that holds a tensor, and the offset of the tensor's storage in it; None if there is none.

        From now on, the block counts as handed over.
        """
        start = tensor.untyped_storage().data_ptr()
        starts = sorted(self._used)
        at = bisect.bisect_right(starts, start) - 1
        if at < 0 or start >= starts[at] + self._used[starts[at]].size_bytes:
            return None
        self._shown.add(starts[at])
        return self._used[starts[at]], start - starts[at]

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks of tensors in use."""
        return sum(block.size_bytes for block in list(self._used.values()))

    @property
    def state(self) -> tuple[int, int]:
        """Bytes of tensors in use, and bytes kept."""
        return self.used_bytes, sum(size for size, _, _ in self._kept)


POOL = Pool()
"""The pool of this process. A forked child shares the memory of the tensors that it inherits, and reuses none of it."""


def allocates_on(device: torch.device | str | int) -> bool:
    """Whether `allocate_tensor` hands out tensors on a device; False for a number, which names an accelerator."""
    name = str(device) if isinstance(device, (str, torch.device)) else ""  # torch.device refuses names unknown to it
    return name.partition(":")[0] == "cpu"


def allocate_tensor(
    size: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, rank: int = 0
) -> torch.Tensor:
    """Return an uninitialized CPU tensor in memory that other ranks of this host can map.

    In other respects, it is an ordinary tensor. A forked child shares the tensor's memory with its parent.

    Args:
        size: Length of the tensor, of shape ``(size,)``.
        dtype: Dtype of the tensor; None: torch's default.
        device: The CPU; None stands for the CPU, too.
        rank: This rank in the world, for messages.

    Raises:
        ArgumentError: `device` is not the CPU, `size` is invalid, or `dtype` can't be allocated.
        OutOfSharedMemory: The host, a cgroup or a limit of this process has no room for the tensor.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    where = f"rank {rank}: allocate_tensor"
    if type(size) is not int or size < 0:
        raise ArgumentError(f"{where}: size must be a number of elements, at least 0, got {size!r}")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{where}: dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
    if device is not None and not allocates_on(device):
        raise ArgumentError(
            f"{where} hands out CPU memory, which the ranks of a host share; got device {device}. "
            "Leave device out, or use torch.empty for that device"
        )
    if dtype not in DTYPE_CODES or dtype in _QUANTIZED:
        raise ArgumentError(f"{where} can't hand out {dtype}: its elements come with a scale; use their integer dtype")
    if size == 0:
        return torch.empty(0, dtype=dtype)
    size_bytes = size * dtype.itemsize
    try:
        view, _ = POOL.take(size_bytes)
    except (OSError, OverflowError) as error:  # OverflowError: more bytes than a size can express
        text = getattr(error, "strerror", None) or error
        raise OutOfSharedMemory(
            f"{where}: no {in_units(size_bytes)} of shared memory for {size} elements of {dtype}: {text}; {_ADVICE}",
            op="allocate_tensor",
            ranks=(rank,),
        ) from error
    return torch.frombuffer(view, dtype=dtype, count=size)


_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32}
