"""The layout of the ranks' snapshots in memory that the supervisor holds. Imports no torch.

The ranks write snapshots (`phalanx.checkpoint`); the supervisor (`phalanx.launch`) only looks at their steps. All lie
in one sparse file with two regions per rank. A region begins with a page that holds the head; the snapshot follows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from phalanx._files import free_pages

REGION_BYTES = 1 << 36  # address space, not memory
MAGIC = b"phalanx1"
_HEAD = struct.Struct("<8sQQQQQ16s")
_PLAN = struct.Struct("<Q")
_PLAN_OFFSET = 1 << 62  # behind all regions
_BAN_OFFSET = _PLAN_OFFSET + 4096
HEAD_BYTES = _HEAD.size


class Head(NamedTuple):
    """The head of a region; `folder` identifies the folder of checkpoints that the snapshot belongs to."""

    magic: bytes
    is_whole: int
    step: int
    size_bytes: int
    world_size: int
    attempt: int
    folder: bytes

    def pack(self) -> bytes:
        return _HEAD.pack(*self)

    def is_of_one_snapshot_with(self, other: Head) -> bool:
        """Whether another rank wrote `other` after the same step of the same attempt."""
        return self._replace(size_bytes=0) == other._replace(size_bytes=0)


def region_offset(rank: int, slot: int) -> int:
    return (2 * rank + slot) * REGION_BYTES


def heads_of_rank(fd: int, rank: int) -> Iterator[tuple[int, Head]]:
    """Yield the slot and the head of each complete snapshot of `rank`."""
    for slot in (0, 1):
        data = os.pread(fd, HEAD_BYTES, region_offset(rank, slot))
        if len(data) == HEAD_BYTES and (head := Head(*_HEAD.unpack(data))).magic == MAGIC and head.is_whole:
            yield slot, head


def common_heads(fd: int) -> list[Head]:
    """Return rank 0's head of each snapshot that is complete on all of its ranks."""
    return [
        head
        for _, head in heads_of_rank(fd, 0)
        if all(
            any(head.is_of_one_snapshot_with(other) for _, other in heads_of_rank(fd, rank))
            for rank in range(1, head.world_size)
        )
    ]


def announce_restart(fd: int, attempt: int) -> None:
    """Tell the ranks of `attempt` that they must end only because another number of ranks will be started."""
    os.pwrite(fd, _PLAN.pack(attempt + 1), _PLAN_OFFSET)


def is_restart_announced(fd: int, attempt: int) -> bool:
    data = os.pread(fd, _PLAN.size, _PLAN_OFFSET)
    return len(data) == _PLAN.size and _PLAN.unpack(data)[0] == attempt + 1


def forbid(fd: int) -> None:
    """Forbid snapshots in all attempts to come; existing ones may be loaded once more."""
    os.pwrite(fd, b"1", _BAN_OFFSET)


def are_forbidden(fd: int) -> bool:
    return os.pread(fd, 1, _BAN_OFFSET) == b"1"


def release(fd: int) -> None:
    """Free the memory of all snapshots."""
    free_pages(fd, _PLAN_OFFSET)
