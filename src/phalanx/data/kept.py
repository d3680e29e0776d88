"""Shared data in memory that the supervisor of ``phalanx run`` holds: ranks that are started again find it there.

The memory is one sparse memfd, opened through ``/proc``. It begins with a directory: a fingerprint, the number of the
call, a place and a size for each object that a function of the script has built. The builder of a host takes the file's
lock, builds what the directory lacks, and writes the entry last. So a builder that is killed leaves no entry, and the
next one overwrites what it has written.

**What is freed.** Each process that maps an object holds a lock on its entry (an open file description lock), as long
as the mapping lasts. Before something new is built, entries of earlier calls that nobody holds are freed: the script
has dropped these objects, or has not asked for them again after a restart. The rest is freed when the job ends.

**The fingerprint** tells whether a function would build the same again: it covers the call, the rank, the code of
the function and of the script's functions that it uses, their source files, and the values that they refer to:
arguments of a `functools.partial`, defaults, closures, globals. If one of these values can't be pickled, the data is
built anew. Files that the function reads are not part of it; a job that is to notice new ones passes something that
tells them apart, such as their times, as an argument.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from phalanx import _env
from phalanx.data.packing import PURPOSE, write
from phalanx.failure.last_words import owner_of
from phalanx.host.shared_blocks import map_privately
from phalanx.wire.files import free_pages
from phalanx.wire.rank_group import RankGroup

_ENTRY = struct.Struct("<32sQQQ")  # fingerprint, number of the call, place, size; a free entry has size 0
_NUM_ENTRIES = 1000
_DATA_AT = 1 << 16  # after the directory
_GRANULARITY = 2 << 20  # places are multiples of the size of a huge page
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_SET_LOCK = 37  # F_OFD_SETLK: the lock belongs to the open file, which a mapping keeps open


class Place(NamedTuple):
    """Where an object lies in the supervisor's memory.

    Attributes:
        entry: Number of its entry in the directory.
    """

    entry: int
    offset: int
    size_bytes: int


class KeptData:
    """The supervisor's memory, opened for one call; use it in a ``with`` block.

    Raises:
        OSError: The memory can't be opened, such as in a container of its own.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> KeptData:
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not release it, because mappings keep the file open
        os.close(self._fd)

    def find_or_build(self, fingerprint: bytes, call: int, build: Callable[[], Any]) -> Place | None:
        """Return the place of an object, which is built if nobody has built it yet; None if the directory is full.

        Args:
            call: Number of this call in the process; objects of earlier calls that nobody maps are freed.
            build: Function that builds the object.

        Raises:
            OSError: Memory is short.
            Exception: `build` has raised it.
        """
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        found = self._entries()
        for one, _, place in found:
            if one == fingerprint:
                return place
        left = [place for _, number, place in found if not (number < call and self._free(place))]
        taken = {place.entry for place in left}
        entry = next((number for number in range(_NUM_ENTRIES) if number not in taken), None)
        if entry is None:
            return None
        end = max((place.offset + place.size_bytes for place in left), default=_DATA_AT)
        offset = -(-end // _GRANULARITY) * _GRANULARITY
        value = build()
        os.ftruncate(self._fd, offset)  # what a killed builder has left goes
        place = Place(entry, offset, write(value, self._fd, offset))
        os.pwrite(self._fd, _ENTRY.pack(fingerprint, call, offset, place.size_bytes), entry * _ENTRY.size)
        return place

    def _entries(self) -> list[tuple[bytes, int, Place]]:
        directory = os.pread(self._fd, _NUM_ENTRIES * _ENTRY.size, 0)
        directory = directory[: len(directory) // _ENTRY.size * _ENTRY.size]
        return [
            (fingerprint, call, Place(entry, offset, size_bytes))
            for entry, (fingerprint, call, offset, size_bytes) in enumerate(_ENTRY.iter_unpack(directory))
            if size_bytes
        ]

    def _free(self, place: Place) -> bool:
        """Free an object that nobody maps; return whether it was freed."""
        if not self._lock(place, fcntl.F_WRLCK):
            return False
        os.pwrite(self._fd, bytes(_ENTRY.size), place.entry * _ENTRY.size)
        free_pages(self._fd, place.offset, place.size_bytes)
        self._lock(place, fcntl.F_UNLCK)
        return True

    def _lock(self, place: Place, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, _SET_LOCK, _FLOCK.pack(kind, os.SEEK_SET, place.entry, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def map(self, place: Place) -> mmap.mmap:
        """Map an object; this process's writes stay private."""
        self._lock(place, fcntl.F_RDLCK)
        return map_privately(self._fd, PURPOSE, place.size_bytes, place.offset)


def path_of_kept() -> str:
    """Return the path of the supervisor's memory; empty if there is no supervisor, or no restart to keep data for."""
    return _env.environment().get(_env.SHARED_VARIABLE, "")


def fingerprint_of(function: Any, call: int) -> bytes | None:
    """Return a fingerprint of a function without parameters; None if a value that it refers to can't be pickled."""
    parts = _Parts()
    world = RankGroup()
    parts.add((call, world.rank, world.world_size))  # what the function can ask torch.distributed for
    try:
        parts.add_value(function)
    except Exception:  # any object may refuse to be pickled, in any way
        return None
    return parts.digest()


class _Parts:
    """A hash of values and of the code that uses them. Functions of libraries count by their names."""

    def __init__(self) -> None:
        self._found = hashlib.blake2b(digest_size=32)
        self._seen: set[int] = set()

    def digest(self) -> bytes:
        return self._found.digest()

    def write(self, data: Any) -> int:  # so that a pickler can write here
        self._found.update(data)
        return len(data)

    def add(self, part: Any) -> None:
        self.write(f"{len(repr(part))}:{part!r}".encode(errors="replace"))

    def add_value(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self.add_value(value.func)
            self.add_value((value.args, value.keywords))
        elif isinstance(value, MethodType):
            self.add_value(value.__func__)
            self.add_value(value.__self__)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, (ModuleType, type, BuiltinFunctionType)):
            self._add_name(value)
        else:
            self._add_name(type(value))
            pickle.Pickler(self, 5).dump(value)

    def _add_name(self, value: Any) -> None:
        """Add a name, and the source of the module that defines it, unless that belongs to a library."""
        module = value if isinstance(value, ModuleType) else sys.modules.get(str(value.__module__))
        self.add((module and module.__name__, getattr(value, "__qualname__", "")))
        file = getattr(module, "__file__", None) or ""
        if file and id(module) not in self._seen and not owner_of(file):
            self._seen.add(id(module))
            with open(file, "rb") as source:
                self.add(source.read())

    def _add_function(self, function: FunctionType) -> None:
        self._add_name(function)
        if id(function) in self._seen or owner_of(function.__code__.co_filename):
            return
        self._seen.add(id(function))
        self._add_code(function.__code__, function.__globals__)
        self.add_value((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            self.add_value(cell.cell_contents)

    def _add_code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        self.add((code.co_code, code.co_names))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_code(constant, names)
            else:  # sets have another order in each process
                self.add(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for name in code.co_names:
            value = names.get(name)
            if value is None:
                continue
            self.add_value(value)
            if isinstance(value, ModuleType) and not owner_of(getattr(value, "__file__", None) or "<frozen>"):
                for attribute in code.co_names:  # such as the setting in config.setting
                    self.add_value(getattr(value, attribute, None))
