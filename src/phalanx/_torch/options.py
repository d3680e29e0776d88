"""Where torch's options (``AllreduceOptions`` and so on) hold their values in memory.

pybind11 makes a Python object of each property that is read, which for ``reduceOp`` takes longer than the rest of a
small all_reduce. So the core reads the values where they lie. The places differ between versions of torch, and
`Layout.of` finds them by setting values and looking for them. It reads the memory through ``/proc/self/mem``, where a
`Layout.of` finds them by setting values and looking for them. It reads the memory through ``/proc/self/mem``, where a
wrong address is an error and not the end of the process. If a version of torch keeps its options in another way, no
layout is found, and the properties are read as Python objects.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import ReduceOp

_MOST_BYTES = 256  # number of bytes that are searched; torch's options are smaller
_ABSENT = -1  # offset of a field that the options lack


class Layout(NamedTuple):
    """Offsets in bytes from the beginning of the C++ object; -1 if the options lack `reduce_op` or `root`.

    Attributes:
        async_op: Offset of a byte, 0 or 1.
        timeout: Offset of a signed 64-bit number of milliseconds.
        reduce_op: Offset of a byte, the number of the ``RedOpType``.
        root: Offset of a signed 64-bit rank.
    """

    async_op: int
    timeout: int
    reduce_op: int
    root: int

    @classmethod
    @functools.cache  # several operations have the same options, and the search takes 0.2 to 0.5 ms
    def of(cls, options: type) -> Layout | None:
        """Return the layout of a class of options; None if it is not found."""
        try:
            memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            offsets = [_offset(memory, options, *field) for field in _FIELDS]
        finally:
            os.close(memory)
        found = [offset for offset in offsets if offset is not None]
        return cls(*found) if len(found) == len(_FIELDS) and _ABSENT not in found[:2] else None


_FIELDS: tuple[tuple[str, Callable[[int], Any], str, Iterable[int]], ...] = (
    ("asyncOp", bool, "B", (1, 0, 1, 1, 0, 0, 1, 0)),
    ("timeout", lambda ms: timedelta(milliseconds=ms), "q", (-1, 0x123456789, 7)),
    ("reduceOp", lambda number: ReduceOp(ReduceOp.RedOpType(number)), "B", range(8)),
    ("rootRank", int, "q", (0x1234567, 0, -1)),
)
"""For each field: name, function that turns a number into a value, `struct` format, and numbers to set."""


def _offset(
    memory: int, options: type, name: str, value_of: Callable[[int], Any], form: str, numbers: Iterable[int]
) -> int | None:
    """Return the offset of a field: the only place at which each of the numbers is found after it was set."""
    if not hasattr(options, name):
        return _ABSENT
    size = struct.calcsize(form)
    places = set(range(0, _MOST_BYTES, size))
    for number in numbers:
        given = options()
        setattr(given, name, value_of(number))
        held, wanted = _object_behind(memory, given), struct.pack(form, number)
        places = {place for place in places if held[place : place + size] == wanted}
    return places.pop() if len(places) == 1 else None


def _object_behind(memory: int, wrapper: object) -> bytes:
    """Return the first bytes of the C++ object of a pybind11 wrapper, whose address follows Python's own header."""
    try:
        address = os.pread(memory, struct.calcsize("P"), id(wrapper) + object.__basicsize__)
        return os.pread(memory, _MOST_BYTES, *struct.unpack("P", address))
    except (OSError, OverflowError, struct.error):
        return b""
