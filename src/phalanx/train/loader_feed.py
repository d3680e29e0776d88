"""`LoaderFeed`: takes a loader of this rank's batches as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._rank_group import RankGroup
from phalanx._text import counted
from phalanx.data.loader import DataLoader
from phalanx.data.parts import have_own_parts
from phalanx.data.random_state import random_state_kept
from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed
from phalanx.train.feed import Part, whatever


class LoaderFeed:
    """Takes a loader of this rank's batches as it is, each a step.

    Args:
        loader: Iterable of batches, which is iterated anew in each epoch. One with ``state_dict`` and
            ``load_state_dict`` resumes by itself, on any number of ranks; otherwise the batches that were already
            trained on are skipped.
        seed: Seed for samplers that have no generator of their own.
        without_effect: Names of settings that were given and change nothing here.
    """

    may_differ = True
    num_workers = 0  # of the trainer's own

    def __init__(self, loader: Any, seed: int, *, without_effect: Sequence[str] = ()) -> None:
        self._without_effect = without_effect
        self._world_size = rank_and_size()[1]
        self._loader = loader
        self._seed = seed
        self._epoch = self._place = 0
        self._order = torch.Generator()
        drawing: Any
        for drawing in (loader, *_samplers(loader)):  # from a generator of the feed, seeded by the epoch
            if getattr(drawing, "generator", 0) is None:
                drawing.generator = self._order

    @property
    def num_steps(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:  # a stream
            return None

    @property
    def num_left(self) -> int | None:
        own = self._own_state() if isinstance(self._loader, DataLoader) else None
        if own is None:
            return None if self.num_steps is None else max(0, self.num_steps - self._place)
        if self._has_passed(own):
            return 0
        num_samples, size = self._loader.sampler.num_after(own["place"]), self._loader.batch_size or 1
        return num_samples // size if self._loader.drop_last else -(-num_samples // size)

    @property
    def is_at_start(self) -> bool:
        return self._place == 0

    @property
    def is_at_end(self) -> bool:
        own = self._own_state() if isinstance(self._loader, DataLoader) else None
        if own is not None:  # it knows, also where another number of ranks has taken the first steps
            return self._has_passed(own)
        return self.num_steps is not None and self._place >= self.num_steps

    def _has_passed(self, own: Mapping[str, Any]) -> bool:
        """Return whether a loader of ours, by its own state, has given its last batch of this epoch."""
        return self._place > 0 and own["epoch"] > self._epoch

    def resize(self, batch_size: int) -> None:
        pass

    def describe(self, num_steps: int) -> str:
        number = "an unknown number of steps" if self.num_steps is None else counted(self.num_steps, "step")
        return f"batches as the loader gives them{whatever(self._without_effect)}; {number} an epoch"

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._place = epoch, 0
        elif isinstance(self._loader, DataLoader) and self.is_at_end:
            return  # taken up behind the last step: with its epoch set again, the loader would begin it anew
        for holder in (self._loader, *_samplers(self._loader)):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def steps(self) -> Iterator[tuple[list[Part], int]]:
        if isinstance(self._loader, DataLoader) and self.is_at_end:
            return
        self._order.manual_seed(derive_seed(self._seed, "order", self._epoch))
        with random_state_kept():  # what beginning, and passing by what was trained on, draws does not count
            batches = iter(self._loader)
            for _ in range(0 if self._own_state() else self._place):
                next(batches, None)
        for batch in batches:
            yield [(batch, 1)], 0

    def advance(self) -> None:
        self._place += 1

    def _own_state(self) -> dict[str, Any] | None:
        """Return where the loader itself says that it stands, if it does."""
        if not hasattr(self._loader, "state_dict") or not hasattr(self._loader, "load_state_dict"):
            return None
        try:
            return dict(self._loader.state_dict())
        except TypeError:  # a phalanx.DataLoader with a sampler of another kind
            return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch, "place": self._place, "world_size": self._world_size, "loader": self._own_state(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
        elif state["world_size"] != self._world_size:
            raise ValueError(
                f"this loader stood at batch {state['place']} of each of {state['world_size']} ranks and can't go on "
                f"with {self._world_size}: pass the dataset itself, or a phalanx.DataLoader"
            )
        self._epoch, self._place = state["epoch"], state["place"]


def is_divided(loader: Any, ranks: RankGroup) -> bool:
    """Return whether a loader gives this rank its own batches, as far as can be known; every rank asks.

    Raises:
        ValueError: On every rank: loaders that do not divide have different parts of the data, which overlap.
    """
    samplers = _samplers(loader)
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, torch_data.IterableDataset)
    is_shared = any(isinstance(sampler, torch_data.DistributedSampler) for sampler in samplers)
    is_own = is_shared or is_stream or not samplers or bool(getattr(loader, "is_own_part", False))
    return have_own_parts(None if is_own else dataset, ranks) or is_own


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader: its own, its batch sampler, and that one's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    return [sampler for sampler in samplers if sampler is not None]
