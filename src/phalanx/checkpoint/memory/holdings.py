"""Which snapshot is loaded, and from where, when each host has told which images it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

Moment = tuple[int, int]
"""Number of the attempt and step: the greater one is newer, on all hosts."""


class Held(NamedTuple):
    """Images of one snapshot that a host holds, its own ranks' and replicas.

    Attributes:
        attempt: Number of the ranks that took it: all later ones have a larger number, on all hosts.
        step: Step of the training.
        folder: Which folder of checkpoints it belongs to.
        world_size: Number of images that make up the snapshot.
        numbers: The images that are here, in order.
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
    """The snapshot that is loaded, the same on every rank.

    Attributes:
        world_sizes: Number of images of what each rank reads, by rank.
        givers: Rank that sends each image that goes over the network, by its number.
        lacking: Images that each rank's host gets, by rank.
    """

    attempt: int
    step: int
    folder: bytes
    world_sizes: tuple[int, ...]
    givers: dict[int, int]
    lacking: tuple[frozenset[int], ...]


def newest_of(by_rank: Sequence[Sequence[Held]], folder: bytes) -> Choice | None:
    """Return the newest snapshot of a folder of which the hosts together have every image; None if there is none.

    A host that holds a whole one by itself reads that: it has the values of its own ranks.

    Args:
        by_rank: Images that each rank's host holds.
        folder: Digest of the folder.
    """
    ours = [[held for held in of_rank if held.folder == folder] for of_rank in by_rank]
    for moment in sorted({held.moment for of_rank in ours for held in of_rank}, reverse=True):
        at_moment = [[held for held in of_rank if held.moment == moment] for of_rank in ours]
        alone = [next((held.world_size for held in of_rank if held.is_complete), 0) for of_rank in at_moment]
        for size in [next(filter(None, alone))] if any(alone) else _sizes(at_moment):
            images = [_images(of_rank, size) for of_rank in at_moment]
            if len(frozenset().union(*images)) != size:
                continue
            every = frozenset(range(size))
            lacking = [frozenset() if own else every - has for own, has in zip(alone, images, strict=True)]
            if any(alone):  # all from one host: each has the values of its own ranks
                first = next(rank for rank, own in enumerate(alone) if own)
                images = [has if rank == first else frozenset() for rank, has in enumerate(images)]
            givers = {
                number: next(rank for rank, has in enumerate(images) if number in has)
                for number in sorted(frozenset().union(*lacking))
            }
            return Choice(*moment, folder, tuple(own or size for own in alone), givers, tuple(lacking))
    return None


class Lost(NamedTuple):
    """A snapshot that can't be loaded, and the images of it that no host holds."""

    step: int
    numbers: tuple[int, ...]


def lost_of(by_rank: Sequence[Sequence[Held]], folder: bytes) -> Lost | None:
    """Return what is left of a folder's newest snapshot if no snapshot is whole; None if one is, or nothing is left."""
    ours = [held for of_rank in by_rank for held in of_rank if held.folder == folder]
    if not ours or newest_of(by_rank, folder) is not None:
        return None
    newest = max(ours, key=lambda held: held.moment)
    here = _images([held for held in ours if held.moment == newest.moment], newest.world_size)
    return Lost(newest.step, tuple(number for number in range(newest.world_size) if number not in here))


def _sizes(at_moment: Sequence[Sequence[Held]]) -> list[int]:
    return sorted({held.world_size for of_rank in at_moment for held in of_rank})


def _images(held: Sequence[Held], world_size: int) -> frozenset[int]:
    return frozenset(number for one in held if one.world_size == world_size for number in one.numbers)
