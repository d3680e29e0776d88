"""Where a trainer's batches come from: a dataset that is divided here, or a loader that the user has divided."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils import data as torch_data

from phalanx.data.batches import GlobalBatches
from phalanx.data.random_state import RandomState
from phalanx.data.seeds import derive_seed, seed_process

Part = tuple[Any, int]
"""What one forward pass takes, and how many samples of this rank are in it; with 0 it only keeps ranks together."""


class Feed(Protocol):
    """Steps of an epoch, from wherever `load_state_dict` has put it."""

    def __len__(self) -> int: ...
    def steps(self) -> Iterator[tuple[list[Part], int]]:
        """Yield for each step this rank's parts, and the samples of all ranks in it; 0 where only ranks know."""
        ...

    def begin_epoch(self, epoch: int) -> None: ...
    def advance(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DatasetFeed:
    """Divides a dataset into global batches, and each of these among the ranks."""

    def __init__(self, dataset: torch_data.Dataset[Any], batches: GlobalBatches, num_workers: int, seed: int) -> None:
        self._batches = batches
        self._seed = seed
        self._generator = torch.Generator()  # of the loader alone: resuming draws no number more than going on
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _SeededSamples(dataset, seed) if num_workers else dataset,
            batch_sampler=_FilledParts(batches, with_epoch=num_workers > 0),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=self._generator,
            worker_init_fn=leave_group,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._batches.epoch:
            self._batches.epoch, self._batches.place = epoch, 0

    def steps(self) -> Iterator[tuple[list[Part], int]]:
        self._generator.manual_seed(derive_seed(self._seed, "workers", self._batches.epoch))
        first = self._batches.place
        filled = iter(self._loader)
        last = None
        for number, parts in enumerate(self._batches):
            step: list[Part] = []
            for part in parts:
                last = next(filled) if part else last
                step.append((last, len(part)))
            yield step, self._batches.size_at(first + number * self._batches.batch_size)

    def advance(self) -> None:
        """Note that all ranks have trained on one more batch."""
        self._batches.place += self._batches.batch_size

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)


def leave_group(_: int) -> None:
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
    """In a worker: each sample's augmentation depends on the sample and the epoch, on nothing before it."""

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
    """Takes a loader of this rank's batches as it is.

    Args:
        loader: Anything that can be iterated over again for each epoch.
        num_accumulated: Batches of a step.

    Raises:
        ValueError: Every rank would train on the same data.
    """

    def __init__(self, loader: Any, seed: int, num_accumulated: int = 1) -> None:
        sampler = getattr(loader, "sampler", None)
        is_stream = isinstance(getattr(loader, "dataset", None), torch_data.IterableDataset)
        is_divided = isinstance(sampler, torch_data.DistributedSampler) or is_stream or sampler is None
        if dist.is_initialized() and dist.get_world_size() > 1 and not is_divided:
            raise ValueError(
                "Trainer: this loader gives the same samples to every rank: pass the dataset itself, or a "
                "phalanx.DataLoader, or one with sampler=phalanx.DistributedSampler(dataset)"
            )
        self._loader = loader
        self._seed = seed
        self._num_accumulated = num_accumulated
        self._epoch = self._place = 0
        self._order = torch.Generator()
        if isinstance(sampler, torch_data.RandomSampler) and sampler.generator is None:
            sampler.generator = self._order

    def __len__(self) -> int:
        return -(-len(self._loader) // self._num_accumulated)

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._place = epoch, 0
        for holder in (self._loader, getattr(self._loader, "sampler", None)):
            getattr(holder, "set_epoch", _ignore)(epoch)

    def steps(self) -> Iterator[tuple[list[Part], int]]:
        self._order.manual_seed(derive_seed(self._seed, "order", self._epoch))
        drawn = RandomState()  # what beginning, and passing by what was trained on, draws does not count
        before = drawn.state_dict()
        batches = iter(self._loader)
        for _ in range(self._place * self._num_accumulated):
            next(batches)
        drawn.load_state_dict(before)
        while parts := list(itertools.islice(batches, self._num_accumulated)):
            yield [(part, 1) for part in parts], 0

    def advance(self) -> None:
        self._place += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]


def _ignore(_: int) -> None:
    pass
