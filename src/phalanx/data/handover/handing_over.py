"""`HandingOver`: how a worker of a loader hands a batch to its rank without ``/dev/shm``.

torch gives each storage of a batch a file in ``/dev/shm``, and a worker dies of SIGBUS when that is full, as in a
container, which has 64 MiB of it. Here the worker pickles the batch itself, at the end of its collate function:

- A tensor of less than 64 KiB travels in the pickle, through torch's own queue.
- Bytes of a larger tensor or array are copied into a block of memory without a name (`batch_blocks`), whose address
  travels. torch's collate functions write into such a block at once, without that copy.
- Of a view, only its own bytes are copied. Views that overlap still do on the other side.
- What torch has in shared memory already, and what is not in the CPU's memory, travels as torch has it.

A batch that can't be pickled is an error of the worker, which the rank raises. torch pickles in a thread: there the
rank would wait for ever. `python -m bench.data` measures all this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils import data as torch_data

from phalanx._torch.storages import can_share_storages, make_shared_storages_with
from phalanx.data.handover import received
from phalanx.data.handover.batch_blocks import BatchBlock, BlockPool, can_hand_over
from phalanx.host.shared_blocks import Address

_IN_PICKLE_BYTES = 64 << 10  # fewer bytes pass through the queue's pipe faster than a block is mapped
_ALIGNMENT = 64  # of the beginning of the bytes that are sent of a storage, so that any dtype can lie in them
_PLAIN = (int, float, bool, str, bytes, type(None))  # their pickles have nothing to hand over
_IN_WORK = 4  # batches: one that is filled, one that the rank uses, its predecessor, one that is given back

_numbers = itertools.count()


class Piece(NamedTuple):
    """Bytes of a storage on their way to the rank.

    Attributes:
        start: Place of the first byte in the worker's storage.
        num_bytes: Number of bytes.
        place: The bytes themselves, or the address of the block in which they lie.
    """

    start: int
    num_bytes: int
    place: bytearray | Address


class HandingOver:
    """Collates samples in a worker, and returns the batch in a form that becomes the batch itself in the rank.

    Args:
        collate: Collate function of the loader.
        prefetch_factor: Number of batches that a worker loads ahead.
    """

    def __init__(self, collate: Callable[[Any], Any], prefetch_factor: int) -> None:
        self._collate = collate
        self._num_batches = prefetch_factor + _IN_WORK
        self._number = next(_numbers)
        self._pool: BlockPool | None = None
        self._has_begun = False
        self._received: Any = received.of_iterator(self._number)  # torch's iterator holds this object

    def __call__(self, samples: Any) -> Any:
        if not self._has_begun:
            self._begin()
        batch = self._collate(samples)
        return batch if self._pool is None or type(batch) in _PLAIN else pack(batch, self._pool, self._number)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_received": None}

    def forget(self, worker: int) -> None:
        """Forget what a dead worker has handed over; batches of it stay valid.

        Args:
            worker: Process that has died.
        """
        with received.lock:
            received.of_iterator(self._number).forget(worker)

    def _begin(self) -> None:
        self._has_begun, self._received = True, None
        if torch_data.get_worker_info() is not None and can_hand_over():
            self._pool = BlockPool(self._num_batches)
            make_shared_storages_with(self._new_storage)

    def _new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        assert self._pool is not None
        return torch.UntypedStorage(num_bytes) if num_bytes < _IN_PICKLE_BYTES else self._pool.lend(num_bytes)


@contextlib.contextmanager
def handed_over(loader: torch_data.DataLoader[Any]) -> Iterator[Callable[[int], None]]:
    """Let the workers that a loader starts in a context hand over their batches without ``/dev/shm``.

    Whoever has chosen torch's strategy "file_system" gets that.

    Yields:
        Function that forgets what a worker has handed over, to be called with its pid when it has died.
    """
    is_wanted = loader.num_workers and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not is_wanted or not can_hand_over() or not can_share_storages():
        yield lambda pid: None
        return
    received.watch_forks()
    collate = loader.collate_fn
    loader.collate_fn = handing_over = HandingOver(collate, loader.prefetch_factor or 1)
    try:
        yield handing_over.forget
    finally:
        loader.collate_fn = collate


# ---- in the worker -------------------------------------------------------------------------------------------------


class Parcel:
    """A pickled batch and the places of its bytes; unpickling this gives the batch."""

    def __init__(self, *contents: Any) -> None:
        self._contents = contents

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return unpack, self._contents


def pack(batch: Any, pool: BlockPool, iterator: int) -> Parcel:
    """Return a batch as data and blocks.

    Raises:
        OSError: There is no memory for the blocks.
        Exception: The batch can't be pickled.
    """
    file = io.BytesIO()
    packer = _Packer(file, pool)
    packer.dump(batch)
    storages = packer.pieces_of_storages()
    places = [piece.place for piece in itertools.chain(packer.buffers, *storages)]
    pool.end_batch(sum(isinstance(place, Address) for place in places))
    return Parcel(iterator, os.getpid(), pool.inodes, storages, packer.buffers, file.getvalue())


class _Source:
    """A storage of the worker, and the parts of it that a batch needs."""

    def __init__(self, number: int, storage: torch.UntypedStorage, block: BatchBlock | None) -> None:
        self.number, self.storage, self.block = number, storage, block
        self._parts: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        self._parts.append((start // _ALIGNMENT * _ALIGNMENT, stop))

    def parts(self) -> list[tuple[int, int]]:
        """Return the half-open ranges of bytes that are needed; those that overlap are one."""
        if self.block is not None:
            return [(0, self.storage.nbytes())]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self._parts):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return merged


class _Packer(ForkingPickler):
    """Pickles a batch without the bytes of its storages and arrays.

    Attributes:
        buffers: Bytes of large arrays, in the order in which they are unpickled.
    """

    def __init__(self, file: io.BytesIO, pool: BlockPool) -> None:
        self._pool = pool
        self._sources: dict[tuple[int, int], _Source] = {}
        self.buffers: list[Piece] = []
        # A method of this object would keep it, and with it the batch, until the next collection of cycles.
        keep_in_pickle = functools.partial(_keep_in_pickle, pool, self.buffers)
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, keep_in_pickle)

    def pieces_of_storages(self) -> list[list[Piece]]:
        """Send the bytes of all storages and return where they are."""
        return [[self._send(source, *part) for part in source.parts()] for source in self._sources.values()]

    def _send(self, source: _Source, start: int, stop: int) -> Piece:
        num_bytes = stop - start
        if source.block is not None:
            return Piece(start, num_bytes, source.block.send())
        if num_bytes < _IN_PICKLE_BYTES:
            return Piece(start, num_bytes, bytearray(ctypes.string_at(source.storage.data_ptr() + start, num_bytes)))
        whole = torch.empty(0, dtype=torch.uint8).set_(source.storage)
        return Piece(start, num_bytes, self._pool.send(whole[start:stop]))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return self._reduce_tensor(obj)
        if type(obj) is torch.UntypedStorage:
            return self._reduce_storage(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain or tensor.is_nested:
            return NotImplemented
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():  # torch's workers lose this
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        source = self._source_of(tensor.untyped_storage())
        if source is None:
            return NotImplemented
        form = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return _empty, form
        start = int(tensor.storage_offset())
        last = start + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        source.add(start * tensor.itemsize, (last + 1) * tensor.itemsize)
        return _tensor, (source.number, start * tensor.itemsize, *form)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        source = self._source_of(storage)
        if source is None:
            return NotImplemented
        source.add(0, storage.nbytes())
        return _storage, (source.number,)

    def _source_of(self, storage: torch.UntypedStorage) -> _Source | None:
        """Return what is noted about a storage; None if torch is to send it."""
        if storage.device.type != "cpu" or not storage.nbytes() or storage.is_shared():
            return None
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._sources:
            self._sources[key] = _Source(len(self._sources), storage, self._pool.lent_at(key[0]))
        return self._sources[key]


def _keep_in_pickle(pool: BlockPool, sent: list[Piece], buffer: pickle.PickleBuffer) -> bool:
    """Send the bytes of a large array in a block; return whether they are to be pickled instead."""
    with buffer.raw() as memory:
        if memory.readonly or memory.nbytes < _IN_PICKLE_BYTES:
            return True
        place = pool.send(torch.frombuffer(memory, dtype=torch.uint8))
        sent.append(Piece(0, memory.nbytes, place))
        return False


# ---- in the rank ---------------------------------------------------------------------------------------------------


class _Storages(list[list[tuple[int, torch.UntypedStorage]]]):
    """The storages of a batch: of each its parts, as place of the first byte and storage of the part."""


class _Unpickled(threading.local):
    """The batch that this thread unpickles."""

    storages: weakref.ref[_Storages]  # so that nothing keeps them once `unpack` has ended, in whatever way


_unpickled = _Unpickled()


def unpack(
    iterator: int, worker: int, kept: tuple[int, ...], storages: list[list[Piece]], buffers: list[Piece], body: bytes
) -> Any:
    """Return the batch that a worker has packed; the arguments are the contents of a `Parcel`.

    Raises:
        OSError: The worker has ended, or this process may not open more files.
    """
    with received.lock:
        blocks = received.of_iterator(iterator)
        blocks.begin_batch(worker, kept)
        opened = _Storages([(piece.start, _open(piece, blocks)) for piece in pieces] for pieces in storages)
        arrays = [_array(_open(piece, blocks)) for piece in buffers]
    _unpickled.storages = weakref.ref(opened)
    return pickle.loads(body, buffers=arrays)


def _open(piece: Piece, blocks: received.ReceivedBlocks) -> torch.UntypedStorage:
    if isinstance(piece.place, Address):
        return blocks.storage_at(piece.place, piece.num_bytes)
    return torch.frombuffer(piece.place, dtype=torch.uint8).clone().untyped_storage()


def _array(storage: torch.UntypedStorage) -> Any:
    """Return a writable buffer that keeps a storage; there is one only if the batch has arrays of numpy."""
    whole: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    return whole.numpy()


def _tensor(
    number: int, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    first, storage = next(piece for piece in reversed(_parts_of(number)) if piece[0] <= start)
    tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(storage, (start - first) // dtype.itemsize, shape, stride)
    return tensor


def _storage(number: int) -> torch.UntypedStorage:
    (_, storage), = _parts_of(number)  # fmt: skip
    return storage


def _parts_of(number: int) -> list[tuple[int, torch.UntypedStorage]]:
    storages = _unpickled.storages()
    assert storages is not None
    return storages[number]


def _empty(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)
