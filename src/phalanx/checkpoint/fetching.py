"""Images of a snapshot that some hosts lack: found where they are, and sent from there over the ranks' group."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from phalanx import _snapshots
from phalanx._rank_group import RankGroup
from phalanx._room import shortage
from phalanx._snapshots import PAGE_BYTES, Head, Region, region_bytes
from phalanx.checkpoint.holdings import Choice

_PIECE_BYTES = 16 << 20


def find(fd: int, choice: Choice, world_size: int) -> dict[int, Region]:
    """Return where the images of a snapshot are on this host, by their number; those of its own ranks if there are."""
    wanted = choice.attempt, choice.step, choice.folder, world_size
    found: dict[int, Region] = {}
    for region in _snapshots.whole_regions(fd):
        head = region.head
        if (head.attempt, head.step, head.folder, head.world_size) == wanted:
            found.setdefault(region.number, region)
    return found


def fetch(fd: int, choice: Choice, ranks: RankGroup, *, is_first_here: bool, problem: str) -> None:
    """Send the images that hosts lack to these. Every rank calls it.

    Args:
        is_first_here: Whether this rank is the one that writes what comes to its host.
        problem: Reason that this host can't keep anything; empty: it can.

    Raises:
        OSError, ValueError: There is no room for it.
    """
    world_size = choice.world_sizes[ranks.rank]
    given = [number for number, giver in choice.givers.items() if giver == ranks.rank]
    here = find(fd, choice, world_size) if given else {}
    heads: dict[int, Head] = {}
    for told in ranks.gather({number: here[number].head for number in given}):
        heads |= {number: Head(*head) for number, head in told.items()}
    wanted = choice.lacking[ranks.rank] if is_first_here else frozenset()
    if wanted and not problem:
        problem = _make_room(fd, {number: heads[number] for number in wanted})
    if problem := next(filter(None, ranks.gather(problem if wanted else "")), ""):
        raise ValueError(problem)
    failed: OSError | None = None
    for number, giver in choice.givers.items():
        size_bytes = heads[number].size_bytes
        target = _snapshots.region_of_others(number, _snapshots.FETCHED_SLOT) + PAGE_BYTES
        for at in range(0, size_bytes, _PIECE_BYTES):
            piece = torch.empty(min(_PIECE_BYTES, size_bytes - at), dtype=torch.uint8)
            if giver == ranks.rank:
                os.preadv(fd, [piece.numpy().data], here[number].offset + PAGE_BYTES + at)
            piece = ranks.broadcast(piece, giver)
            try:
                if number in wanted and failed is None:
                    os.pwrite(fd, piece.numpy().data, target + at)
            except OSError as error:  # the others go on
                failed = error
    if failed is None:
        for number in wanted:
            os.pwrite(fd, heads[number].pack(), _snapshots.region_of_others(number, _snapshots.FETCHED_SLOT))
    ranks.gather(None)  # nobody reads before it is there
    if failed is not None:
        raise failed


def _make_room(fd: int, heads: Mapping[int, Head]) -> str:
    """Get memory for images of other hosts; return why not, or nothing."""
    sizes = {number: region_bytes(head.size_bytes) for number, head in heads.items()}
    total_bytes = 2 * sum(sizes.values())  # as many will be kept here, unless other hosts have parts of them
    if any(head.is_parted for head in heads.values()):
        total_bytes //= 2
    problem = shortage("two of all ranks", total_bytes, os.fstat(fd).st_blocks * 512)
    try:
        for number, size in sizes.items() if not problem else ():
            offset = _snapshots.region_of_others(number, _snapshots.FETCHED_SLOT)
            _snapshots.release_region(fd, offset)  # it may hold an older one, in whose head nobody may believe any more
            os.posix_fallocate(fd, offset, size)
    except OSError as error:
        problem = f"{sum(sizes.values()) >> 20} MiB can't be had: {error.strerror}"
    return problem
