"""Shared data in memory that the supervisor of ``phalanx run`` holds: ranks that are started again find it there.

The memory is one sparse memfd, opened through ``/proc``. It begins with a directory, with an entry for each object that
was built under a key. If its items are cached (`cached_items`), the memory for them lies behind the object. The builder
of a host takes the file's lock to look for its key, and again to write what it has built, with the entry last. So a
builder that is killed leaves no entry, and the next one overwrites what it has written.

**What is found again.** An entry is used if the key, the function (`inputs`), the rank and the number of ranks are the
same, and if the files of the script and of its modules, as they were after the build, have not changed. Modules of
libraries do not count. What a function reads (files, settings, random numbers) can't be known, so data is kept only if
the caller names it by a key.

**What is freed.** Each process that maps an object holds a lock on its entry (an open file description lock), as long
as the mapping lasts. Before something new is written, entries of earlier calls that nobody holds are freed: the script
has dropped these objects, or has not asked for them again after a restart. Objects of less than 2 MiB stay, because
what has no arrays and no long lists is never mapped for long. The rest is freed when the job ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx import _env
from phalanx.data.sharing.cached_items import begin_attempt, lay_out, memory_for
from phalanx.data.sharing.packing import Region, lock, write
from phalanx.failure.last_words import owner_of
from phalanx.host.processes import process_of
from phalanx.wire.files import free_pages
from phalanx.wire.messages import parse_json
from phalanx.wire.rank_group import RankGroup

_ENTRY = struct.Struct("<32sQQQQQ")  # digest of the key, number of the call, and the four numbers of its place
_NUM_ENTRIES = 1000
_DATA_AT = 1 << 16  # after the directory
_UNKNOWN = "changed"  # in the place of a digest
_GRANULARITY = 2 << 20  # places are multiples of the size of a huge page


def _aligned(offset: int) -> int:
    return -(-offset // _GRANULARITY) * _GRANULARITY


class Place(NamedTuple):
    """Where an object lies in the supervisor's memory.

    Attributes:
        entry: Number of its entry in the directory.
        offset: Place in the file.
        size_bytes: Size of the object.
        sources_bytes: Size of the list of files, which follows the object.
        cache_bytes: Size of the memory for a dataset's items, which follows the list; 0 if there is none.
    """

    entry: int
    offset: int
    size_bytes: int
    sources_bytes: int
    cache_bytes: int

    @property
    def cache_at(self) -> int:
        return _aligned(self.offset + self.size_bytes + self.sources_bytes)

    @property
    def end(self) -> int:
        return self.cache_at + self.cache_bytes


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

    def find_or_build(
        self, key: str, call: int, build: Callable[[], Any], cache: bool | int | str = False
    ) -> list[Region]:
        """Map an object, and the memory for its items if it has a cache. It is built if nobody has built it yet.

        Args:
            key: Text that tells the object from all others of the job.
            call: Number of this call in the process; objects up to this call that nobody maps are freed. An object of
                the same call is from an earlier attempt, in which the script or the function was another one.
            build: Function that builds the object. No lock is held meanwhile.
            cache: Size that the memory for its items may have, as for `memory_for`.

        Returns:
            One region or two; none if the directory is full.

        Raises:
            OSError: Memory is short.
            Exception: `build` or pickling has raised it.
        """
        ranks = RankGroup()
        digest = hashlib.blake2b(repr((key, cache, ranks.rank, ranks.world_size)).encode(), digest_size=32).digest()
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        for found, _, place in self._entries():
            if found == digest:
                if self._is_current(place):
                    regions = self._map(place)
                    if place.cache_bytes:
                        begin_attempt(regions[1])
                    return regions
                self._free(place)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        value = build()
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        entries = self._entries()
        least_freed = _GRANULARITY if len(entries) < _NUM_ENTRIES // 2 else 0
        is_old = [number <= call and place.size_bytes + place.cache_bytes > least_freed for _, number, place in entries]
        left = [place for old, (*_, place) in zip(is_old, entries, strict=True) if not (old and self._free(place))]
        taken = {place.entry for place in left}
        entry = next((number for number in range(_NUM_ENTRIES) if number not in taken), None)
        if entry is None:
            return []
        offset = _aligned(max((place.end for place in left), default=_DATA_AT))
        os.ftruncate(self._fd, offset)  # what a killed builder has left goes
        try:
            place = self._write(value, entry, offset, cache)
        except BaseException:
            os.ftruncate(self._fd, offset)
            raise
        os.pwrite(self._fd, _ENTRY.pack(digest, call, *place[1:]), entry * _ENTRY.size)
        return self._map(place)

    def _write(self, value: Any, entry: int, offset: int, cache: bool | int | str) -> Place:
        size_bytes = write(value, self._fd, offset)
        sources = json.dumps(_sources()).encode()
        os.pwrite(self._fd, sources, offset + size_bytes)
        place = Place(entry, offset, size_bytes, len(sources), memory_for(value, cache))
        if place.cache_bytes:
            os.ftruncate(self._fd, place.end)
            lay_out(self._fd, place.cache_at, len(value))
        return place

    def _entries(self) -> list[tuple[bytes, int, Place]]:
        directory = os.pread(self._fd, _NUM_ENTRIES * _ENTRY.size, 0)
        directory = directory[: len(directory) // _ENTRY.size * _ENTRY.size]
        return [
            (digest, call, Place(entry, *where))
            for entry, (digest, call, *where) in enumerate(_ENTRY.iter_unpack(directory))
            if where[1]
        ]

    def _is_current(self, place: Place) -> bool:
        sources = parse_json(os.pread(self._fd, place.sources_bytes, place.offset + place.size_bytes))
        return all(_digest_of(file) == digest for file, digest in sources.items())

    def _free(self, place: Place) -> bool:
        """Free an object that nobody maps; return whether it was freed."""
        if not lock(self._fd, place.entry, fcntl.F_WRLCK):
            return False
        os.pwrite(self._fd, bytes(_ENTRY.size), place.entry * _ENTRY.size)
        free_pages(self._fd, place.offset, place.end - place.offset)
        lock(self._fd, place.entry, fcntl.F_UNLCK)
        return True

    def _map(self, place: Place) -> list[Region]:
        regions = [Region(self._fd, place.size_bytes, place.offset, place.entry)]
        if place.cache_bytes:
            regions.append(Region(self._fd, place.cache_bytes, place.cache_at, place.entry, is_private=False))
        return regions


def path_of_kept() -> str:
    """Return the path of the supervisor's memory; empty if there is no supervisor, or no restart to keep data for."""
    return _env.environment().get(_env.SHARED_VARIABLE, "")


def _sources() -> dict[str, str]:
    """Return the files of the script and of its modules, each with a digest of its content.

    A file that has changed since this process began may not be what was imported, so its digest is none that is found.
    """
    files = {str(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    process = process_of(os.getpid())
    began_s = time.time() - process.age_s if process is not None else 0.0
    return {
        os.path.abspath(file): _digest_of(file) if _changed_s(file) < began_s else _UNKNOWN
        for file in sorted(files)
        if file and not owner_of(file)
    }


def _changed_s(file: str) -> float:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime
    return 0.0


def _digest_of(file: str) -> str:
    with contextlib.suppress(OSError), open(file, "rb") as source:
        return hashlib.blake2b(source.read(), digest_size=16).hexdigest()
    return ""
