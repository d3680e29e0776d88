"""Chooses the snapshot to load, and the rank that sends each image, from what each host holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

Moment = tuple[int, int]
"""Number of the attempt, and the step. Of two such pairs, the larger is newer, whichever hosts they are from."""


class Holding(NamedTuple):
    """The images of one snapshot that a host holds: those of its own ranks, and replicas of other hosts' images.

    Attributes:
        attempt: Number of the attempt that took the snapshot; later attempts have larger numbers, on all hosts.
        step: Step of the training.
        folder: Digest of the folder of checkpoints that the snapshot belongs to.
        world_size: Number of images that make up the snapshot.
        numbers: Numbers of the images that the host holds, in order.
    """

    attempt: int
    step: int
    folder: bytes
    world_size: int
    numbers: tuple[int, ...]

    @property
    def moment(self) -> Moment:
        return self.attempt, self.step

    @property
    def is_complete(self) -> bool:
        return len(self.numbers) == self.world_size


@dataclasses.dataclass(frozen=True)
class Choice:
    """The snapshot to load, the same on every rank.

    Attributes:
        world_sizes: Number of images that make up the snapshot on each rank's host, by rank.
        givers: Rank that sends an image over the network, by the image's number.
        lacking: Images that each rank's host receives, by rank.
    """

    attempt: int
    step: int
    folder: bytes
    world_sizes: tuple[int, ...]
    givers: dict[int, int]
    lacking: tuple[frozenset[int], ...]


def newest_of(by_rank: Sequence[Sequence[Holding]], folder: bytes) -> Choice | None:
    """Return a folder's newest snapshot that the hosts together hold in full; None if there is none.

    A host that holds all images itself reads no others, because its images have the values of its own ranks.

    Args:
        by_rank: Images that each rank's host holds.
        folder: Digest of the folder.
    """
    ours = [[one for one in of_rank if one.folder == folder] for of_rank in by_rank]
    for moment in sorted({one.moment for of_rank in ours for one in of_rank}, reverse=True):
        at_moment = [[one for one in of_rank if one.moment == moment] for of_rank in ours]
        complete = [next((one.world_size for one in of_rank if one.is_complete), 0) for of_rank in at_moment]
        sizes = {one.world_size for of_rank in at_moment for one in of_rank}
        for size in [next(filter(None, complete))] if any(complete) else sorted(sizes):
            images = [_images(of_rank, size) for of_rank in at_moment]
            if len(frozenset().union(*images)) != size:
                continue
            every = frozenset(range(size))
            lacking = [frozenset() if own else every - has for own, has in zip(complete, images, strict=True)]
            if any(complete):  # only one host sends images, because each host's images have its own ranks' values
                first = next(rank for rank, own in enumerate(complete) if own)
                images = [has if rank == first else frozenset() for rank, has in enumerate(images)]
            givers = {
                number: next(rank for rank, has in enumerate(images) if number in has)
                for number in sorted(frozenset().union(*lacking))
            }
            return Choice(*moment, folder, tuple(own or size for own in complete), givers, tuple(lacking))
    return None


class Lost(NamedTuple):
    """A snapshot that can't be loaded because no host holds the images in `numbers`."""

    step: int
    numbers: tuple[int, ...]


def lost_of(by_rank: Sequence[Sequence[Holding]], folder: bytes) -> Lost | None:
    """Return what a folder's newest snapshot lacks; None if some snapshot can be loaded, or there is no snapshot."""
    ours = [one for of_rank in by_rank for one in of_rank if one.folder == folder]
    if not ours or newest_of(by_rank, folder) is not None:
        return None
    newest = max(ours, key=lambda one: one.moment)
    here = _images([one for one in ours if one.moment == newest.moment], newest.world_size)
    return Lost(newest.step, tuple(number for number in range(newest.world_size) if number not in here))


def _images(holdings: Sequence[Holding], world_size: int) -> frozenset[int]:
    return frozenset(number for one in holdings if one.world_size == world_size for number in one.numbers)
