"""`SharedList`: a list whose items lie pickled in a block of shared memory and are made anew on each access.

An **index** of 64-bit numbers gives the place of each item, so one item costs one read of its own bytes. Most items are
a pickle and nothing else. The arrays and tensors of an item lie outside its pickle, each at a multiple of 64 bytes, so
the item's arrays and tensors are views of the block. Such an item begins with a byte that no pickle begins with, and
with the places of its parts.

Two alternatives were measured for a million records of a few fields. Arrow's and NumPy's own layouts need a schema,
which a list of arbitrary objects does not have. One pickle of the whole list takes a third less memory, but reading one
item would mean reading all of them.
"""

from __future__ import annotations

import operator
import pickle
import struct
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, SupportsIndex, overload

_HAS_PARTS = 0x00  # first byte of an item with parts; a pickle begins with 0x80
_HEAD = struct.Struct("<xxxxIQ")  # number of parts, size of the pickle; the first byte is _HAS_PARTS
_PART = struct.Struct("<QQ")  # place in the block, size
_PLACE = struct.Struct("<Q")


def encode(data: bytes, parts: Sequence[tuple[int, int]]) -> bytes:
    """Return an item as it lies in the block.

    Args:
        data: Pickle of the item.
        parts: Place and size of each buffer of the item.
    """
    if not parts:
        return data
    return b"".join((_HEAD.pack(len(parts), len(data)), *(_PART.pack(*part) for part in parts), data))


def decode(memory: memoryview, begin: int, end: int, *, copies: bool = False) -> Any:
    """Return an item that lies in a block.

    Args:
        memory: The block.
        begin: Place of what `encode` has returned.
        end: Place behind it.
        copies: Whether the item's arrays and tensors have memory of their own; otherwise, they are views of the block.
    """
    data = memory[begin:end]
    if data[0] != _HAS_PARTS:
        return pickle.loads(data)
    num_parts, size = _HEAD.unpack_from(data)
    starts = range(_HEAD.size, _HEAD.size + num_parts * _PART.size, _PART.size)
    parts = [_PART.unpack_from(data, start) for start in starts]
    views = [memory[place : place + length] for place, length in parts]
    buffers = map(bytearray, views) if copies else views
    return pickle.loads(data[starts.stop : starts.stop + size], buffers=buffers)


class SharedList(Sequence[Any]):
    """A read-only list in shared memory, made by `phalanx.share`.

    Each access makes the item anew; its arrays and tensors are views of the memory. Slices are plain lists.

    Args:
        mapping: Memory with the items, of type `packing.Region`.
        index_at: Place of the index in the memory, which has one number more than the list has items.
        length: Number of items.
    """

    def __init__(self, mapping: Any, index_at: int, length: int) -> None:
        self._mapping, self._index_at, self._length = mapping, index_at, length
        self._memory: memoryview = mapping.memory

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return [self._item(number) for number in range(*index.indices(self._length))]
        asked = operator.index(index)
        number = asked + self._length if asked < 0 else asked
        if not 0 <= number < self._length:
            raise IndexError(f"list index {asked} is out of range: there are {self._length} items")
        return self._item(number)

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (SharedList, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as for a list

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __getattr__(self, name: str) -> Any:
        reason = ": a SharedList can't be changed; make a list of it by list()" if hasattr(list, name) else ""
        raise AttributeError(f"'SharedList' object has no attribute {name!r}{reason}", name=name, obj=self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("a SharedList can't be changed: make a list of it by list()")

    __delitem__ = __setitem__

    def __repr__(self) -> str:
        return f"<SharedList of {self._length:,} items>"

    def __copy__(self) -> SharedList:
        return self  # nobody can change it

    def __deepcopy__(self, _: Any) -> SharedList:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)  # in a file or on another host, it is the list that it was made from

    def _item(self, number: int) -> Any:
        at = self._index_at + 8 * number
        return decode(self._memory, *struct.unpack_from("<QQ", self._memory, at))


def _hand_over(value: SharedList) -> tuple[Any, ...]:
    """Tell another process of this host where the list lies, as for a worker that was not forked."""
    return SharedList, (value._mapping, value._index_at, value._length)


ForkingPickler.register(SharedList, _hand_over)
