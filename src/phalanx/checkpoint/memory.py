"""Snapshots in memory that the supervisor of ``phalanx run`` holds: they outlive the ranks, not the supervisor.

One memfd for all ranks of the host, sparse: each rank has two regions and writes them in turn, so that one of them is
whole at any moment. Ranks that train together are never more than a step apart, so there is always a step of which
all have a whole one.

A region begins with a page that says what is in it (`phalanx._snapshots`); behind that lies an image as in a file on
disk.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from collections.abc import Mapping
from typing import Any

from phalanx import _env
from phalanx._cgroups import cgroup_memory, host_memory
from phalanx._rank_group import RankGroup
from phalanx._snapshots import (
    HEAD_BYTES,
    MAGIC,
    REGION_BYTES,
    Head,
    are_forbidden,
    common_heads,
    heads_of_rank,
    is_restart_announced,
    region_offset,
    release,
)
from phalanx.checkpoint import blocks
from phalanx.checkpoint.agreement import gather, raise_problems
from phalanx.checkpoint.image import Image, fill, lay_out
from phalanx.checkpoint.tree import Leaf, pack
from phalanx.record import writer

_PAGE_BYTES = mmap.PAGESIZE
_SLACK_BYTES = 64 * 1024  # headers grow a little
_IS_WHOLE = slice(8, 16)  # bytes of a head: written at once, so it never says so of what is not
_MAX_SHARE = 0.25  # of the host's memory and of each cgroup's limit, for all ranks' snapshots
_MAX_SHARE_OF_REST = 0.5  # of what is not used of them: training goes on to need some


class SnapshotMemory:
    """Memory in which this rank keeps snapshots and finds those of the previous attempt.

    Attributes:
        size_bytes: Size of both snapshots of this rank, once there is one.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._regions: dict[int, mmap.mmap] = {}
        self._slot = 0
        self._is_forbidden = False
        self.size_bytes: int = 0
        environ = _env.environment()
        self._attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self.problem: str = self._open(environ)

    def _open(self, environ: Mapping[str, str]) -> str:
        path = environ.get(_env.SNAPSHOT_VARIABLE)
        if not path:
            return "no supervisor holds memory for them: start with phalanx run --max-restarts"
        if environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE"):
            return "the ranks are on several hosts, and each keeps only its own memory"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return f"the supervisor's memory can't be opened: {error.strerror}"
        self._is_forbidden = are_forbidden(self._fd)
        if self._is_forbidden:
            return "the kernel has killed an earlier attempt because memory ran out"
        return ""

    # ---- writing ---------------------------------------------------------------------------------------------------

    def write(self, folder: str, state: Mapping[str, Any], step: int) -> None:
        """Take a snapshot; every rank does, of the same step. Nothing happens if there is no memory for it.

        Raises:
            CheckpointError: A value can't be saved on some rank; on every rank.
        """
        if self.problem:  # the same ranks have it
            self.let_go()
            return
        ranks = RankGroup()
        rank, world_size = ranks.rank, ranks.world_size
        problem, cause, tree = "", None, None
        leaves: list[Leaf] = []
        described: blocks.Description = {}
        try:
            tree, leaves = pack(state)
            described = blocks.describe(leaves, world_size)
        except Exception as error:  # whatever a state_dict() raises, the others must know
            problem, cause = f"{type(error).__name__}: {error}", error
        low, high = blocks.fingerprint(described)
        *found, has_failed = ranks.largest_of_each([low, high, -low, -high, cause is not None])
        if has_failed:
            raise_problems("snapshot", gather("snapshot", problem), cause, f"of step {step} of {folder}")
        is_alike = found == [low, high, -low, -high]
        alike = described.keys() if is_alike else blocks.names_alike(gather("snapshot", described))
        parts = blocks.parts_of_rank(leaves, rank, world_size, alike)
        metadata = {"step": step, "rank": rank, "world_size": world_size, "is_alike": is_alike, "tree": tree}
        layout = lay_out(parts, metadata)
        is_short = not self._regions or len(self._regions[0]) < _PAGE_BYTES + layout.size_bytes
        if ranks.largest(is_short):  # at the first snapshot, and at the first with an optimizer's state
            self.problem = self._make_room(rank, layout.size_bytes)
            if self.problem:
                return
        region = self._regions[self._slot]
        head = Head(MAGIC, 0, step, layout.size_bytes, world_size, self._attempt, _digest(folder))
        region[_IS_WHOLE] = bytes(8)
        region[:HEAD_BYTES] = head.pack()
        fill(memoryview(region)[_PAGE_BYTES:], layout, parts)
        region[_IS_WHOLE] = (1).to_bytes(8, "little")
        self._slot = 1 - self._slot

    def _make_room(self, rank: int, size_bytes: int) -> str:
        """Get memory for two snapshots of every rank; return why not, the same on every rank, or nothing."""
        sizes = gather("snapshot", _region_bytes(size_bytes + _SLACK_BYTES))
        total_bytes = 2 * sum(sizes)
        problem = _shortage(total_bytes, os.fstat(self._fd).st_blocks * 512)
        if max(sizes) > REGION_BYTES:
            problem = f"one of a rank would take {max(sizes) >> 20} MiB, more than {REGION_BYTES >> 20} MiB"
        problem = next(filter(None, gather("snapshot", problem)), "")  # before any of them takes some
        if problem:
            return problem
        try:
            self._allocate(rank, sizes[rank])
        except OSError as error:
            problem = f"{total_bytes >> 20} MiB can't be had on rank {rank}: {error.strerror}"
        return next(filter(None, gather("snapshot", problem)), "")

    def _allocate(self, rank: int, length: int) -> None:
        for slot in (0, 1):
            offset = region_offset(rank, slot)
            os.posix_fallocate(self._fd, offset, length)
            self._regions[slot] = mmap.mmap(self._fd, length, offset=offset)
        self.size_bytes = 2 * length

    def let_go(self) -> None:
        """Free what attempts before have left if there are to be no more snapshots: training needs that memory.

        Not before the first step: until then a script may load from it, in several calls.
        """
        if self._is_forbidden and RankGroup().rank == 0:
            release(self._fd)
        self._is_forbidden = False

    @property
    def restart_is_planned(self) -> bool:
        """Whether the supervisor ends this rank only to start it again, with more ranks, from the last snapshot."""
        return self._fd >= 0 and is_restart_announced(self._fd, self._attempt)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def newest(self, folder: str) -> int | None:
        """Return the newest step of which every rank that trained has left a whole snapshot."""
        head = self._newest(folder)
        return None if head is None else head.step

    def read(self, folder: str, step: int) -> list[Image]:
        """Return the snapshots of a step that `newest` has found, in rank order; the next goes elsewhere."""
        rank = RankGroup().rank
        head = self._newest(folder)
        if head is None or head.step != step:
            raise ValueError("not every rank finds it")
        images = []
        for other in range(head.world_size):
            slot, head = next(e for e in heads_of_rank(self._fd, other) if e[1].is_of_one_snapshot_with(head))
            if other == rank:
                self._slot = 1 - slot
            length = _region_bytes(head.size_bytes)
            region = mmap.mmap(self._fd, length, offset=region_offset(other, slot), access=mmap.ACCESS_COPY)
            images.append(Image(memoryview(region)[_PAGE_BYTES : _PAGE_BYTES + head.size_bytes]))
        return images

    def _newest(self, folder: str) -> Head | None:
        heads = common_heads(self._fd) if self._fd >= 0 else []
        ours = (head for head in heads if head.folder == _digest(folder))
        return max(ours, key=lambda head: (head.attempt, head.step), default=None)


def _region_bytes(size_bytes: int) -> int:
    """Return the whole pages that a head and an image take."""
    return _PAGE_BYTES - (-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _shortage(total_bytes: int, held_bytes: int) -> str:
    """Return why snapshots of so many bytes are too large for the host or a cgroup above us, or nothing.

    Args:
        held_bytes: Size of the present snapshots, which counts as used.
    """
    for whose, limits in (("this host", [host_memory()]), ("the cgroup", cgroup_memory())):
        for memory in limits:
            most, left = _MAX_SHARE * memory.limit_bytes, memory.left_bytes + held_bytes
            if total_bytes > most:
                of = f"{_MAX_SHARE:.0%} of {whose}'s {memory.limit_bytes >> 20} MiB"
            elif total_bytes > _MAX_SHARE_OF_REST * left:
                of = f"{_MAX_SHARE_OF_REST:.0%} of the {left >> 20} MiB that are left of {whose}'s"
            else:
                continue
            return f"two of all ranks would take {total_bytes >> 20} MiB, more than {of}"
    return ""


def _digest(folder: str) -> bytes:
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=16).digest()


@functools.cache
def memory() -> SnapshotMemory:
    """Return the memory of this process. Not before a rank asks: its parent may have imported this module for it."""
    return SnapshotMemory()


def snapshot(folder: str | os.PathLike[str], state: Mapping[str, Any], step: int) -> str:
    """Keep `state` in memory that outlives this rank. Every rank calls it, after the same step.

    When ``phalanx run`` restarts the ranks, `load` finds the snapshot. Two snapshots of each rank are kept. All of them
    together take at most a quarter of the memory that the host has and the cgroups allow, and at most half of what is
    still free.

    Args:
        folder: Folder of the checkpoints, as passed to `save`.
        state: State as for `save`.
        step: Step of the training, at least 0.

    Returns:
        A sentence that says why there is no snapshot; empty if there is one. Reasons are that no launcher holds memory
        for it, that memory is short, or that the kernel killed an earlier attempt because memory ran out.

    Raises:
        CheckpointError: A value can't be saved on some rank; on every rank.

    Example:
        >>> print(phalanx.checkpoint.snapshot("runs/linear", {"weight": torch.ones(3)}, step=1))
        no supervisor holds memory for them: start with phalanx run --max-restarts
    """
    with writer.phase("snapshot", step):
        memory().write(os.path.abspath(folder), state, step)
    return memory().problem
