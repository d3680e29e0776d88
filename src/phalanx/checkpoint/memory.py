"""Snapshots in memory that the supervisor of ``phalanx run`` holds: they outlive the ranks, not the supervisor.

One memfd for all ranks of the host, sparse: each rank has two regions and writes them in turn, so that one of them is
whole at any moment. Ranks that train together are never more than a step apart, so there is always a step of which
all have a whole one.

A region begins with a page that says what is in it (`phalanx._snapshots`); behind that lies an image as in a file on
disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Mapping
from typing import Any

from phalanx import _env
from phalanx._snapshots import HEAD_BYTES, MAGIC, Head, common_heads, heads_of_rank, region_offset
from phalanx.checkpoint import blocks
from phalanx.checkpoint.image import Image, fill, lay_out
from phalanx.checkpoint.meeting import gather, place
from phalanx.checkpoint.tree import pack

_PAGE_BYTES = mmap.PAGESIZE
_MAX_SHARE = 0.25  # of the host's memory, for all ranks' snapshots


class SnapshotMemory:
    """The memory in which this rank keeps snapshots, and finds those of an attempt before.

    Attributes:
        size_bytes: Of both snapshots of this rank, once there is one.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._regions: dict[int, mmap.mmap] = {}
        self._slot = 0
        self._names = ""
        self._is_alike = True
        self.size_bytes = 0
        environ = _env.environment()
        self._attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self.problem = self._open(environ)

    def _open(self, environ: Mapping[str, str]) -> str:
        path = environ.get(_env.SNAPSHOT_VARIABLE)
        if not path:
            return "no supervisor holds memory for them: start with phalanx run"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return f"the supervisor's memory can't be opened: {error.strerror}"
        return ""

    # ---- writing ---------------------------------------------------------------------------------------------------

    def write(self, folder: str, state: Mapping[str, Any], step: int) -> None:
        """Take a snapshot; every rank does, of the same step. Nothing happens if there is no memory for it.

        Raises:
            TypeError: A value can't be saved.
        """
        if self.problem:
            return
        rank, world_size = place()
        tree, leaves = pack(state)
        names = hashlib.sha256(repr(blocks.describe(leaves)).encode()).hexdigest()
        if names != self._names:  # at the first snapshot, and at the first with an optimizer's state
            self._is_alike = len(set(gather("snapshot", names))) == 1
        parts = blocks.parts_of_rank(leaves, *((rank, world_size) if self._is_alike else (0, 1)))
        metadata = {"step": step, "rank": rank, "world_size": world_size, "is_alike": self._is_alike, "tree": tree}
        layout = lay_out(parts, metadata)
        if names != self._names:
            sizes = gather("snapshot", layout.size_bytes)
            self.problem = self._make_room(sum(sizes))
            self._names = names
            if self.problem:
                return
        region = self._region(rank, self._slot, layout.size_bytes)
        if region is None:
            return
        head = Head(MAGIC, 0, step, layout.size_bytes, world_size, self._attempt, _digest(folder))
        region[:HEAD_BYTES] = head.pack()
        fill(memoryview(region)[_PAGE_BYTES:], layout, parts)
        region[:HEAD_BYTES] = head._replace(is_whole=1).pack()
        self._slot = 1 - self._slot

    def _make_room(self, total_bytes: int) -> str:
        limit = _memory_bytes()
        if 2 * total_bytes > _MAX_SHARE * limit:
            return (
                f"two of all ranks would take {2 * total_bytes >> 20} MiB, more than "
                f"{_MAX_SHARE:.0%} of this host's {limit >> 20} MiB"
            )
        return ""

    def _region(self, rank: int, slot: int, size_bytes: int) -> mmap.mmap | None:
        """Return the mapped region, with memory behind it, or None if there is not enough."""
        region = self._regions.get(slot)
        wanted = _PAGE_BYTES + size_bytes
        if region is None or len(region) < wanted:
            length = -(-wanted // _PAGE_BYTES) * _PAGE_BYTES
            offset = region_offset(rank, slot)
            try:
                os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                self.problem = f"{length >> 20} MiB more can't be had: {error.strerror}"
                return None
            region = self._regions[slot] = mmap.mmap(self._fd, length, offset=offset)
            self.size_bytes = sum(map(len, self._regions.values()))
        return region

    # ---- reading ---------------------------------------------------------------------------------------------------

    def newest(self, folder: str) -> int | None:
        """Return the newest step of which every rank that trained has left a whole snapshot."""
        heads = self._common(folder)
        return max((head.step for head in heads), default=None)

    def read(self, folder: str, step: int) -> list[Image]:
        """Return the snapshots of a step that `newest` has found, in rank order; the next goes elsewhere."""
        rank, _ = place()
        head = next(head for head in self._common(folder) if head.step == step)
        images = []
        for other in range(head.world_size):
            slot, head = next(e for e in heads_of_rank(self._fd, other) if e[1].is_of_one_snapshot_with(head))
            if other == rank:
                self._slot = 1 - slot
            length = -(-(_PAGE_BYTES + head.size_bytes) // _PAGE_BYTES) * _PAGE_BYTES
            region = mmap.mmap(self._fd, length, offset=region_offset(other, slot), access=mmap.ACCESS_COPY)
            images.append(Image(memoryview(region)[_PAGE_BYTES : _PAGE_BYTES + head.size_bytes]))
        return images

    def _common(self, folder: str) -> list[Head]:
        if self.problem:
            return []
        return [head for head in common_heads(self._fd) if head.folder == _digest(folder)]


def _memory_bytes() -> int:
    """Return what this host has, or this container may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:
        return min(physical, int(file.read()))
    return physical


def _digest(folder: str) -> bytes:
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=16).digest()


memory = SnapshotMemory()
"""Of this process; opened when phalanx.checkpoint is imported, in a rank."""


def snapshot(folder: str | os.PathLike[str], state: Mapping[str, Any], step: int) -> str:
    """Keep `state` in memory that outlives this rank; every rank does, after the same step.

    When ``phalanx run`` starts the group again, `load` of the same folder finds it. Two snapshots of each rank are
    kept, in at most a quarter of the host's memory together.

    Returns:
        Why there is no snapshot: no supervisor, or not enough memory; empty when there is one.

    Raises:
        TypeError: A value can't be saved.
    """
    memory.write(os.path.abspath(folder), state, step)
    return memory.problem
