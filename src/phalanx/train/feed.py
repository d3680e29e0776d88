"""Where a trainer's batches come from: a dataset that is divided here, or a loader that the user has divided."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from phalanx._rank_group import RankGroup
from phalanx._text import counted
from phalanx.data.batches import GivenBatches, GlobalBatches
from phalanx.data.loader import DataLoader
from phalanx.data.parts import have_own_parts, refuse_different
from phalanx.data.random_state import RandomState
from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed, seed_process
from phalanx.train.settings import Settings

Collate = Callable[[list[Any]], Any]
"""Makes a batch out of samples, as torch's loaders have it."""

Part = tuple[Any, int]
"""What one forward pass takes, and how many samples of this rank are in it; with 0 it only keeps ranks together."""


class Feed(Protocol):
    """Steps of an epoch, from wherever `load_state_dict` has put it.

    Attributes:
        num_steps: Number of steps in an epoch; None if unknown.
        is_at_start: Nothing of the epoch was trained on.
        is_at_end: All of it was, as far as is known.
        may_differ: Ranks may have different numbers of steps.
    """

    may_differ: bool

    @property
    def num_steps(self) -> int | None: ...
    @property
    def is_at_start(self) -> bool: ...
    @property
    def is_at_end(self) -> bool: ...
    def steps(self) -> Iterator[tuple[list[Part], int]]:
        """Yield for each step this rank's parts, and the samples of all ranks in it; 0 where only ranks know."""
        ...

    def resize(self, batch_size: int) -> None:
        """Make steps of so many samples of all ranks, where that is for the feed to choose."""
        ...

    def describe(self, num_steps: int) -> str:
        """Return in a line what a step is made of; there are `num_steps` at most."""
        ...

    def begin_epoch(self, epoch: int) -> None: ...
    def advance(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def open_feed(
    data: Any,
    settings: Settings,
    batch_size: int,
    ranks: RankGroup,
    *,
    given: Collection[str] = (),
    collate_fn: Collate | None = None,
    batch_sampler: Iterable[Iterable[int]] | None = None,
) -> Feed:
    """Return the feed of a map-style dataset, or of a loader.

    Args:
        batch_size: Samples of all ranks together, if it is a dataset.
        given: Names of the settings that the script has given.
        collate_fn: Makes a batch of a dataset's samples.
        batch_sampler: Makes the batches of all ranks together, instead of `batch_size`.

    Raises:
        ValueError: `data` does not go with the settings, or with the number of ranks.
    """
    s, world_size = settings, rank_and_size()[1]
    if not is_dataset(data):
        if s.deterministic:
            raise ValueError('Trainer: deterministic="world" divides the data itself: pass fit() a dataset')
        if s.micro_batch_size is not None:
            raise ValueError("Trainer: micro_batch_size divides a dataset's batches; a loader has its own")
        if collate_fn is not None:
            raise ValueError("Trainer: collate_fn makes batches of a dataset; a loader has its own: pass it there")
        if batch_sampler is not None:
            raise ValueError("Trainer: batch_sampler divides a dataset; a loader has its own: pass it there")
        if world_size > 1 and not is_divided(data, ranks):
            raise ValueError(
                "Trainer: this loader gives the same samples to every rank: pass the dataset itself, or a "
                "phalanx.DataLoader, or one with sampler=phalanx.DistributedSampler(dataset). If its batch sampler "
                "divides them: phalanx.DataLoader(dataset, batch_sampler=batch_sampler, is_own_part=True)"
            )
        return LoaderFeed(data, s.seed, without_effect=_without_effect(data, s, ranks, given))
    refuse_different(data, ranks)
    length = len(data)
    if length < world_size:
        raise ValueError(
            f"Trainer: the dataset has {counted(length, 'sample')}, fewer than the {world_size} ranks, each of which "
            "needs at least one: train on fewer ranks or on more samples"
        )
    num_parts = s.virtual_shards if s.deterministic else None
    sizes: dict[str, Any] = {"micro_batch_size": s.micro_batch_size, "num_parts": num_parts, "seed": s.seed}
    if batch_sampler is None:
        batches = GlobalBatches(length, batch_size, drop_last=s.drop_last, **sizes)
    else:
        batches = _given_batches(length, batch_sampler, ranks, s, sizes)
    seeds_samples = s.deterministic is not None
    return DatasetFeed(data, batches, s.num_workers, s.seed, collate_fn=collate_fn, seeds_samples=seeds_samples)


def _without_effect(loader: Any, s: Settings, ranks: RankGroup, given: Collection[str]) -> list[str]:
    """Return the settings that divide a dataset's batches and were given although a loader's are as they are.

    Raises:
        ValueError: The loader's batches have another size than was asked for.
    """
    names = [name for name, value in (("drop_last", s.drop_last), ("on_resize", s.on_resize == "scale")) if value]
    if "global_batch_size" not in given:
        return names
    sizes = ranks.gather(getattr(loader, "batch_size", None))
    if not all(isinstance(size, int) for size in sizes):
        return ["global_batch_size", *names]
    if s.on_resize == "keep" and sum(sizes) != s.global_batch_size:
        raise ValueError(
            f"Trainer: global_batch_size={s.global_batch_size}, but a step takes the loader's batches of all ranks, "
            f"{counted(sum(sizes), 'sample')} ({counted(len(sizes), 'rank')}, batch_size={sizes[ranks.rank]}): pass "
            "the dataset itself, which is then divided as asked for, or leave global_batch_size out"
        )
    return names


def _given_batches(
    length: int, batch_sampler: Iterable[Iterable[int]], ranks: RankGroup, settings: Settings, sizes: dict[str, Any]
) -> GivenBatches:
    if settings.drop_last or settings.on_resize == "scale":
        raise ValueError("Trainer: with batch_sampler, which makes the batches, leave out drop_last and on_resize")
    if any(isinstance(s, torch_data.DistributedSampler) for s in (batch_sampler, getattr(batch_sampler, "sampler", 0))):
        raise ValueError(
            "Trainer: batch_sampler must make the batches of all ranks together, and a DistributedSampler makes those "
            "of one: fit(DataLoader(dataset, batch_sampler=batch_sampler))"
        )
    batches = GivenBatches(length, batch_sampler, **sizes)
    if len(set(ranks.gather(hashlib.blake2b(repr(batches.batches).encode()).digest()))) > 1:
        raise ValueError(
            "Trainer: batch_sampler must give the same batches on every rank, which takes its part of each"
        )
    return batches


class DatasetFeed:
    """Divides a dataset into global batches, and each of these among the ranks."""

    may_differ = False

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batches: GlobalBatches,
        num_workers: int,
        seed: int,
        *,
        collate_fn: Collate | None = None,
        seeds_samples: bool = False,
    ) -> None:
        seeds_samples = seeds_samples or num_workers > 0
        self._dataset = dataset
        self._batches = batches
        self._seed = seed
        self._filler: Any = None
        self._collate = collate_fn or torch_data.default_collate
        self._generator = torch.Generator()  # of the loader alone: resuming draws no number more than going on
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _SeededSamples(dataset, seed) if seeds_samples else dataset,
            batch_sampler=_FilledParts(batches, with_epoch=seeds_samples),
            num_workers=num_workers,
            collate_fn=collate_fn,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=self._generator,
            worker_init_fn=ignore_signals_of_rank,
        )

    @property
    def num_steps(self) -> int:
        return len(self._batches)

    @property
    def is_at_start(self) -> bool:
        return self._batches.place == 0

    @property
    def is_at_end(self) -> bool:
        return self._batches.is_at_end

    def resize(self, batch_size: int) -> None:
        self._batches.batch_size = batch_size

    def describe(self, num_steps: int) -> str:
        if isinstance(self._batches, GivenBatches):
            return (
                f"{counted(self.num_steps, 'step')} an epoch, with the global batches that the batch sampler makes; "
                f"{num_steps:,} in all"
            )
        size, passes, world_size = self._batches.batch_size, self._batches.parts_of_a_batch, rank_and_size()[1]
        return (
            f"global batch {size} = {counted(world_size, 'rank')} x {counted(passes, 'pass')} x "
            f"{size / world_size / passes:g}; {counted(self._batches.length, 'sample')}, "
            f"{counted(self.num_steps, 'step')} an epoch, {num_steps:,} in all"
        )

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._batches.epoch:
            self._batches.epoch, self._batches.place = epoch, 0

    def steps(self) -> Iterator[tuple[list[Part], int]]:
        self._generator.manual_seed(derive_seed(self._seed, "workers", self._batches.epoch))
        filled = iter(self._loader)
        for num_samples, sizes in self._batches.sizes():
            yield [(next(filled) if size else self._fill(), size) for size in sizes], num_samples

    def _fill(self) -> Any:
        """Return a batch for a part without samples, which does not count: the same wherever a run was stopped."""
        if self._filler is None:
            drawn = RandomState()
            before = drawn.state_dict()
            self._filler = self._collate([self._dataset[0]])
            drawn.load_state_dict(before)
        return self._filler

    def advance(self) -> None:
        """Note that all ranks have trained on one more batch."""
        self._batches.advance()

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)


def ignore_signals_of_rank(_: int) -> None:
    """Let a worker not hear the signals that ask its rank to make room: torch takes a worker's end for a failure."""
    os.setpgid(0, 0)


class _FilledParts:
    """The parts that are not empty, for a loader; with the epoch, where samples are seeded by it."""

    def __init__(self, batches: GlobalBatches, *, with_epoch: bool) -> None:
        self._batches = batches
        self._with_epoch = with_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self._batches.epoch
        for part in filter(None, itertools.chain.from_iterable(self._batches)):
            yield [(epoch, index) for index in part] if self._with_epoch else part


class _SeededSamples(torch_data.Dataset[Any]):
    """Each sample's augmentation depends on the sample and the epoch, on nothing before it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_process(derive_seed(self._seed, "sample", epoch, index))
        return self._dataset[index]


class LoaderFeed:
    """Takes a loader of this rank's batches as it is, each a step.

    Args:
        loader: Anything that can be iterated over again for each epoch. One with ``state_dict`` and ``load_state_dict``
            goes on by itself, on any number of ranks; of another, what was trained on is passed by.
        without_effect: Settings to say of that they change nothing here.
    """

    may_differ = True

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
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = IgnoringSignalsOfRank(loader.worker_init_fn)

    @property
    def num_steps(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:  # a stream
            return None

    @property
    def is_at_start(self) -> bool:
        return self._place == 0

    @property
    def is_at_end(self) -> bool:
        own = self._own_state() if isinstance(self._loader, DataLoader) else None
        if own is not None:  # it knows, also where another number of ranks has taken the first steps
            return bool(own["epoch"] > self._epoch)
        return self.num_steps is not None and self._place >= self.num_steps

    def resize(self, batch_size: int) -> None:
        pass

    def describe(self, num_steps: int) -> str:
        number = "an unknown number of steps" if self.num_steps is None else counted(self.num_steps, "step")
        unused = ", ".join(self._without_effect)
        return f"batches as the loader gives them{unused and f', whatever {unused} says'}; {number} an epoch"

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._place = epoch, 0
        for holder in (self._loader, *_samplers(self._loader)):
            getattr(holder, "set_epoch", _ignore)(epoch)

    def steps(self) -> Iterator[tuple[list[Part], int]]:
        self._order.manual_seed(derive_seed(self._seed, "order", self._epoch))
        drawn = RandomState()  # what beginning, and passing by what was trained on, draws does not count
        before = drawn.state_dict()
        batches = iter(self._loader)
        for _ in range(0 if self._own_state() else self._place):
            next(batches, None)
        drawn.load_state_dict(before)
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


def is_dataset(data: Any) -> bool:
    """Return whether it is a map-style dataset, torch's or any with indices; no loader, stream or list of batches."""
    if isinstance(data, torch_data.Dataset):
        return not isinstance(data, torch_data.IterableDataset)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Sequence | Mapping)


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


class IgnoringSignalsOfRank:
    """Initialises a worker as the user wants, after `ignore_signals_of_rank`; a class, so that it can be pickled."""

    def __init__(self, init: Any) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        ignore_signals_of_rank(worker_id)
        if self._init is not None:
            self._init(worker_id)


def _ignore(_: int) -> None:
    pass
