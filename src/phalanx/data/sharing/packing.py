"""Objects in sealed memory: a pickle, whose arrays, tensors and long lists lie beside it and are read in place.

An object is written once by `pack` and read by any number of processes with `unpack`. Pickle's protocol 5 hands over
the buffers of arrays (NumPy, pandas, Arrow) apart from the pickle; `Packer` adds those of tensors, and lays out each
long list item by item (`shared_list`). Only what is left, the skeleton, takes memory in each process.

**Written to** what is read in place may be: the mapping is private, so the kernel copies a page before the first write
to it, and no other process sees the change. An unshared dataset behaves in the same way. A mapping without permission
to write would turn a write into a SIGSEGV, because torch has no tensors that can't be written to.

The file grows while an object is written, so that there are never two copies. It is sealed against all changes at the
end: nobody can change what others read.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import io
import mmap
import os
import pickle
import struct
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.data.sharing.shared_list import SharedList, encode
from phalanx.host.shared_blocks import map_part, open_file_of, path_of, require_room, unnamed_file

PURPOSE = "dataset"
LONG = 1000  # items from which on a list is laid out item by item
_LARGE_BYTES = 64 << 10  # smaller writes are gathered
_CHECKED_BYTES = 8 << 20  # after so many bytes, the limits of the host and of cgroups are looked at again
_FOOT = struct.Struct("<QQQ")  # place and size of the skeleton, number of its buffers
_PART = struct.Struct("<QQ")  # place and size of a buffer
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_SET_LOCK = 37  # F_OFD_SETLK: the lock belongs to the open file, which a mapping of it keeps open, too


class NotPackedError(ValueError):
    """An object can't be pickled; the message says which."""


class NoRoomError(OSError):
    """Memory is short."""


class Address(NamedTuple):
    """The process and descriptor through which other processes open a region's file, its inode, and the region."""

    pid: int
    fd: int
    inode: int
    size_bytes: int
    offset: int
    lock_at: int


class Region:
    """A part of a memfd in this process's memory; other processes can map it, too, as long as this object lives.

    Args:
        fd: Descriptor of the file, which stays the caller's.
        size_bytes: Size of the part.
        offset: Place of the part, a multiple of the page size.
        lock_at: Byte of the file on which this object, and the memory, hold a shared lock.
        is_private: Whether what this process writes to the memory stays private.

    Attributes:
        memory: The memory.
        offset: Place of the part.
    """

    def __init__(self, fd: int, size_bytes: int, offset: int = 0, lock_at: int = 0, *, is_private: bool = True) -> None:
        # Not a duplicate of the descriptor: locks belong to the open file.
        self._fd = os.open(path_of(fd), (os.O_RDONLY if is_private else os.O_RDWR) | os.O_CLOEXEC)
        self.offset = offset
        self._place = size_bytes, offset, lock_at
        lock(self._fd, lock_at, fcntl.F_RDLCK)
        self.memory = memoryview(map_part(self._fd, PURPOSE, size_bytes, offset, is_private=is_private))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # the interpreter is ending, or `__init__` failed
            os.close(self._fd)

    @property
    def address(self) -> Address:
        """Address for `open_region` of another process."""
        return Address(os.getpid(), self._fd, os.fstat(self._fd).st_ino, *self._place)

    @property
    def path(self) -> str:
        """Path at which this process can open the file again, for locks of its own."""
        return path_of(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_region, (self.address,)


_mapped: weakref.WeakValueDictionary[tuple[int, int], Region] = weakref.WeakValueDictionary()


def open_region(address: Address, *, is_private: bool = True) -> Region:
    """Map what another process of this host has mapped.

    Args:
        is_private: Whether what this process writes to the memory stays private.

    Raises:
        OSError: The other process has ended, belongs to another user or runs in another container.
    """
    key = address.inode, address.offset
    if (found := _mapped.get(key)) is not None:
        return found
    fd = open_file_of(*address[:3], os.O_RDONLY if is_private else os.O_RDWR)
    try:
        found = _mapped[key] = Region(fd, *address[3:], is_private=is_private)
        return found
    finally:
        os.close(fd)


def lock(fd: int, at: int, kind: int) -> bool:
    """Lock or unlock a byte of a file for whoever keeps the open file open; return whether that succeeded."""
    try:
        fcntl.fcntl(fd, _SET_LOCK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except OSError:
        return False
    return True


class Sink(Protocol):
    """Where the parts of an object are written."""

    def write(self, data: bytes | memoryview, alignment: int = 1) -> int:
        """Append bytes at a multiple of `alignment`; return their place."""


class _File:
    """What is written to a memfd from `begin` on.

    Attributes:
        end: Number of bytes written.
    """

    def __init__(self, fd: int, begin: int) -> None:
        self._fd, self._begin = fd, begin
        self._put_bytes = 0
        self.end = 0
        self._pending = bytearray()  # small writes, gathered
        self._unchecked_bytes = 0

    def write(self, data: bytes | memoryview, alignment: int = 1) -> int:
        """Append bytes at a multiple of `alignment`; return their place.

        Raises:
            OSError: Memory is short.
        """
        self._pending += bytes(-self.end % alignment)
        self.end += -self.end % alignment
        place = self.end
        self.end += len(data)
        if len(data) < _LARGE_BYTES:
            self._pending += data
            if len(self._pending) >= _LARGE_BYTES:
                self.flush()
        else:
            self.flush()
            self._put(memoryview(data))
        return place

    def flush(self) -> None:
        """Write what is pending."""
        with memoryview(self._pending) as pending:
            self._put(pending)
        self._pending.clear()

    def _put(self, data: memoryview) -> None:
        self._unchecked_bytes += len(data)
        if self._unchecked_bytes >= _CHECKED_BYTES:
            self._require_room()
        try:
            while data:
                num_bytes = os.pwrite(self._fd, data, self._begin + self._put_bytes)
                data = data[num_bytes:]
                self._put_bytes += num_bytes
        except OSError as error:
            raise NoRoomError(error.errno, error.strerror) from error

    def _require_room(self) -> None:
        try:
            require_room(self._unchecked_bytes)
        except OSError as error:
            raise NoRoomError(error.errno, error.strerror) from error
        self._unchecked_bytes = 0


def _take(file: Sink, parts: list[tuple[int, int]], buffer: pickle.PickleBuffer) -> bool:
    """Write a buffer and note its place; return False, so that it is left out of the pickle."""
    with buffer.raw() as data:
        size = len(data)
        parts.append((file.write(data, 64 if size >= 64 else 16), size))
    return False


class Packer(pickle.Pickler):
    """Pickles one object; buffers go to the file, and `parts` has their places and sizes."""

    def __init__(self, into: io.BytesIO | _Nowhere, file: Sink) -> None:
        self._into: Any = into
        self.parts: list[tuple[int, int]] = []
        # A method of this object as the callback would be a circle, which keeps all that was pickled until it is found.
        super().__init__(into, protocol=5, buffer_callback=functools.partial(_take, file, self.parts))
        self._storages: dict[tuple[int, int], _Bytes] = {}

    def encoded(self, item: Any) -> bytes:
        """Forget what was pickled, and return the next item as it lies in a list, beside its parts."""
        self.clear_memo()
        self._storages.clear()
        self.parts.clear()
        self._into.seek(0)
        self.dump(item)
        self._into.truncate()
        return encode(self._into.getvalue(), self.parts)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value) and not value.__dict__:
            return self._reduce_tensor(value)
        if type(value) is Tensor and value.layout is torch.sparse_coo:
            whole = value.detach().coalesce()
            return _sparse_tensor, (whole.indices(), whole.values(), whole.shape, value.requires_grad)
        numpy = sys.modules.get("numpy")  # without it, there are no arrays
        return NotImplemented if numpy is None else _reduce_array(numpy, value)

    def _reduce_tensor(self, value: Tensor) -> Any:
        storage = value.untyped_storage()
        if 2 * value.numel() * value.itemsize < storage.nbytes():  # a small view of something large
            value = value.contiguous().clone()
            storage = value.untyped_storage()
        # Tensors that share their memory share it afterwards, too.
        key = storage.data_ptr(), storage.nbytes()
        data = self._storages.setdefault(key, _Bytes(storage)) if storage.nbytes() else None
        how = value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad
        return _tensor, (data, *how)


class _WholePacker(Packer):
    """Pickles an object and lays out its long lists."""

    def __init__(self, into: io.BytesIO, file: _File) -> None:
        super().__init__(into, file)
        self._file = file
        self._places: dict[int, tuple[int, int]] = {}
        self._lists: list[Any] = []  # keeps the ids valid

    def persistent_id(self, value: Any) -> tuple[int, int] | None:
        if type(value) not in (list, SharedList) or len(value) < LONG:
            return None
        if id(value) not in self._places:
            self._lists.append(value)
            self._places[id(value)] = (_write_items(value, self._file), len(value))
        return self._places[id(value)]


class _Bytes:
    """The memory of a storage, as a value that is pickled once however many tensors use it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = (ctypes.c_ubyte * self._storage.nbytes()).from_address(self._storage.data_ptr())
        return _view, (pickle.PickleBuffer(whole),)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a view of ordinary memory and nothing else."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized
    return is_dense and tensor.is_leaf and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)


def _reduce_array(numpy: Any, value: Any) -> Any:
    if not isinstance(value, numpy.ndarray):
        return NotImplemented
    if value.dtype.hasobject:
        make, arguments, (*head, items) = value.__reduce__()
        return _object_array, (make, arguments, head, tuple(items))  # not a list, which could be laid out as a long one
    if type(value) is numpy.memmap and isinstance(value.base, mmap.mmap) and value.filename and value.mode != "c":
        # It is one copy for all processes already, and may be larger than memory.
        mode = "r" if value.mode == "r" else "r+"
        return numpy.memmap, (value.filename, value.dtype, mode, value.offset, value.shape, _order_of(value))
    if type(value) is numpy.memmap or (type(value) is numpy.ndarray and not value.flags.forc):
        return numpy.ascontiguousarray(value).view(numpy.ndarray).__reduce_ex__(5)
    return NotImplemented


def _object_array(make: Any, arguments: Any, head: Any, items: Any) -> Any:
    made = make(*arguments)
    made.__setstate__((*head, list(items)))
    return made


def _order_of(array: Any) -> str:
    return "C" if array.flags.c_contiguous else "F"


def _view(data: Any) -> Any:
    return data


def _tensor(data: Any, dtype: torch.dtype, shape: Any, stride: Any, offset: int, requires_grad: bool) -> Tensor:
    with torch.inference_mode(False):
        if data is None:
            made = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            whole = torch.frombuffer(data, dtype=torch.uint8)
            made = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(shape, stride, offset)
        return made.requires_grad_(requires_grad)


def _sparse_tensor(indices: Tensor, values: Tensor, shape: Any, requires_grad: bool) -> Tensor:
    # Not the way of torch's own pickles, which keep each tensor that they make in a global list.
    return torch.sparse_coo_tensor(
        indices, values, shape, requires_grad=requires_grad, is_coalesced=True, check_invariants=False
    )


def _write_items(items: Sequence[Any], file: _File) -> int:
    """Write the items of a list and their index; return the place of the index."""
    index = array.array("Q")
    packer = Packer(io.BytesIO(), file)
    for number, item in enumerate(items):
        try:
            data = packer.encoded(item)
        except NoRoomError:
            raise
        except Exception as error:  # an item may raise anything
            raise _not_packed(item, f"item {number} of a list", error) from error
        index.append(file.write(data))
    index.append(file.end)
    return file.write(index.tobytes(), 8)


class _Nowhere:
    """Stands in for the files that a pickle is written to."""

    def write(self, data: Any, alignment: int = 1) -> int:
        return 0


def _not_packed(value: Any, name: str, error: Exception) -> NotPackedError:
    """Return an error that names the innermost part of an object which can't be pickled."""
    parts = _named_parts(value)
    while parts:
        inner, part = parts.pop()
        try:
            Packer(_Nowhere(), _Nowhere()).dump(part)
        except Exception as found:
            name, value, error, parts = f"{inner} of {name}" if name != "it" else inner, part, found, _named_parts(part)
    if isinstance(value, (types.GeneratorType, map, filter, zip)):
        advice = "make a list of it"
    elif isinstance(value, types.FunctionType) or "local object" in f"{error}":
        advice = "define it at the top level of a module"
    else:
        advice = "share the data without it, or leave it out in a __getstate__ of its owner"
    return NotPackedError(f"{name} can't be pickled: {error or type(error).__name__}; {advice}")


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        return [(f"item {number}", part) for number, part in enumerate(value)]
    if isinstance(value, dict):
        return [(f"item {key!r}", part) for key, part in value.items()]
    has_own_state = getattr(type(value), "__getstate__", None) is not getattr(object, "__getstate__", None)
    if isinstance(value, (types.FunctionType, type)) or has_own_state:
        return []
    return [(f"attribute {key!r}", part) for key, part in getattr(value, "__dict__", {}).items()]


def write(value: Any, fd: int, begin: int = 0) -> int:
    """Write an object into a memfd, from `begin` on; return its size.

    Raises:
        NotPackedError: The object has a part that can't be pickled.
        OSError: Memory is short.
    """
    file, into = _File(fd, begin), io.BytesIO()
    packer = _WholePacker(into, file)
    try:
        packer.dump(value)
    except (NotPackedError, NoRoomError):
        raise
    except Exception as error:  # the object may raise anything
        raise _not_packed(value, "it", error) from error
    at = file.write(b"".join(_PART.pack(*part) for part in packer.parts))
    file.write(into.getbuffer())
    file.write(_FOOT.pack(at, len(packer.parts), into.tell()))
    file.flush()
    return file.end


def pack(value: Any) -> Region:
    """Write an object into new memory, seal it, and return the mapping.

    Raises:
        NotPackedError: The object has a part that can't be pickled.
        OSError: Memory is short.
    """
    fd = unnamed_file(f"phalanx-{PURPOSE}", can_seal=True)
    try:
        size_bytes = write(value, fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        return Region(fd, size_bytes)
    finally:
        os.close(fd)


def skeleton_bytes(mapping: Region) -> int:
    """Return the size of what each process that reads an object makes for itself."""
    return int(_FOOT.unpack_from(mapping.memory, len(mapping.memory) - _FOOT.size)[2])


def unpack(mapping: Region) -> Any:
    """Return the object that was written to this memory; its arrays and tensors are views of the mapping."""
    memory = mapping.memory
    at, num_parts, size = _FOOT.unpack_from(memory, len(memory) - _FOOT.size)
    data_at = at + num_parts * _PART.size
    parts = _PART.iter_unpack(memory[at:data_at])
    return _Unpacker(mapping, memory[data_at : data_at + size], [memory[p : p + n] for p, n in parts]).load()


class _Unpacker(pickle.Unpickler):
    def __init__(self, mapping: Region, data: memoryview, parts: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(data), buffers=parts)
        self._mapping = mapping

    def persistent_load(self, place: tuple[int, int]) -> SharedList:
        return SharedList(self._mapping, *place)
