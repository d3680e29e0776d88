"""The layout of the ranks' snapshots in memory that the supervisor holds. Imports no torch.

The ranks write snapshots (`phalanx.checkpoint`); the supervisor (`phalanx.launch`) looks at their steps, and its
replicator copies them to other hosts. All snapshots of a host are in one sparse file, which is divided into regions. A
region begins with a page for the head; the image of a rank's part follows. First come the regions of the host's own
ranks, by local rank, then those for images of other hosts' ranks, by the number of the image. At the end are a few
records through which the ranks, the supervisor and the replicator inform each other.
"""

from __future__ import annotations

import errno
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.wire.files import free_pages

MEMORY_NAME = "phalanx-snapshots"
"""Name of the memory in which snapshots lie, as ``/proc/PID/fd`` of the supervisor shows it."""
REGION_BYTES = 1 << 36  # distance between regions; unused parts of the sparse file take no memory
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
MAGIC = b"phalanx2"
NUM_SLOTS = 3
"""Number of regions for each image. Those of an image of this host hold the replicated snapshot, the snapshot that is
being copied, and a newer one. Those of an image of another host hold the newest snapshot that all hosts have, the one
that is being received, and one that was fetched to be loaded."""
FETCHED_SLOT = 2
_HEAD = struct.Struct("<8sQQQQQ16sQQ")
_PLAN = struct.Struct("<Q")
MOST_OF_OTHERS = 1 << 22  # limit for other hosts' images, and for this host's; all regions then end before _PLAN_OFFSET
_OF_OTHERS = NUM_SLOTS * REGION_BYTES * MOST_OF_OTHERS  # where images of other hosts begin
_PLAN_OFFSET = 1 << 62  # where the records begin, after all regions
_BAN_OFFSET = _PLAN_OFFSET + 4096
_WANTED_OFFSET, _COPY_OFFSET, _COPIED_OFFSET, _GAPS_OFFSET = (_PLAN_OFFSET + number * 4096 for number in (2, 3, 4, 5))
_COPY = struct.Struct("<QQ16sQQ")
_COPIED = struct.Struct("<QQQQ")
_GAPS = struct.Struct("<QQQ")
_SUM = struct.Struct("<L")
HEAD_BYTES = _HEAD.size


class Head(NamedTuple):
    """The head of a region.

    Attributes:
        world_size: Number of images that make up the snapshot.
        folder: Digest of the folder of checkpoints that the snapshot belongs to.
        first_rank: Number of the image that the first rank of this host wrote.
        num_here: Number of images that this host wrote; 0 if it wrote all.
    """

    magic: bytes
    is_whole: int
    step: int
    size_bytes: int
    world_size: int
    attempt: int
    folder: bytes
    first_rank: int = 0
    num_here: int = 0

    def pack(self) -> bytes:
        return _HEAD.pack(*self)

    @property
    def is_parted(self) -> bool:
        """Whether other hosts have other parts of the snapshot."""
        return 0 < self.num_here < self.world_size

    def is_of_one_snapshot_with(self, other: Head) -> bool:
        """Whether `other` is the head of another rank of the same host, after the same step of the same attempt."""
        return self._replace(size_bytes=0) == other._replace(size_bytes=0)


class Region(NamedTuple):
    """A region with a complete image.

    Attributes:
        number: Number of the image within its snapshot.
        slot: Number of the region among the regions for this image.
        is_own: Whether a rank of this host wrote the image.
    """

    offset: int
    number: int
    slot: int
    is_own: bool
    head: Head


def region_offset(local_rank: int, slot: int) -> int:
    return (NUM_SLOTS * local_rank + slot) * REGION_BYTES


def region_of_others(number: int, slot: int) -> int:
    return _OF_OTHERS + region_offset(number, slot)


def region_bytes(size_bytes: int) -> int:
    """Return the size in bytes of the whole pages that a head and an image take."""
    return PAGE_BYTES - (-size_bytes // PAGE_BYTES) * PAGE_BYTES


def head_at(fd: int, offset: int) -> Head | None:
    """Return the head of a region; None if the region holds no complete image."""
    data = os.pread(fd, HEAD_BYTES, offset)
    if len(data) == HEAD_BYTES and (head := Head(*_HEAD.unpack(data))).magic == MAGIC and head.is_whole:
        return head
    return None


def used_regions(fd: int) -> Iterator[int]:
    """Yield the offsets of the regions that have been written to, complete or not."""
    at = 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // REGION_BYTES * REGION_BYTES
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no more data in the file
                return
            raise
        if at >= _PLAN_OFFSET:
            return
        yield at
        at += REGION_BYTES


def whole_regions(fd: int) -> list[Region]:
    """Return the regions with complete images, those of this host's ranks first."""
    found = []
    for offset in used_regions(fd):
        if (head := head_at(fd, offset)) is not None:
            is_own = offset < _OF_OTHERS
            index, slot = divmod((offset if is_own else offset - _OF_OTHERS) // REGION_BYTES, NUM_SLOTS)
            found.append(Region(offset, index + is_own * head.first_rank, slot, is_own, head))
    return found


def is_of_others(offset: int) -> bool:
    """Whether a region is for images of other hosts."""
    return offset >= _OF_OTHERS


def is_fetched(offset: int) -> bool:
    """Whether a region is for an image that was fetched to be loaded."""
    return is_of_others(offset) and offset // REGION_BYTES % NUM_SLOTS == FETCHED_SLOT


def common_heads(fd: int) -> list[Head]:
    """Return the first local rank's head of each snapshot that is complete on all ranks of this host."""
    by_rank: dict[int, list[Head]] = {}
    for region in whole_regions(fd):
        if region.is_own:
            by_rank.setdefault(region.number - region.head.first_rank, []).append(region.head)
    return [
        head
        for head in by_rank.get(0, ())
        if all(
            any(head.is_of_one_snapshot_with(other) for other in by_rank.get(rank, ()))
            for rank in range(1, head.num_here or head.world_size)
        )
    ]


class Copy(NamedTuple):
    """The snapshot to copy to other hosts once it is complete, and the safe snapshot to keep meanwhile.

    Attributes:
        safe_attempt: Attempt of the newest snapshot that all hosts have copied, or that the ranks have loaded.
        safe_step: Step of that snapshot.
    """

    attempt: int
    step: int
    folder: bytes
    safe_attempt: int = 0
    safe_step: int = 0


class Copied(NamedTuple):
    """The snapshot that the replicator copied last.

    Attributes:
        num_replicas: Number of other hosts that have the snapshot.
        took_ms: Duration of the copying, in milliseconds.
    """

    attempt: int
    step: int
    num_replicas: int
    took_ms: int


def ask_for_copy(fd: int, copy: Copy) -> None:
    _put(fd, _COPY_OFFSET, _COPY.pack(*copy))


def asked_copy(fd: int) -> Copy | None:
    """Return the snapshot to copy; None if there is none."""
    data = _get(fd, _COPY_OFFSET, _COPY.size)
    return Copy(*_COPY.unpack(data)) if data is not None else None


def note_copied(fd: int, copied: Copied) -> None:
    _put(fd, _COPIED_OFFSET, _COPIED.pack(*copied))


def last_copied(fd: int) -> Copied | None:
    """Return the snapshot that was copied last; None if there is none."""
    data = _get(fd, _COPIED_OFFSET, _COPIED.size)
    return Copied(*_COPIED.unpack(data)) if data is not None else None


class Gaps(NamedTuple):
    """How often, and for how long, there was no replicator.

    Attributes:
        num: Number of times that the replicator has ended.
        total_ms: Milliseconds without a replicator, up to its last start.
        since_ms: Time at which the replicator ended, in milliseconds of the monotonic clock; 0 while it runs.
    """

    num: int = 0
    total_ms: int = 0
    since_ms: int = 0


def note_replicator_ended(fd: int) -> None:
    gaps = gaps_in_copying(fd)
    since_ms = gaps.since_ms or time.monotonic_ns() // 10**6
    _put(fd, _GAPS_OFFSET, _GAPS.pack(gaps.num + 1, gaps.total_ms, since_ms))


def note_replicator_started(fd: int) -> None:
    gaps = gaps_in_copying(fd)
    if gaps.since_ms:
        total_ms = gaps.total_ms + time.monotonic_ns() // 10**6 - gaps.since_ms
        _put(fd, _GAPS_OFFSET, _GAPS.pack(gaps.num, total_ms, 0))


def gaps_in_copying(fd: int) -> Gaps:
    data = _get(fd, _GAPS_OFFSET, _GAPS.size)
    return Gaps(*_GAPS.unpack(data)) if data is not None else Gaps()


def want_replicas(fd: int, num_replicas: int) -> None:
    """Set the number of other hosts that are to keep each part of a state."""
    _put(fd, _WANTED_OFFSET, _PLAN.pack(num_replicas))


def wanted_replicas(fd: int) -> int:
    data = _get(fd, _WANTED_OFFSET, _PLAN.size)
    return _PLAN.unpack(data)[0] if data is not None else 0


def _put(fd: int, offset: int, data: bytes) -> None:
    os.pwrite(fd, data + _SUM.pack(zlib.crc32(data)), offset)


def _get(fd: int, offset: int, size: int) -> bytes | None:
    """Return what `_put` has written; None if it is being written, or was never written."""
    data = os.pread(fd, size + _SUM.size, offset)
    is_whole = len(data) == size + _SUM.size and any(data) and _SUM.unpack(data[size:])[0] == zlib.crc32(data[:size])
    return data[:size] if is_whole else None


def announce_restart(fd: int, attempt: int) -> None:
    """Tell the ranks of `attempt` that they are stopped only because a different number of ranks will be started."""
    os.pwrite(fd, _PLAN.pack(attempt + 1), _PLAN_OFFSET)


def is_restart_announced(fd: int, attempt: int) -> bool:
    data = os.pread(fd, _PLAN.size, _PLAN_OFFSET)
    return len(data) == _PLAN.size and _PLAN.unpack(data)[0] == attempt + 1


def newest_attempt(fd: int, *, own: bool = False) -> int:
    """Return the newest attempt with a complete image; -1 if there is none.

    Args:
        own: Whether to count only images of this host's ranks.
    """
    return max((region.head.attempt for region in whole_regions(fd) if region.is_own or not own), default=-1)


def forbid(fd: int) -> None:
    """Forbid snapshots in all later attempts; existing ones may be loaded once more."""
    os.pwrite(fd, b"1", _BAN_OFFSET)


def are_forbidden(fd: int) -> bool:
    return os.pread(fd, 1, _BAN_OFFSET) == b"1"


def release(fd: int) -> None:
    """Free the memory of all snapshots."""
    free_pages(fd, 0, _PLAN_OFFSET)


def release_region(fd: int, offset: int) -> None:
    """Free the memory of one region."""
    free_pages(fd, offset, REGION_BYTES)
