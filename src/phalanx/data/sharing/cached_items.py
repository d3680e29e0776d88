"""A dataset whose items are computed once on each host, by whichever rank or worker asks first, and then read.

The items lie in a sparse memfd, which all ranks of the host map and their workers inherit: a few words, an index with
one word for each item, and the items themselves. Under a key, they lie behind the dataset in the memory of the
supervisor (`kept`), so that ranks which are started again find them. A word of the index is 0 until its item is
complete, and then the item's place. It is written last and at once, so a reader sees a whole item or none, and needs no
lock.

**Who computes.** A process locks the item's word (an open file description lock) and looks again before it computes.
Whoever else wants this item waits for the lock, so ranks that read the same items in the same order, as in an
evaluation, share the work. Another lock is held while an item is written. The kernel releases the locks of a process
that is killed. What such a process has written is not in the index, and the next item overwrites it.

**An item is pickled** as those of a `SharedList` are, but each access copies its arrays and tensors out of the memory.
Transforms change items in place (``image.sub_(mean)``), and the next access must see the item as it was. In a view,
whose pages the kernel copies before the first write, this process would find its own change again. (In a `SharedList`
it does find it, as in any list.) Mapping the item anew on each access would prevent that, too, but its page faults take
as long as the copy.

**Nothing is evicted.** An epoch of random order asks for each item exactly once, so every item is needed equally soon,
and evicting one for another costs as much as it saves. Once the memory is full, the items that are there serve every
epoch, and the others are computed each time.

Pages are allocated by `os.pwrite`, which fails where a write to the mapping would end in a SIGBUS.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from numbers import Integral
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from phalanx._text import complain, in_units
from phalanx.data.sharing.packing import Address, Packer, Region, lock, open_region
from phalanx.data.sharing.shared_list import decode
from phalanx.host.cgroups import known_memory
from phalanx.host.shared_blocks import require_room, unnamed_file
from phalanx.wire.waiting import wait_until

# Words: end of the data, number of items in it, number of items of the dataset, two flags, the first item's word.
_END, _COUNT, _LENGTH, _IS_FULL, _IS_TOLD, _INDEX = range(6)
_HELD_AT = 8 * _COUNT  # byte on which whoever maps the memory holds a lock: no process locks the count alone
_NEVER = 1  # in place of an item's place: it can't be pickled, so it is always computed
_HEAD = struct.Struct("<QQ")  # before each item: where it is encoded, and its size with this head
_CHECKED_BYTES = 8 << 20  # after so many bytes, the limits of the host and of cgroups are looked at again
_PATIENCE_S = 60.0  # a process that computes an item for longer, or is suspended, is not waited for
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def limit_bytes(cache: bool | int | str) -> int:
    """Return the size that a cache may have, in bytes.

    Args:
        cache: Number of bytes, or text such as ``"8 GiB"``, or True for half of the memory that is free now.

    Raises:
        ValueError: It is something else.
    """
    if cache is True:
        return min((memory.left_bytes for memory in known_memory()), default=1 << 30) // 2
    if isinstance(cache, int) and cache >= 0:
        return int(cache)
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i)?B", cache) if isinstance(cache, str) else None
    if not found:
        raise ValueError(
            'phalanx.share: cache must be True, a number of bytes or a size such as "8 GiB" (or KiB, MiB, TiB), got '
            f"{cache!r}"
        )
    return int(float(found[1]) * _UNITS[f"{found[2] or ''}B"])


def require_items(dataset: Any) -> None:
    """Raise a TypeError if a dataset has no items that could be cached."""
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_items:
        raise TypeError(
            f"phalanx.share: a cache needs a dataset with __getitem__ and __len__, got {type(dataset).__name__}; "
            "without a cache, anything can be shared"
        )


def memory_for(dataset: Any, cache: bool | int | str) -> int:
    """Return the size of the memory for a dataset's items, in bytes; 0 if there is no cache.

    Args:
        cache: Size that the cache may have, as for `limit_bytes`, or False for none.

    Raises:
        TypeError: The dataset has no items that could be cached.
    """
    if not cache:
        return 0
    require_items(dataset)
    return _begin(len(dataset)) + limit_bytes(cache)


def lay_out(fd: int, offset: int, length: int) -> None:
    """Begin an empty cache in a memfd that is long enough.

    Args:
        offset: Place in the file, a multiple of the page size.
        length: Number of items of the dataset.

    Raises:
        OSError: Memory is short.
    """
    os.posix_fallocate(fd, offset, _begin(length))
    os.pwrite(fd, struct.pack("<QQQ", _begin(length), 0, length), offset)


def _begin(length: int) -> int:
    """Return the place of the first item."""
    return -(-8 * (_INDEX + length) // 64) * 64


def new_cache(length: int, size_bytes: int) -> Region:
    """Return new memory for items, which lasts as long as a process maps it.

    Args:
        length: Number of items of the dataset.
        size_bytes: Result of `memory_for`.

    Raises:
        OSError: Memory is short.
    """
    fd = unnamed_file("phalanx-cache", can_seal=True)
    try:
        os.ftruncate(fd, size_bytes)
        lay_out(fd, 0, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Region(fd, size_bytes, lock_at=_HELD_AT, is_private=False)
    finally:
        os.close(fd)


def begin_attempt(region: Region) -> None:
    """Forget that the cache was full: memory may be free in this attempt."""
    words = region.memory[: 8 * _INDEX].cast("Q")
    words[_IS_FULL] = words[_IS_TOLD] = 0


def open_cache(dataset: Any, address: Address) -> CachedDataset:
    """Return a dataset with the items that another process of this host keeps.

    Raises:
        OSError: As `open_region`.
    """
    return CachedDataset(dataset, Items(open_region(Address(*address), is_private=False)))


class CachedDataset(Dataset[Any]):
    """A dataset with a cache of its items, made by `phalanx.share`.

    Attributes, methods and everything but items are those of the dataset itself, which ``isinstance`` takes it for.
    Indices that are not whole numbers from 0 to the length are passed to the dataset, too. There is no
    ``__getitems__``, by which torch's loader would ask the dataset for a whole batch: the loader asks for each item.

    Args:
        dataset: The dataset.
        items: Memory for its items.
    """

    def __init__(self, dataset: Any, items: Items) -> None:
        vars(self).update(_dataset=dataset, _items=items)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # For `isinstance`. In a subclass made at run time, the dataset's methods would set attributes of this object.
        return type(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        is_number = isinstance(index, Integral) and not isinstance(index, bool)
        if not is_number or not 0 <= index < self._items.length:
            return self._dataset[index]
        return self._items.get(int(index), lambda: self._dataset[index])

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":
            raise AttributeError(f"a cached dataset has no {name}")
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __repr__(self) -> str:
        return f"<{self._dataset!r} with a cache>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._dataset,)  # in a file or on another host, it is the dataset that it was made from


def _itself(dataset: Any) -> Any:
    return dataset


def _hand_over(cached: CachedDataset) -> tuple[Any, ...]:
    """Tell another process of this host where the items lie, as for a worker that was not forked."""
    own = vars(cached)
    return open_cache, (own["_dataset"], own["_items"].region.address)


ForkingPickler.register(CachedDataset, _hand_over)


class Items:
    """The items of a dataset, as far as they were computed.

    Args:
        region: Memory for them.

    Attributes:
        length: Number of items of the dataset when the memory was laid out.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._memory = region.memory
        self.length = self._memory[: 8 * _INDEX].cast("Q")[_LENGTH]
        self._words = self._memory[: 8 * (_INDEX + self.length)].cast("Q")
        self._avoids_until_s = 0.0  # a process that writes an item is suspended

    def get(self, number: int, compute: Callable[[], Any]) -> Any:
        """Return an item, which is computed if it is not there yet."""
        at = _INDEX + number

        def is_settled() -> bool:
            return bool(self._words[at] or self._words[_IS_FULL])

        if not is_settled() and (fd := self._open()) is not None:
            try:
                if self._wait_for(fd, at, is_settled) and not is_settled():
                    return self._add(fd, number, compute())
            finally:
                os.close(fd)
        place = self._words[at]
        return _decode(self._memory[place:]) if place > _NEVER else compute()

    def _open(self) -> int | None:
        """Open the file anew, because locks belong to the open file, which threads and forked processes share."""
        try:
            return os.open(self.region.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # this process has no descriptor left
            return None

    def _wait_for(self, fd: int, word: int, is_over: Callable[[], Any] = lambda: False) -> bool:
        """Wait until a word is locked or the wait is over; return False if neither happens for long."""
        at, deadline = self.region.offset + 8 * word, time.monotonic() + _PATIENCE_S
        return bool(wait_until(lambda: is_over() or lock(fd, at, fcntl.F_WRLCK) or None, deadline))

    def _add(self, fd: int, number: int, item: Any) -> Any:
        """Write an item; return it as the next access will, or the item itself if it can't be written."""
        at = _INDEX + number
        try:
            data = _encode(item)
            copy = _decode(memoryview(data))
        except MemoryError:
            return item
        except Exception as error:  # the item may raise anything
            self._words[at] = _NEVER
            if not self._words[_IS_TOLD]:
                self._words[_IS_TOLD] = 1
                complain(
                    f"phalanx.share: item {number} of the dataset can't be cached, because {type(item).__name__} can't "
                    f"be pickled: {error}. Such items are computed on each access"
                )
            return item
        if time.monotonic() < self._avoids_until_s:
            return copy
        if not self._wait_for(fd, _END):
            self._avoids_until_s = time.monotonic() + _PATIENCE_S
        elif not self._words[at] and not self._words[_IS_FULL]:
            try:
                self._words[at] = self._write(fd, data)
            except OSError as error:
                self._words[_IS_FULL] = 1
                complain(self._why_full(len(data), error))
            lock(fd, self.region.offset + 8 * _END, fcntl.F_UNLCK)
        return copy

    def _write(self, fd: int, data: bytearray) -> int:
        """Write an item behind the others and return its place.

        Raises:
            OSError: The limit is reached, or memory is short.
        """
        begin = self._words[_END]
        end = begin + len(data)
        if end > len(self._memory):
            raise OSError
        if not self._words[_COUNT] or begin // _CHECKED_BYTES != end // _CHECKED_BYTES:
            require_room(_CHECKED_BYTES + len(data))
        done = 0
        with memoryview(data) as view:
            while done < len(data):
                done += os.pwrite(fd, view[done:], self.region.offset + begin + done)
        self._words[_END] = -(-end // 64) * 64
        self._words[_COUNT] += 1
        return begin

    def _why_full(self, more_bytes: int, error: OSError) -> str:
        count, used = self._words[_COUNT], self._words[_END]
        needed = (used + more_bytes) / (count + 1) * self.length
        why = f" ({error.strerror})" if error.strerror else ""
        return (
            f"phalanx.share: the cache is full{why}: it holds {count:,} of {self.length:,} items in {in_units(used)}, "
            f"and all would take about {in_units(needed)}. The others are computed on each access"
        )


class _Buffer:
    """What one item is written to before its size is known."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | memoryview, alignment: int = 1) -> int:
        self.data += bytes(-len(self.data) % alignment)
        place = len(self.data)
        self.data += data
        return place


def _encode(item: Any) -> bytearray:
    buffer = _Buffer()
    buffer.write(bytes(_HEAD.size))
    place = buffer.write(Packer(io.BytesIO(), buffer).encoded(item))
    _HEAD.pack_into(buffer.data, 0, place, len(buffer.data))
    return buffer.data


def _decode(memory: memoryview) -> Any:
    return decode(memory, *_HEAD.unpack_from(memory), copies=True)
