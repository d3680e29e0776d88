"""`GlobalBatches`: batches over all ranks, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from phalanx._ranges import share
from phalanx.data.random_state import random_state_kept
from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed, seed_process


class GlobalBatches:
    """This rank's indices of each global batch, in parts that fit one forward pass.

    The batches are a pure function of seed and epoch, so any number of ranks trains on the same samples in the same
    steps. Rank r of W takes the range ``[r * n // W, (r + 1) * n // W)`` of a batch of n samples.

    Args:
        length: Number of samples in the dataset.
        batch_size: Number of samples in a batch, over all ranks; the last batch of an epoch may be smaller.
        micro_batch_size: Largest number of this rank's samples in one forward pass; None: unlimited.
        num_parts: Number of parts into which all ranks together cut a batch; if given, `micro_batch_size` has no
            effect.
        shuffle: Whether each epoch has a new order.
        seed: Seed of the order, the same on all ranks.
        drop_last: Whether the last batch of an epoch is left out if it is smaller than `batch_size`.

    Attributes:
        epoch: Number of the epoch, from 0.
        place: Position of the next batch in the epoch's order.

    Raises:
        ValueError: `batch_size` is smaller than the number of ranks, or `num_parts` is not a multiple of that number.

    Example:
        >>> batches = phalanx.data.GlobalBatches(10, 4, shuffle=False)
        >>> list(batches.sizes())
        [(4, [4]), (4, [4]), (2, [2])]
        >>> for parts in batches:
        ...     print(parts)
        ...     batches.advance()
        [[0, 1, 2, 3]]
        [[4, 5, 6, 7]]
        [[8, 9]]
        >>> batches.load_state_dict(batches.state_dict())
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        micro_batch_size: int | None = None,
        num_parts: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._rank, self._world_size = rank_and_size()
        if batch_size < self._world_size:
            raise ValueError(
                f"rank {self._rank}: a global batch of {batch_size} is too small for {self._world_size} ranks, each of "
                f"which takes a part of it: make it at least {self._world_size}, or start fewer ranks"
            )
        if num_parts is not None and num_parts % self._world_size:
            raise ValueError(
                f"rank {self._rank}: {num_parts} parts of a batch can't be divided among {self._world_size} ranks: "
                "make their number a multiple of the ranks"
            )
        self.length = length
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.num_parts = num_parts
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch: int = 0
        self.place: int = 0

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    @property
    def parts_of_a_batch(self) -> int:
        """Number of forward passes that this rank needs for a full batch."""
        return len(self._cuts(self.batch_size))

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield a list for each batch left in the epoch: this rank's parts, each a list of indices, possibly empty."""
        order = self._order()
        for first, size in self._left():
            yield [order[first + part.start : first + part.stop] for part in self._cuts(size)]

    def advance(self) -> None:
        """Count one more batch that all ranks have trained on."""
        self.place += self.batch_size

    def sizes(self) -> Iterator[tuple[int, list[int]]]:
        """Yield a pair for each remaining batch: its size over all ranks, and the sizes of this rank's parts of it."""
        for _, size in self._left():
            yield size, [len(part) for part in self._cuts(size)]

    @property
    def num_left(self) -> int:
        """Number of batches left in the epoch."""
        return sum(1 for _ in self._left())

    @property
    def is_at_end(self) -> bool:
        """Whether the epoch has no more batches."""
        return next(self._left(), None) is None

    def _left(self) -> Iterator[tuple[int, int]]:
        """Yield the position and the size of each remaining batch."""
        end = self.length - (self.batch_size - 1 if self._drop_last else 0)
        for first in range(self.place, end, self.batch_size):
            yield first, min(self.batch_size, self.length - first)

    def _cuts(self, size: int) -> list[range]:
        """Return the ranges of this rank's parts in a batch of `size` samples."""
        rank, world_size = self._rank, self._world_size
        if self.num_parts is not None:
            own = self.num_parts // world_size
            return [share(size, part, self.num_parts) for part in range(rank * own, (rank + 1) * own)]
        places = share(size, rank, world_size)
        most = -(-size // world_size)  # the largest share, because all ranks must run equally many forward passes
        step = self.micro_batch_size or most
        return [places[at : at + step] for at in range(0, most, step)]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._seed, "order", self.epoch))
        return torch.randperm(self.length, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: the same on all ranks, and any number of ranks can continue from it."""
        return {"epoch": self.epoch, "place": self.place, "seed": self._seed, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position: the rest of the epoch yields each remaining sample exactly once.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: `state` belongs to another dataset or order.
        """
        own = self.state_dict()
        for name in ("length", "seed"):
            if state[name] != own[name]:
                raise ValueError(f"the data's {name} is {own[name]}, but the state was saved with {state[name]}")
        if state.get("batches") != own.get("batches"):
            raise ValueError(
                "the state was saved with a batch_sampler and this run has none, or the reverse: pass the same to both"
            )
        self.epoch, self.place = state["epoch"], state["place"]


class GivenBatches(GlobalBatches):
    """Global batches from a batch sampler; `place` counts batches, not samples.

    Before the sampler runs, the default generators are seeded from `seed` and the epoch. So a sampler yields the same
    batches again if it draws from the default generators, or from a generator that its ``set_epoch`` seeds.

    Args:
        length: Number of samples in the dataset.
        batch_sampler: Iterable of lists of indices, one for each batch; the same on all ranks.
        micro_batch_size: Largest number of this rank's samples in one forward pass; None: unlimited.
        num_parts: Number of parts into which all ranks together cut a batch; if given, `micro_batch_size` has no
            effect.
        seed: Seed of the sampler's random numbers, the same on all ranks.

    Raises:
        ValueError: The sampler does not yield lists of indices, or yields different lists when it runs again for the
            same epoch.
    """

    def __init__(
        self,
        length: int,
        batch_sampler: Iterable[Iterable[int]],
        *,
        micro_batch_size: int | None = None,
        num_parts: int | None = None,
        seed: int = 0,
    ) -> None:
        size = rank_and_size()[1]  # the parent class's batch size is unused here; this one passes its checks
        super().__init__(length, size, micro_batch_size=micro_batch_size, num_parts=num_parts, seed=seed)
        self._sampler = batch_sampler
        self._of_epoch: tuple[int, list[list[int]]] = 0, self._draw()
        if self._draw() != self.batches:
            raise ValueError(
                "batch_sampler yields different batches for the same epoch, so the run could not be resumed: let it "
                "draw from torch's default generator, or from one that set_epoch(epoch) seeds"
            )

    @property
    def batches(self) -> list[list[int]]:
        """Batches of this epoch."""
        if self._of_epoch[0] != self.epoch:
            self._of_epoch = self.epoch, self._draw()
        return self._of_epoch[1]

    def __len__(self) -> int:
        """Return the number of global batches in this epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield a list for each batch left in the epoch: this rank's parts, each a list of indices, possibly empty."""
        for batch in self.batches[self.place :]:
            yield [batch[part.start : part.stop] for part in self._cuts(len(batch))]

    def advance(self) -> None:
        """Count one more batch that all ranks have trained on."""
        self.place += 1

    def _left(self) -> Iterator[tuple[int, int]]:
        """Yield the index in the epoch, and the size, of each remaining batch."""
        for number, batch in enumerate(self.batches[self.place :], start=self.place):
            yield number, len(batch)

    def _draw(self) -> list[list[int]]:
        with random_state_kept():
            seed_process(derive_seed(self._seed, "order", self.epoch))
            for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(self.epoch)  # type: ignore[union-attr]
            try:
                return [list(map(int, batch)) for batch in self._sampler]
            except TypeError as error:
                raise ValueError(
                    "batch_sampler must yield lists of indices, one for each batch: "
                    "torch.utils.data.BatchSampler(sampler, batch_size=32, drop_last=False)"
                ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: the same on all ranks, and any number of ranks can continue from it."""
        return {**super().state_dict(), "batches": "given"}
