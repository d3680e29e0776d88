"""`GlobalBatches`: the batches that all ranks train on together, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from phalanx._ranges import share
from phalanx.data.random_state import RandomState
from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed, seed_process


class GlobalBatches:
    """Yields this rank's indices of one global batch after the other, in parts that fit one forward pass.

    Order and batches are a pure function of (seed, epoch): another number of ranks trains on the same samples in the
    same steps. Rank r of W takes places ``[r * n // W, (r + 1) * n // W)`` of a batch of n.

    Args:
        length: Samples in the dataset.
        batch_size: Samples of all ranks together; the last batch of an epoch is what is left.
        micro_batch_size: At most so many of this rank in one forward pass; None: all of its part.
        num_parts: Instead of `micro_batch_size`: cut a batch into so many parts over all ranks, whatever their number.
        shuffle: Permute the dataset anew in each epoch.
        seed: The same on all ranks.
        drop_last: Leave out what is left at the end of an epoch.

    Raises:
        ValueError: The sizes do not fit the number of ranks.
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
            raise ValueError(f"a global batch of {batch_size} does not reach for {self._world_size} ranks")
        if num_parts is not None and num_parts % self._world_size:
            raise ValueError(f"{num_parts} parts of a batch can't be divided among {self._world_size} ranks")
        self.length = length
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.num_parts = num_parts
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.place = 0  # in the epoch's order, of the next batch

    def __len__(self) -> int:
        """Return the number of global batches of a whole epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    @property
    def parts_of_a_batch(self) -> int:
        """Return how many forward passes this rank needs for a whole batch."""
        return len(self._cuts(self.batch_size))

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield the rest of the epoch: for each batch this rank's parts, each a list of indices, maybe empty."""
        order = self._order()
        for first, size in self._left():
            yield [order[first + part.start : first + part.stop] for part in self._cuts(size)]

    def advance(self) -> None:
        """Note that all ranks have trained on one more batch."""
        self.place += self.batch_size

    def sizes(self) -> Iterator[tuple[int, list[int]]]:
        """Yield for each batch of the rest of the epoch its samples over all ranks, and those in this rank's parts."""
        for _, size in self._left():
            yield size, [len(part) for part in self._cuts(size)]

    @property
    def is_at_end(self) -> bool:
        """Whether the epoch has no further batch."""
        return next(self._left(), None) is None

    def _left(self) -> Iterator[tuple[int, int]]:
        """Yield where each batch that is left begins in the order, and its size."""
        end = self.length - (self.batch_size - 1 if self._drop_last else 0)
        for first in range(self.place, end, self.batch_size):
            yield first, min(self.batch_size, self.length - first)

    def _cuts(self, size: int) -> list[range]:
        """Return the places of this rank's parts in a batch of that size."""
        rank, world_size = self._rank, self._world_size
        if self.num_parts is not None:
            own = self.num_parts // world_size
            return [share(size, part, self.num_parts) for part in range(rank * own, (rank + 1) * own)]
        places = share(size, rank, world_size)
        most = -(-size // world_size)  # of any rank: all need equally many forward passes
        step = self.micro_batch_size or most
        return [places[at : at + step] for at in range(0, most, step)]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._seed, "order", self.epoch))
        return torch.randperm(self.length, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand, for any number of ranks."""
        return {"epoch": self.epoch, "place": self.place, "seed": self._seed, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: what was not trained on in the epoch comes, once.

        Raises:
            ValueError: `state` is of another dataset or order.
        """
        own = self.state_dict()
        for name in ("length", "seed"):
            if state[name] != own[name]:
                raise ValueError(f"the data's {name} is {own[name]}, and the state was taken with {state[name]}")
        if state.get("batches") != own.get("batches"):
            raise ValueError(
                "of this run and the one whose state this is, only one has a batch_sampler: go on as it began"
            )
        self.epoch, self.place = state["epoch"], state["place"]


class GivenBatches(GlobalBatches):
    """The same of the global batches that a batch sampler makes; `place` counts batches.

    What the sampler draws from the default generators, and from ``set_epoch``, is a function of (seed, epoch).

    Args:
        length: Samples in the dataset.
        batch_sampler: Lists of indices, anew for each epoch; the same on all ranks.
        micro_batch_size: At most so many of this rank in one forward pass; None: all of its part.
        num_parts: Instead of `micro_batch_size`: cut a batch into so many parts over all ranks, whatever their number.
        seed: The same on all ranks.

    Raises:
        ValueError: The sampler does not give lists of indices, or others when it is asked again.
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
        size = rank_and_size()[1]  # of no meaning here, but never too small
        super().__init__(length, size, micro_batch_size=micro_batch_size, num_parts=num_parts, seed=seed)
        self._sampler = batch_sampler
        self._of_epoch: tuple[int, list[list[int]]] = 0, self._draw()
        if self._draw() != self.batches:
            raise ValueError(
                "batch_sampler gives other batches when it is asked again for the same epoch, so a run could not be "
                "resumed: let it draw from torch's default generator, or from one that set_epoch(epoch) seeds"
            )

    @property
    def batches(self) -> list[list[int]]:
        """The batches of this epoch."""
        if self._of_epoch[0] != self.epoch:
            self._of_epoch = self.epoch, self._draw()
        return self._of_epoch[1]

    def __len__(self) -> int:
        """Return the number of global batches of this epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """Yield the rest of the epoch: for each batch this rank's parts, each a list of indices, maybe empty."""
        for batch in self.batches[self.place :]:
            yield [batch[part.start : part.stop] for part in self._cuts(len(batch))]

    def advance(self) -> None:
        """Note that all ranks have trained on one more batch."""
        self.place += 1

    def _left(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each batch that is left, and its size."""
        for number, batch in enumerate(self.batches[self.place :], start=self.place):
            yield number, len(batch)

    def _draw(self) -> list[list[int]]:
        drawn = RandomState()
        before = drawn.state_dict()
        seed_process(derive_seed(self._seed, "order", self.epoch))
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)  # type: ignore[union-attr]
        try:
            return [list(map(int, batch)) for batch in self._sampler]
        except TypeError as error:
            raise ValueError(
                "batch_sampler must give lists of indices, one for each batch: "
                "torch.utils.data.BatchSampler(sampler, batch_size=32, drop_last=False)"
            ) from error
        finally:
            drawn.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand, for any number of ranks."""
        return {**super().state_dict(), "batches": "given"}
