"""`LoaderFeed`: takes the batches of this rank's own loader as they are.

Before each step, the ranks tell each other how many samples their batches have. The weight of a batch is its number of
samples, an epoch is as long as the longest loader, and a rank that has run out of batches takes part with a batch that
weighs nothing. The numbers that a loader draws (its base seed, the order of a shuffling sampler) come from a generator
that the feed seeds by the epoch, unless the script gives the loader a generator. So a resumed run draws exactly the
same numbers as an uninterrupted run. Unlike in `dataset_feed`, samples are not seeded one by one, so augmentation in a
worker depends on what the worker loaded before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._errors import warn_caller
from phalanx._text import counted
from phalanx._torch.nested import tensors_in
from phalanx.data.loader import DataLoader
from phalanx.data.parts import have_own_parts
from phalanx.data.random_state import random_state_kept
from phalanx.data.replica import rank_and_size
from phalanx.data.sampler import DistributedSampler
from phalanx.data.seeds import derive_seed
from phalanx.data.shards import Shard
from phalanx.train.feed.feed import Step, filler, is_dataset, whatever
from phalanx.wire.rank_group import RankGroup

_UNKNOWN, _NONE, _NO_FILLER = -1, -2, -3  # values that stand in place of a batch's number of samples


class LoaderFeed:
    """Takes the batches of this rank's loader as they are, one per step; an epoch is as long as the longest loader.

    Each rank's batch weighs as many samples as it holds. A rank that has no batches left takes part with a batch that
    weighs nothing. If the tensors do not show the number of samples, all batches weigh the same.

    Args:
        loader: Iterable of batches, which is iterated anew in each epoch. If the loader has ``state_dict`` and
            ``load_state_dict``, it restores its position itself, on any number of ranks; otherwise, the batches that
            were already trained on are skipped.
        seed: Seed for samplers that have no generator of their own.
        ranks: All ranks of the job.
        without_effect: Names of the given settings that have no effect here.
    """

    def __init__(
        self, loader: Any, seed: int, *, ranks: RankGroup | None = None, without_effect: Sequence[str] = ()
    ) -> None:
        self._without_effect = without_effect
        self._ranks = ranks or RankGroup()
        self._world_size = rank_and_size()[1]
        self._loader = loader
        num_workers = getattr(loader, "num_workers", 0)
        self.num_workers = num_workers if isinstance(num_workers, int) else 0  # anything can be a loader
        self._seed = seed
        self._epoch = self._place = 0
        self._lengths = self._ranks.gather(_length_of(loader))
        self._filler: Any = None
        self._last: Any = None
        self._order = torch.Generator()
        drawing: Any
        for drawing in (loader, *_samplers(loader)):  # let all of these draw from the feed's generator
            if getattr(drawing, "generator", 0) is None:
                drawing.generator = self._order

    @property
    def num_steps(self) -> int | None:
        longest = max(self._lengths)
        return None if longest == sys.maxsize else longest

    @property
    def num_left(self) -> int | None:
        return None if self.num_steps is None else max(map(int, self._ranks.gather(self._num_left)))

    @property
    def _num_left(self) -> int:
        own = self._own_state() if isinstance(self._loader, DataLoader) else None
        if own is not None and self._has_passed(own):
            return 0
        if own is None or not isinstance(self._loader.sampler, DistributedSampler):
            return max(0, max(self._lengths) - self._place)
        num_samples, size = self._loader.sampler.num_after(own["place"]), self._loader.batch_size or 1
        return int(num_samples // size if self._loader.drop_last else -(-num_samples // size))

    @property
    def is_at_start(self) -> bool:
        return self._place == 0

    @property
    def is_at_end(self) -> bool:
        own = self._own_state() if isinstance(self._loader, DataLoader) else None
        if own is not None:  # the loader knows its position, even if another number of ranks took the first steps
            return self._has_passed(own)
        self._lengths = self._ranks.gather(_length_of(self._loader))  # may differ between epochs
        return self.num_steps is not None and self._place >= self.num_steps

    def _has_passed(self, own: Mapping[str, Any]) -> bool:
        """Return whether a phalanx.DataLoader, by its own state, has yielded its last batch of this epoch."""
        return self._place > 0 and own["epoch"] > self._epoch

    def resize(self, batch_size: int) -> None:
        pass

    def describe(self, num_steps: int) -> str:
        number = "an unknown number of steps" if self.num_steps is None else counted(self.num_steps, "step")
        shortest, longest = min(self._lengths), max(self._lengths)
        differ = (
            f"; ranks have {shortest:,} to {longest:,}, and every sample counts alike" if shortest < longest else ""
        )
        return f"batches as the loader gives them{whatever(self._without_effect)}; {number} an epoch{differ}"

    def close(self) -> None:
        """Do nothing: the loader is the user's."""

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._place = epoch, 0
        elif isinstance(self._loader, DataLoader) and self.is_at_end:
            return  # the loader was restored after its last step; setting its epoch again would repeat the epoch
        for holder in (self._loader, *_samplers(self._loader)):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def steps(self) -> Iterator[Step]:
        if isinstance(self._loader, DataLoader) and self.is_at_end:
            return
        self._order.manual_seed(derive_seed(self._seed, "order", self._epoch))
        num_passed = 0 if self._own_state() else self._place
        with random_state_kept():  # numbers drawn while starting and skipping must not change later ones
            batches = iter(self._loader)
            for _ in range(num_passed):
                self._keep(next(batches, None))
        number = num_passed
        for batch in batches:
            number += 1
            self._keep(batch)
            yield [(batch, self._size_of(batch))], 0
        length = _length_of(self._loader)
        if self._own_state() is None and number < length < sys.maxsize:
            warn_caller(
                f"Trainer: the loader has a length of {length:,} and gave {number:,} batches in epoch "
                f"{self._epoch + 1}: correct its __len__, by which steps are counted"
            )

    def together(self, step: Step | None) -> Step | None:
        if step is None:
            own = _NONE if self._world_size == 1 or self._fill() is not None else _NO_FILLER
        else:
            own = step[0][0][1]
        sizes = [int(size) for [size] in self._ranks.gather_numbers([own])]
        if all(size <= _NONE for size in sizes):
            self._filler = self._last = None
            return None
        if _NO_FILLER in sizes:
            raise ValueError(
                f"Trainer: rank {sizes.index(_NO_FILLER)} has no batch in epoch {self._epoch + 1}, and other ranks "
                "have some: give every rank at least one batch, or pass the dataset itself"
            )
        if _UNKNOWN in sizes or not any(size > 0 for size in sizes):
            has_all = _NONE not in sizes
            sizes = [int(size > _NONE) for size in sizes]
            num_samples = 0 if has_all else sum(sizes)
        else:
            sizes = [max(size, 0) for size in sizes]
            num_samples = sum(sizes)
        batch = self._fill() if step is None else step[0][0][0]
        return [(batch, sizes[self._ranks.rank])], num_samples

    def _size_of(self, batch: Any) -> int:
        """Return the number of samples in a batch if all its tensors agree on it, else `_UNKNOWN`."""
        is_loader = isinstance(self._loader, torch_data.DataLoader)
        lengths = {len(tensor) for _, tensor in tensors_in(batch) if tensor.dim()}
        if len(lengths) != 1 or (is_loader and self._loader.batch_sampler is None):
            return _UNKNOWN
        [length] = lengths
        most = self._loader.batch_size if is_loader else None
        return _UNKNOWN if most is not None and length > most else length

    def _keep(self, batch: Any) -> None:
        """Keep a batch for passes in which only other ranks have batches left, if no substitute can be made."""
        if self._world_size > 1 and not self._can_make_filler:
            self._last = batch

    @property
    def _can_make_filler(self) -> bool:
        loader = self._loader
        return (
            isinstance(loader, torch_data.DataLoader)
            and loader.batch_sampler is not None
            and is_dataset(loader.dataset)
        )

    def _fill(self) -> Any:
        """Return a batch of weight 0, with which this rank takes part in a step; None if there is none."""
        if self._filler is None and self._can_make_filler:
            loader = self._loader
            self._filler = filler(
                loader.dataset, [0, 0], loader.num_workers, collate_fn=loader.collate_fn,  # BatchNorm needs two samples
                worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
            )  # fmt: skip
        return self._last if self._filler is None else self._filler

    def advance(self) -> None:
        self._place += 1

    def _own_state(self) -> dict[str, Any] | None:
        """Return the loader's own position, if it has one."""
        if not hasattr(self._loader, "state_dict") or not hasattr(self._loader, "load_state_dict"):
            return None
        try:
            return dict(self._loader.state_dict())
        except TypeError:  # a phalanx.DataLoader whose sampler keeps no position
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
                f"this loader was at batch {state['place']} of each of {state['world_size']} ranks and can't resume "
                f"on {self._world_size}: pass the dataset itself, or a phalanx.DataLoader"
            )
        self._epoch, self._place = state["epoch"], state["place"]


def _length_of(loader: Any) -> int:
    """Return the number of a loader's batches, or `sys.maxsize` if the loader has no length."""
    if isinstance(getattr(loader, "dataset", None), Shard):
        return sys.maxsize  # of an epoch that other ranks began, nobody knows how many batches are left
    try:
        return len(loader)
    except TypeError:  # a stream
        return sys.maxsize


def is_divided(loader: Any, ranks: RankGroup) -> bool:
    """Return whether a loader yields this rank's own batches, as far as can be known; every rank must call this.

    Raises:
        ValueError: On every rank: loaders that do not divide the data hold different parts of the data, and the parts
            overlap.
    """
    samplers = _samplers(loader)
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, torch_data.IterableDataset)
    is_shared = any(isinstance(sampler, torch_data.DistributedSampler) for sampler in samplers)
    is_own = is_shared or is_stream or not samplers or bool(getattr(loader, "is_own_part", False))
    return have_own_parts(None if is_own else dataset, ranks) or is_own


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader: its sampler, its batch sampler, and the latter's sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    return [sampler for sampler in samplers if sampler is not None]
