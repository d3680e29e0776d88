"""Snapshots in memory that the supervisor of ``phalanx run`` holds: they outlive the ranks, but not the supervisor.

All ranks of a host share one sparse memfd, opened through ``/proc``. Each rank has a few regions in the memfd and
writes them in turn (`slots`), so one of them is complete at any moment. A region begins with a page that describes its
content (see `layout`); a mark on that page, written last, says that the image is complete. The image follows, in the
form of a file on disk. An image needs no hash: a region that a killed rank was writing lacks the mark. Ranks that train
together are at most one snapshot apart, so there is always a step whose snapshot is complete on all ranks.

**Limits.** All snapshots together get at most a quarter of the tightest memory limit, which may be the host's or a
cgroup's, and at most half of what is still free under that limit. If the kernel nevertheless kills a process for lack
of memory (the cgroup's own counter shows it), the supervisor forbids snapshots. The next attempt loads the last
snapshot, and frees its memory at the first step; otherwise that attempt would be killed, too. If one host is short of
memory, no host takes snapshots. The ranks agree on that before their first snapshot, because a rank that took no part
in a snapshot would keep the other ranks waiting in the collective.

**Several hosts.** Any host may be lost, and its supervisor's memory with it. State that is the same on all ranks is on
every host anyway, so nothing is copied between hosts during training. The blocks of such state are divided among the
ranks of each host, rather than among all ranks of the job. A snapshot then takes more memory on each host, but no
traffic between hosts. If each rank has only a part of the state, the parts are copied to other hosts by a process of
the supervisor (`phalanx.launch.replicas.replicator`) while training continues. Attempts are numbered across hosts (one
more than the largest number that any host has seen), so the newest snapshot has the largest pair of attempt and step,
whichever host holds it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx import _env
from phalanx._text import class_and_message
from phalanx._torch.tensors import is_dtensor
from phalanx.checkpoint.agreement import gather, raise_problems
from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.fetching import Fetch, find
from phalanx.checkpoint.memory.holdings import Choice, Holding, Moment, newest_of
from phalanx.checkpoint.memory.layout import (
    FETCHED_SLOT,
    HEAD_BYTES,
    MAGIC,
    PAGE_BYTES,
    Copy,
    Head,
    Region,
    region_bytes,
)
from phalanx.checkpoint.memory.slots import Slots
from phalanx.checkpoint.state import blocks
from phalanx.checkpoint.state.image import Image, fill, lay_out
from phalanx.checkpoint.state.tree import Leaf, pack, refuse_no_mapping
from phalanx.host.spare_memory import shortage
from phalanx.record import writer
from phalanx.wire.rank_group import RankGroup

_SLACK_BYTES = 64 * 1024  # added to an image's size, because headers grow a little
_NO_SLOT = 2  # sent by a rank without a region; other ranks send 1 if their region is too short, else 0
_IS_WHOLE = slice(8, 16)  # the mark in a head: written in one store, so that an incomplete image never has it


class SnapshotMemory:
    """Memory in which this rank keeps snapshots and finds those of the previous attempt.

    Attributes:
        size_bytes: Size of all snapshots of this rank, once there is one.
        is_urgent: Whether a snapshot should be taken soon, because a host had to fetch parts of the snapshot that was
            loaded; the same on every rank.
        fetched_bytes: Bytes that other hosts have sent to this one, through this rank, for the last load.
        asked: Folders from which this rank has loaded, or has tried to.
        spans_hosts: Whether the ranks are on several hosts.
        is_kept: Whether this process has outlived a failure, under its present rank or another.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self._fd = -1
        self.asked: set[str] = set()
        self.is_kept = is_kept
        self._regions: dict[int, mmap.mmap] = {}
        self._slots = Slots()
        self._is_forbidden = self._has_agreed = False
        self._fetch: Fetch | None = None  # the fetching of the snapshot that is being loaded
        self._has_fetched = False  # whether there may be fetched images, to be freed once a newer snapshot is safe
        self.size_bytes: int = 0
        self.is_urgent: bool = False
        self.fetched_bytes: int = 0
        environ = _env.environment()
        self._restart_count = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self._attempt = 0  # number of the attempt; known from the first snapshot on
        self._is_parted = False  # whether other hosts have other parts of the last snapshot
        self._num_hosts = int(environ.get("GROUP_WORLD_SIZE") or 1)
        self.spans_hosts: bool = environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")
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
        self._is_forbidden = layout.are_forbidden(self._fd)
        if self._is_forbidden:
            return "the kernel has killed an earlier attempt because memory ran out"
        return ""

    def agree(self) -> None:
        """Take no snapshots if another host can't, for instance after the kernel killed a rank. Every rank calls it."""
        if self._has_agreed or not self.spans_hosts:
            return
        self._has_agreed = True
        if RankGroup().largest(bool(self.problem)) and not self.problem:
            self.problem = "another host can keep none: see what its launcher says"

    # ---- writing ---------------------------------------------------------------------------------------------------

    def write(self, folder: str, state: Mapping[str, Any], step: int) -> None:
        """Take a snapshot, unless memory is short. Every rank calls it, after the same step.

        Raises:
            CheckpointError: A value can't be saved on some rank; raised on every rank.
        """
        self.agree()
        if self.problem:  # if one rank has a problem, every rank has one
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
        except Exception as error:  # a state_dict() may raise anything, and the other ranks must learn of it
            problem, cause = class_and_message(error), error
        low, high = blocks.fingerprint(described)
        has_shards = any(is_dtensor(leaf.tensor) for leaf in leaves)
        wants_copies = self.spans_hosts and layout.wanted_replicas(self._fd) > 0
        attempt = self._attempt or 1 + max(0, layout.newest_attempt(self._fd))
        *found, has_failed, any_has_shards, is_to_be_copied, is_busy, self._attempt = ranks.largest_of_each(
            [low, high, -low, -high, cause is not None, has_shards, wants_copies, self._is_copying(), attempt]
        )
        if has_failed:
            raise_problems("snapshot", gather("snapshot", problem), cause, f"of step {step} of {folder}")
        is_alike = found == [low, high, -low, -high]
        alike = described.keys() if is_alike else blocks.names_alike(gather("snapshot", described))
        is_parted = self.spans_hosts and bool(any_has_shards or not is_alike)
        if is_parted:
            rank, world_size = ranks.rank, ranks.world_size
        self._is_parted = is_parted
        parts = blocks.parts_of_rank(leaves, rank, world_size, alike)
        owner = [ranks.rank, ranks.world_size]
        metadata = {
            "step": step, "rank": rank, "world_size": world_size, "owner": owner, "is_alike": is_alike, "tree": tree,
        }  # fmt: skip
        laid_out = lay_out(parts, metadata)
        head = Head(MAGIC, 0, step, laid_out.size_bytes, world_size, self._attempt, digest_of(folder))
        if is_parted:
            local_rank, num_here = self._place
            head = head._replace(first_rank=rank - local_rank, num_here=num_here)
        slot = self._slot_for(head, ranks, is_to_be_copied=is_parted and bool(is_to_be_copied), is_busy=bool(is_busy))
        if slot < 0:
            return
        self.is_urgent = False
        region = self._regions[slot]
        region[_IS_WHOLE] = bytes(8)
        region[:HEAD_BYTES] = head.pack()
        fill(memoryview(region)[PAGE_BYTES:], laid_out, parts)
        region[_IS_WHOLE] = (1).to_bytes(8, "little")

    def _is_copying(self) -> bool:
        """Return whether this host is still copying the last snapshot that it was asked to copy."""
        copied = layout.last_copied(self._fd)
        is_asked = self._slots.copying is not None and layout.wanted_replicas(self._fd) > 0
        return is_asked and (copied is None or (copied.attempt, copied.step) != self._slots.copying)

    def _slot_for(self, head: Head, ranks: RankGroup, *, is_to_be_copied: bool, is_busy: bool) -> int:
        """Return a region that is large enough for a snapshot, or -1. Either every rank gets one, or none does."""
        before, moment = self._slots.safe, (head.attempt, head.step)
        slot = self._slots.next(moment, is_to_be_copied=is_to_be_copied, is_busy=is_busy)
        region = self._regions.get(slot)
        is_short = region is None or len(region) < PAGE_BYTES + head.size_bytes
        most = ranks.largest(_NO_SLOT if slot < 0 else is_short)
        problem = ""
        if most and most != _NO_SLOT:  # some region is too short, as at the first snapshot with an optimizer's state
            problem, num_slots = self._reserve(ranks.rank, head.size_bytes, max(slot + 1, 2))
            if problem and num_slots == 2:
                self.problem = problem
                return -1
        if problem or most == _NO_SLOT:
            self._slots.skip(moment)
            return -1
        if self._place[0] == 0:
            if self._slots.copying == moment:
                safe = self._slots.safe or (0, 0)
                layout.ask_for_copy(self._fd, Copy(*moment, head.folder, *safe))
            if self._has_fetched and self._slots.safe != before:
                self._release_fetched()
        return slot

    def _release_fetched(self) -> None:
        """Free the images that were fetched to be loaded, now that a newer snapshot is safe."""
        self._has_fetched = False
        for offset in layout.used_regions(self._fd):
            if layout.is_fetched(offset):
                layout.release_region(self._fd, offset)

    def _reserve(self, rank: int, size_bytes: int, num_slots: int) -> tuple[str, int]:
        """Allocate memory for some snapshots of every rank; return why that failed, or "", and the number of snapshots.

        Both are the same on every rank; the number is the largest that any rank asked for.
        """
        told = gather("snapshot", (self._host, region_bytes(size_bytes + _SLACK_BYTES), num_slots))
        num_slots = max(most for _, _, most in told)
        sizes = [size for host, size, _ in told if host == self._host]
        others = [one.head for one in layout.whole_regions(self._fd) if not one.is_own and one.slot != FETCHED_SLOT]
        total_bytes = num_slots * sum(sizes) + sum(region_bytes(head.size_bytes) for head in others)
        what = f"{['two', 'three'][num_slots - 2]} of all ranks{' and what is kept for other hosts' if others else ''}"
        problem = shortage(what, total_bytes, os.fstat(self._fd).st_blocks * 512)
        if max(sizes) > layout.REGION_BYTES:
            most = layout.REGION_BYTES >> 20
            problem = f"one of a rank would take {max(sizes) >> 20} MiB, more than {most} MiB"
        problem = next(filter(None, gather("snapshot", problem)), "")  # agreed on before any rank allocates
        if problem:
            return problem, num_slots
        try:
            self._allocate(told[rank][1], num_slots)
        except OSError as error:
            problem = f"{total_bytes >> 20} MiB can't be had on rank {rank}: {error.strerror}"
        return next(filter(None, gather("snapshot", problem)), ""), num_slots

    def _allocate(self, length: int, num_slots: int) -> None:
        rank, _ = self._own_place(RankGroup())
        for slot in range(max(num_slots, len(self._regions))):
            offset = layout.region_offset(rank, slot)
            os.posix_fallocate(self._fd, offset, length)
            self._regions[slot] = mmap.mmap(self._fd, length, offset=offset)
        self.size_bytes = len(self._regions) * length

    def replicas(self) -> str:
        """Describe where the replicas of this host's part of the state are; empty if each host has the whole state."""
        copied = layout.last_copied(self._fd) if self._slots.copying is not None else None
        if copied is None:
            return ""
        if not copied.num_replicas:
            return "no replicas: when a host is lost, training resumes from disk"
        on = "another host" if copied.num_replicas == 1 else f"{copied.num_replicas} other hosts"
        gaps = layout.gaps_in_copying(self._fd)
        missed = (
            f"; none were made for {gaps.total_ms / 1e3:.1f} s, since the process that copies had ended"
            if gaps.num
            else ""
        )
        return f"replicas on {on}, copied in {copied.took_ms / 1e3:.1f} s{missed}"

    def num_hosts(self) -> int:
        """Return how many hosts have this host's part of the newest safe snapshot; 0 if there is no such snapshot."""
        safe = self._slots.safe
        if self.problem or safe is None or safe[0] != self._attempt:  # hosts may have been lost since that attempt
            return 0
        if not self._is_parted:
            return self._num_hosts
        copied = layout.last_copied(self._fd)
        return 1 + (copied.num_replicas if copied is not None else 0)

    def let_go(self) -> None:
        """Free the snapshots of earlier attempts if no more may be taken, because training needs that memory.

        Do not call this before the first step: until then, a script may load those snapshots, in several calls.
        """
        if self._is_forbidden and self._own_place(RankGroup())[0] == 0:
            layout.release(self._fd)
        self._is_forbidden = False

    @property
    def restart_is_planned(self) -> bool:
        """Whether the supervisor stops this rank only to start it again, with more ranks, from the last snapshot."""
        return self._fd >= 0 and layout.is_restart_announced(self._fd, self._restart_count)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def holdings(self) -> list[Holding]:
        """Return this host's images, by snapshot.

        A snapshot of which each host should have all images is left out if one is missing here.
        """
        numbers: dict[tuple[int, int, bytes, int], set[int]] = {}
        parted = set()
        for region in layout.whole_regions(self._fd) if self._fd >= 0 else ():
            head = region.head
            snapshot = head.attempt, head.step, head.folder, head.world_size
            numbers.setdefault(snapshot, set()).add(region.number)
            if head.is_parted:
                parted.add(snapshot)
        holdings = [Holding(*snapshot, tuple(sorted(found))) for snapshot, found in numbers.items()]
        return [one for one in holdings if one.is_complete or one[:4] in parted]

    def read(self, choice: Choice) -> list[Image]:
        """Return the images of a snapshot, in rank order; the next snapshot will not overwrite them.

        Every rank calls it. Until `fill` has been called, only the header of an image that this host lacks can be read.

        Raises:
            OSError, ValueError: The snapshot is missing, or memory is short.
        """
        ranks = RankGroup()
        rank, _ = self._own_place(ranks)
        world_size = choice.world_sizes[ranks.rank]
        self._has_fetched = True
        found: dict[int, Region] = {}
        self._fetch = None
        if choice.givers:
            is_first = self._place[0] == 0
            fetch = Fetch(self._fd, choice, ranks, host=self._host, is_first_here=is_first, problem=self.problem)
            found = fetch.begin()
            self.is_urgent = not fetch.has_holes
            self._fetch = fetch if fetch.has_holes else None
            self.fetched_bytes = fetch.num_bytes
        found |= find(self._fd, choice, world_size)
        if len(found) != world_size:
            raise ValueError("not every rank finds it")
        own = (one.slot for one in found.values() if one.is_own and one.number - one.head.first_rank == rank)
        safe = self._safe_before(choice, ranks)
        self._slots.loaded((choice.attempt, choice.step), next(own, -1), safe, self._slot_of(safe, choice.folder, rank))
        images = []
        for number in range(world_size):
            offset, head = found[number].offset, found[number].head
            region = mmap.mmap(self._fd, region_bytes(head.size_bytes), offset=offset, access=mmap.ACCESS_COPY)
            images.append(Image(memoryview(region)[PAGE_BYTES : PAGE_BYTES + head.size_bytes]))
        return images

    def _safe_before(self, choice: Choice, ranks: RankGroup) -> Moment | None:
        """Return the snapshot that all hosts have copied and can load, if it is older than the chosen one; else None.

        Every rank calls it. That snapshot is kept until a newer one is safe, because the chosen one may not have been
        copied yet.
        """
        asked, copied = layout.asked_copy(self._fd), layout.last_copied(self._fd)
        is_done = asked is not None and copied is not None and copied[:2] == asked[:2]
        told = ranks.gather((asked, is_done, self.holdings()))
        asks = [(asked, is_done) for asked, is_done, _ in told if asked and asked.folder == choice.folder]
        if not asks:
            return None
        wanted = {(ask.attempt, ask.step) for ask, _ in asks}
        if len(wanted) == 1 and all(is_done for _, is_done in asks):
            (safe,) = wanted
        else:
            safe = max((ask.safe_attempt, ask.safe_step) for ask, _ in asks)
        holdings = [[one for one in of_rank if one.moment == safe] for *_, of_rank in told]
        if safe >= (choice.attempt, choice.step) or newest_of(holdings, choice.folder) is None:
            return None
        return safe

    def _slot_of(self, moment: Moment | None, folder: bytes, place: int) -> int:
        """Return which of this rank's own regions holds its part of a snapshot; -1 if none does."""
        for one in layout.whole_regions(self._fd) if moment is not None else ():
            head = one.head
            is_it = (head.attempt, head.step) == moment and head.folder == folder
            if one.is_own and is_it and one.number - head.first_rank == place:
                return one.slot
        return -1

    @property
    def has_holes(self) -> bool:
        """Whether `fill` must be called before the images that `read` returned are used; the same on every rank."""
        return self._fetch is not None

    def fill(self, needed: Mapping[int, Iterable[tuple[int, int]]]) -> None:
        """Fetch the parts that this rank needs of images that its host lacks. Every rank calls it.

        Args:
            needed: Ranges of bytes, by the number of the image.

        Raises:
            OSError, ValueError: Memory is short.
        """
        assert self._fetch is not None
        fetch, self._fetch = self._fetch, None
        self.is_urgent = fetch.fill(needed)
        self.fetched_bytes = fetch.num_bytes

    def _own_place(self, ranks: RankGroup) -> tuple[int, int]:
        """Return this rank's number in the set of ranks that together keep the whole state, and the set's size."""
        return self._place if self.spans_hosts else (ranks.rank, ranks.world_size)

    def close(self) -> None:
        """Close what this process has opened; the snapshots stay."""
        self._regions.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def digest_of(folder: str) -> bytes:
    return hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=16).digest()


_memory: SnapshotMemory | None = None


def memory() -> SnapshotMemory:
    """Return the memory of this process, created at the first call.

    It is not created on import, because a parent process may import this module before it forks.
    """
    global _memory
    if _memory is None:
        _memory = SnapshotMemory()
    return _memory


def renew() -> None:
    """Forget what belongs to the earlier attempt, in a process that the launcher has made a rank of the next one."""
    global _memory
    memory().close()
    _memory = SnapshotMemory(is_kept=True)


def snapshot(folder: str | os.PathLike[str], state: Mapping[str, Any], step: int) -> str:
    """Keep `state` in memory that outlives this rank. Every rank calls it, after the same step.

    When ``phalanx run`` restarts the ranks, `load` finds the snapshot. Two snapshots of each rank are kept, or three if
    copying to other hosts is slow. Together they take at most a quarter of the memory that the host has and the cgroups
    allow, and at most half of what is free.

    Args:
        folder: Folder of the checkpoints, as passed to `save`.
        state: State as for `save`.
        step: Step of the training, at least 0.

    Returns:
        The reason why there is no snapshot, as a sentence; empty if there is one. Either no launcher holds memory for
        snapshots, or memory is short, or the kernel killed an earlier attempt because memory ran out.

    Raises:
        CheckpointError: A value can't be saved on some rank; raised on every rank.
        TypeError: `state` is not a dictionary.

    Example:
        >>> print(phalanx.checkpoint.snapshot("runs/linear", {"weight": torch.ones(3)}, step=1))
        no supervisor holds memory for them: start with phalanx run --max-restarts
    """
    refuse_no_mapping("snapshot", state, ", step")
    with writer.phase("snapshot", step):
        memory().write(os.path.abspath(folder), state, step)
    return memory().problem
