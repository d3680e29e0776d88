"""Fetches, over the ranks' group, the images or parts of images that a host's ranks need and only other hosts have.

If all ranks have the same state, each host gets complete images, broadcast in pieces of 16 MiB. If each host has only a
part of the state, it first gets the headers of the images that it lacks. From these headers, each rank finds the ranges
of bytes that it will read, in whole pages (`restoring.survey` does all that `restore` does, except reading and
assigning). A range that most hosts need is broadcast; any other range is sent from rank to rank. If only parts of an
image are fetched, they lie in its usual region, with holes between them, and the image is marked as complete only once
all of it has arrived. So an image with holes is used only by the ranks that are loading it now, and the next load
fetches it again.

The first version sent complete images to all hosts. If one rank of three fails, that sends 26 MB in all instead of 0.4
MB (see the page on checkpoints in docs/en/how_it_works). Each host also needed memory for the state of the whole job,
which users of FSDP2 do not have. The present version has one disadvantage: until a new snapshot is safe, a part whose
holder was lost has one copy fewer. So after such a load, a Trainer takes a snapshot at its first step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.holdings import Choice
from phalanx.checkpoint.memory.layout import FETCHED_SLOT, PAGE_BYTES, Head, Region, region_bytes
from phalanx.host.spare_memory import shortage
from phalanx.wire.rank_group import RankGroup

Ranges = list[tuple[int, int]]
"""Half-open ranges of an image's bytes."""

_PIECE_BYTES = 16 << 20
_LENGTH_BYTES = 8  # an image begins with the length of its header, an integer of this size


def find(fd: int, choice: Choice, world_size: int) -> dict[int, Region]:
    """Return the regions in which this host holds images of a snapshot, by the number of the image.

    If an image has several regions, one that a rank of this host wrote is preferred.
    """
    wanted = choice.attempt, choice.step, choice.folder, world_size
    found: dict[int, Region] = {}
    for region in layout.whole_regions(fd):
        head = region.head
        if (head.attempt, head.step, head.folder, head.world_size) == wanted:
            found.setdefault(region.number, region)
    return found


class Fetch:
    """Gets images of one snapshot for hosts that lack them. Every rank creates a `Fetch` and calls the same methods.

    Args:
        host: Name of this rank's host.
        is_first_here: Whether this rank writes what its host receives.
        problem: Reason why this host can't keep images; empty if it can.

    Attributes:
        num_bytes: Bytes that this host has received through this rank.
        has_holes: Whether some parts arrive only with `fill`.
    """

    def __init__(
        self, fd: int, choice: Choice, ranks: RankGroup, *, host: str, is_first_here: bool, problem: str
    ) -> None:
        self._fd, self._choice, self._ranks = fd, choice, ranks
        self._host, self._is_first_here, self._problem = host, is_first_here, problem
        self.num_bytes: int = 0
        self._filled: dict[int, Ranges] = {}  # arrived ranges of each image that this rank writes, by image
        self._lacking = choice.lacking[ranks.rank]
        given = [number for number, giver in choice.givers.items() if giver == ranks.rank]
        self._here = find(fd, choice, choice.world_sizes[ranks.rank]) if given else {}
        told: dict[int, tuple[Head, int]] = {}
        for of_rank in ranks.gather(
            {number: (self._here[number].head, self._header_bytes(number)) for number in given}
        ):
            told |= of_rank
        self._heads = {number: head for number, (head, _) in told.items()}
        self._headers = {number: header_bytes for number, (_, header_bytes) in told.items()}
        self.has_holes: bool = any(head.is_parted for head in self._heads.values())

    def _header_bytes(self, number: int) -> int:
        length = os.pread(self._fd, _LENGTH_BYTES, self._here[number].offset + PAGE_BYTES)
        return _LENGTH_BYTES + int.from_bytes(length, "little")

    def begin(self) -> dict[int, Region]:
        """Get the images that this host lacks, or only their headers if `has_holes`; return the regions by image.

        Raises:
            OSError, ValueError: Some host has no memory for what it lacks.
        """
        found: dict[int, Region] = {}
        for number in sorted(self._lacking):
            offset = layout.region_of_others(number, FETCHED_SLOT)
            found[number] = Region(offset, number, FETCHED_SLOT, is_own=False, head=self._heads[number])
            if self._is_first_here and not self._problem:
                layout.release_region(self._fd, offset)  # frees an older image, whose head must not be read
        sizes = self._headers if self.has_holes else {number: head.size_bytes for number, head in self._heads.items()}
        self._get({number: [(0, sizes[number])] for number in self._lacking})
        return found

    def fill(self, needed: Mapping[int, Iterable[tuple[int, int]]]) -> bool:
        """Get what this host's ranks need; return whether any host has received something.

        Args:
            needed: Ranges that this rank needs, by the number of the image.

        Raises:
            OSError, ValueError: Some host has no memory for what its ranks need.
        """
        return self._get({number: list(needed[number]) for number in self._lacking if needed.get(number)})

    def _get(self, wanted: Mapping[int, Ranges]) -> bool:
        """Send each host what its ranks want; return whether any rank wants something."""
        writers: dict[str, int] = {}
        by_host: dict[int, dict[str, Ranges]] = {}
        for rank, (host, is_first, of_rank) in enumerate(
            self._ranks.gather((self._host, self._is_first_here, dict(wanted)))
        ):
            if is_first:
                writers[host] = rank
            for number, ranges in of_rank.items():
                by_host.setdefault(number, {}).setdefault(host, []).extend(ranges)
        for of_image in by_host.values():
            for host in of_image:
                of_image[host] = _merged(of_image[host])
        mine = {number: of_image[self._host] for number, of_image in by_host.items() if self._host in of_image}
        problem = self._problem or self._reserve(mine) if mine and self._is_first_here else ""
        if problem := next(filter(None, self._ranks.gather(problem)), ""):
            raise ValueError(problem)
        failed: OSError | None = None
        for number, of_image in sorted(by_host.items()):
            for begin, end, hosts in _segments(of_image):
                to = [writers[host] for host in hosts]
                for at in range(begin, min(end, self._heads[number].size_bytes), _PIECE_BYTES):
                    length = min(_PIECE_BYTES, end - at, self._heads[number].size_bytes - at)
                    try:
                        self._move(number, at, length, to, is_for_most=2 * len(hosts) > len(writers))
                    except OSError as error:  # raised after the other transfers, in which ranks wait for this one
                        failed = error
        for number, ranges in mine.items() if self._is_first_here and failed is None else ():
            self._note(number, ranges)
        self._ranks.gather(None)  # a barrier: no rank reads before everything is written
        if failed is not None:
            raise failed
        return bool(by_host)

    def _note(self, number: int, ranges: Ranges) -> None:
        """Record that ranges of an image have arrived; once all have, mark the image as complete in its head."""
        head = self._heads[number]
        self._filled[number] = _merged([*self._filled.get(number, ()), *ranges])
        if self._filled[number] == _merged([(0, head.size_bytes)]):
            os.pwrite(self._fd, head.pack(), layout.region_of_others(number, FETCHED_SLOT))

    def _move(self, number: int, at: int, length: int, to: Sequence[int], *, is_for_most: bool) -> None:
        """Send some bytes of an image from the rank that has the image to the ranks that store them."""
        giver, me = self._choice.givers[number], self._ranks.rank
        if not is_for_most and me != giver and me not in to:
            return
        piece = torch.empty(length, dtype=torch.uint8)
        if giver == me:
            os.preadv(self._fd, [piece.numpy().data], self._here[number].offset + PAGE_BYTES + at)
        if is_for_most:
            piece = self._ranks.broadcast(piece, giver)
        elif giver == me:
            for rank in to:
                self._ranks.send(piece, rank)
        else:
            piece = self._ranks.receive(piece, giver)
        if me in to:
            self.num_bytes += length
            os.pwrite(self._fd, piece.numpy().data, layout.region_of_others(number, FETCHED_SLOT) + PAGE_BYTES + at)

    def _reserve(self, wanted: Mapping[int, Ranges]) -> str:
        """Allocate memory for parts of images of other hosts; return why that failed, or an empty string."""
        more_bytes = sum(end - begin for ranges in wanted.values() for begin, end in ranges)
        held_bytes = os.fstat(self._fd).st_blocks * 512
        if self.has_holes:
            what, total_bytes = "with what its ranks need of other hosts, snapshots", held_bytes + more_bytes
        else:  # counted twice, because this host will also keep its own images, of the same size
            what, total_bytes = "two of all ranks", 2 * more_bytes
        problem = shortage(what, total_bytes, held_bytes)
        try:
            for number, ranges in wanted.items() if not problem else ():
                offset = layout.region_of_others(number, FETCHED_SLOT)
                last_page = offset + region_bytes(self._heads[number].size_bytes) - PAGE_BYTES
                os.posix_fallocate(self._fd, last_page, PAGE_BYTES)  # so that the file covers all of the mapped image
                for begin, end in ranges:
                    os.posix_fallocate(self._fd, offset + PAGE_BYTES + begin, end - begin)
        except OSError as error:
            problem = f"{more_bytes >> 20} MiB can't be had: {error.strerror}"
        return problem


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all pages that the ranges touch, as sorted ranges that neither overlap nor adjoin."""
    merged: Ranges = []
    for begin, end in sorted(ranges):
        begin, end = begin // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((begin, end))
    return merged


def _segments(by_host: Mapping[str, Ranges]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield ranges, in order, each with the hosts that want the whole range."""
    edges: dict[int, list[tuple[bool, str]]] = {}
    for host, ranges in by_host.items():
        for begin, end in ranges:
            edges.setdefault(begin, []).append((True, host))
            edges.setdefault(end, []).append((False, host))
    hosts: set[str] = set()
    for begin, end in pairwise(sorted(edges)):
        hosts |= {host for begins, host in edges[begin] if begins}
        hosts -= {host for begins, host in edges[begin] if not begins}
        if hosts:
            yield begin, end, sorted(hosts)
