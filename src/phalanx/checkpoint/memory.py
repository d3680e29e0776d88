"""Snapshots in memory that the supervisor of ``phalanx run`` holds: they outlive the ranks, not the supervisor.

One memfd for all ranks of the host, sparse: each rank has two regions and writes them in turn, so that one of them is
whole at any moment. Ranks that train together are never more than a step apart, so there is always a step of which
all have a whole one.

Where the ranks are on several hosts, those of each host keep all of the state between them, so that any host can be
lost. Hosts that lack the newest step, such as those that have just joined, get it from one that has it.

A region begins with a page that says what is in it (`phalanx._snapshots`); behind that lies an image as in a file on
disk.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

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
_PIECE_BYTES = 16 << 20  # of an image, on its way to another host
_IS_WHOLE = slice(8, 16)  # bytes of a head: written at once, so it never says so of what is not
_MAX_SHARE = 0.25  # of the host's memory and of each cgroup's limit, for all ranks' snapshots
_MAX_SHARE_OF_REST = 0.5  # of what is not used of them: training goes on to need some


class Held(NamedTuple):
    """A snapshot that the ranks of a host hold between them; the newest one is the largest.

    Attributes:
        attempt: Number of the ranks that took it: all later ones have a larger number, on all hosts.
        step: Step of the training.
        folder: Which folder of checkpoints it belongs to.
    """

    attempt: int
    step: int
    folder: bytes


class SnapshotMemory:
    """Memory in which this rank keeps snapshots and finds those of the previous attempt.

    Attributes:
        size_bytes: Size of both snapshots of this rank, once there is one.
        asked: Folders from which this rank has loaded, or has tried to.
        is_kept: Whether this process was another rank, or this one, before a failure.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self._fd = -1
        self.asked: set[str] = set()
        self.is_kept = is_kept
        self._regions: dict[int, mmap.mmap] = {}
        self._slot = 0
        self._is_forbidden = False
        self.size_bytes: int = 0
        environ = _env.environment()
        self._restart_count = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self._attempt = 0  # known at the first snapshot
        self._spans_hosts = environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")
        self._host = environ.get("GROUP_RANK", "0")
        self._place = int(environ.get("LOCAL_RANK") or 0), int(environ.get("LOCAL_WORLD_SIZE") or 1)
        self.problem: str = self._open(environ)

    def _open(self, environ: Mapping[str, str]) -> str:
        path = environ.get(_env.SNAPSHOT_VARIABLE)
        if not path:
            return "no supervisor holds memory for them: start with phalanx run --max-restarts"
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
        rank, world_size = self._own_place(ranks)
        problem, cause, tree = "", None, None
        leaves: list[Leaf] = []
        described: blocks.Description = {}
        try:
            tree, leaves = pack(state)
            described = blocks.describe(leaves, ranks.world_size)
        except Exception as error:  # whatever a state_dict() raises, the others must know
            problem, cause = f"{type(error).__name__}: {error}", error
        low, high = blocks.fingerprint(described)
        has_shards = any(blocks.is_sharded(leaf.tensor) for leaf in leaves)
        *found, has_failed, any_has_shards, self._attempt = ranks.largest_of_each(
            [low, high, -low, -high, cause is not None, has_shards, self._attempt or 1 + self._last_attempt()]
        )
        if has_failed:
            raise_problems("snapshot", gather("snapshot", problem), cause, f"of step {step} of {folder}")
        is_alike = found == [low, high, -low, -high]
        alike = described.keys() if is_alike else blocks.names_alike(gather("snapshot", described))
        if self._spans_hosts and (any_has_shards or not is_alike):
            self.problem = "the ranks are on several hosts, and a host's part of the state would be lost with it"
            return
        parts = blocks.parts_of_rank(leaves, rank, world_size, alike)
        owner = [ranks.rank, ranks.world_size]
        metadata = {
            "step": step, "rank": rank, "world_size": world_size, "owner": owner, "is_alike": is_alike, "tree": tree,
        }  # fmt: skip
        layout = lay_out(parts, metadata)
        is_short = not self._regions or len(self._regions[0]) < _PAGE_BYTES + layout.size_bytes
        if ranks.largest(is_short):  # at the first snapshot, and at the first with an optimizer's state
            self.problem = self._make_room(ranks.rank, layout.size_bytes)
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
        told = gather("snapshot", (self._host, _region_bytes(size_bytes + _SLACK_BYTES)))
        sizes = [size for host, size in told if host == self._host]
        total_bytes = 2 * sum(sizes)
        problem = _shortage(total_bytes, os.fstat(self._fd).st_blocks * 512)
        if max(sizes) > REGION_BYTES:
            problem = f"one of a rank would take {max(sizes) >> 20} MiB, more than {REGION_BYTES >> 20} MiB"
        problem = next(filter(None, gather("snapshot", problem)), "")  # before any of them takes some
        if problem:
            return problem
        try:
            self._allocate(told[rank][1])
        except OSError as error:
            problem = f"{total_bytes >> 20} MiB can't be had on rank {rank}: {error.strerror}"
        return next(filter(None, gather("snapshot", problem)), "")

    def _allocate(self, length: int) -> None:
        rank, _ = self._own_place(RankGroup())
        for slot in (0, 1):
            offset = region_offset(rank, slot)
            os.posix_fallocate(self._fd, offset, length)
            self._regions[slot] = mmap.mmap(self._fd, length, offset=offset)
        self.size_bytes = 2 * length

    def let_go(self) -> None:
        """Free what attempts before have left if there are to be no more snapshots: training needs that memory.

        Not before the first step: until then a script may load from it, in several calls.
        """
        if self._is_forbidden and self._own_place(RankGroup())[0] == 0:
            release(self._fd)
        self._is_forbidden = False

    @property
    def restart_is_planned(self) -> bool:
        """Whether the supervisor ends this rank only to start it again, with more ranks, from the last snapshot."""
        return self._fd >= 0 and is_restart_announced(self._fd, self._restart_count)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """Return the snapshots that are whole on this host."""
        heads = common_heads(self._fd) if self._fd >= 0 else []
        return [Held(head.attempt, head.step, head.folder) for head in heads]

    def read(self, held: Held, holders: Sequence[int]) -> list[Image]:
        """Return the images of a snapshot, in the order of the ranks that took them; the next goes elsewhere.

        Every rank calls it if any of them has to get it from another host.

        Args:
            held: Snapshot to read.
            holders: Ranks on whose hosts it is whole.

        Raises:
            OSError, ValueError: It is not there, or there is no room for it.
        """
        ranks = RankGroup()
        if len(holders) < ranks.world_size:
            self._fetch(held, holders, ranks)
        rank, _ = self._own_place(ranks)
        found = [self._find(held, 0)]
        found += [self._find(held, other) for other in range(1, found[0][1].world_size)]
        images = []
        for other, (slot, head) in enumerate(found):
            if other == rank:
                self._slot = 1 - slot
            length = _region_bytes(head.size_bytes)
            region = mmap.mmap(self._fd, length, offset=region_offset(other, slot), access=mmap.ACCESS_COPY)
            images.append(Image(memoryview(region)[_PAGE_BYTES : _PAGE_BYTES + head.size_bytes]))
        return images

    def _find(self, held: Held, rank: int) -> tuple[int, Head]:
        """Return slot and head of a rank's part of a snapshot."""
        for slot, head in heads_of_rank(self._fd, rank):
            if (head.attempt, head.step, head.folder) == held:
                return slot, head
        raise ValueError("not every rank finds it")

    def _fetch(self, held: Held, holders: Sequence[int], ranks: RankGroup) -> None:
        """Get the images of a snapshot from the first rank that has them, one rank for its host."""
        giver = min(holders)
        heads: list[Head] = []
        if ranks.rank == giver:
            _, first = self._find(held, 0)
            heads = [first, *(self._find(held, other)[1] for other in range(1, first.world_size))]
        heads = [Head(*head) for head in ranks.gather(heads)[giver]]
        takes = ranks.rank not in holders and self._own_place(ranks)[0] == 0
        problem = self.problem
        if takes and not problem:
            problem = self._make_room_for(heads)
        if problem := next(filter(None, ranks.gather(problem)), ""):
            raise ValueError(problem)
        failed: OSError | None = None
        for number, head in enumerate(heads):
            begin = region_offset(number, 0) + _PAGE_BYTES
            own_begin = region_offset(number, self._find(held, number)[0]) + _PAGE_BYTES if ranks.rank == giver else 0
            for at in range(0, head.size_bytes, _PIECE_BYTES):
                piece = torch.empty(min(_PIECE_BYTES, head.size_bytes - at), dtype=torch.uint8)
                if ranks.rank == giver:
                    os.preadv(self._fd, [piece.numpy().data], own_begin + at)
                piece = ranks.broadcast(piece, giver)
                try:
                    if takes and failed is None:
                        os.pwrite(self._fd, piece.numpy().data, begin + at)
                except OSError as error:  # the others go on
                    failed = error
        if takes and failed is None:
            for number, head in enumerate(heads):
                os.pwrite(self._fd, head.pack(), region_offset(number, 0))
        ranks.gather(None)  # nobody reads before it is there
        if failed is not None:
            raise failed

    def _make_room_for(self, heads: Sequence[Head]) -> str:
        """Get memory for the images of another host; return why not, or nothing."""
        sizes = [_region_bytes(head.size_bytes) for head in heads]
        problem = _shortage(2 * sum(sizes), os.fstat(self._fd).st_blocks * 512)
        try:
            for number, size in enumerate(sizes if not problem else ()):
                os.posix_fallocate(self._fd, region_offset(number, 0), size)
        except OSError as error:
            problem = f"{sum(sizes) >> 20} MiB can't be had: {error.strerror}"
        return problem

    def _own_place(self, ranks: RankGroup) -> tuple[int, int]:
        """Return this rank's number among those that keep the state between them, and how many these are."""
        return self._place if self._spans_hosts else (ranks.rank, ranks.world_size)

    def _last_attempt(self) -> int:
        return max((held.attempt for held in self.held()), default=0)

    def close(self) -> None:
        """Give up what this process has opened; the snapshots stay."""
        self._regions.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def newest_of(by_rank: Sequence[Sequence[Held]], folder: str) -> Held | None:
    """Return the newest snapshot of a folder that is whole on any rank's host."""
    ours = (held for of_rank in by_rank for held in of_rank if held.folder == _digest(folder))
    return max(ours, default=None)


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


_memory: SnapshotMemory | None = None


def memory() -> SnapshotMemory:
    """Return the memory of this process. Not before a rank asks: its parent may have imported this module for it."""
    global _memory
    if _memory is None:
        _memory = SnapshotMemory()
    return _memory


def renew() -> None:
    """Find this process's place anew: the launcher has made it a rank of the next attempt."""
    global _memory
    memory().close()
    _memory = SnapshotMemory(is_kept=True)


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
