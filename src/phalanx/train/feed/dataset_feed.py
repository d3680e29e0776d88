"""`DatasetFeed`: divides a dataset into global batches, and each global batch among the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._text import counted
from phalanx.data.batches import GivenBatches, GlobalBatches
from phalanx.data.replica import rank_and_size
from phalanx.data.seeds import derive_seed, seed_process
from phalanx.train.feed.feed import Collate, Step, filler, whatever


class DatasetFeed:
    """Divides a dataset into global batches, and each global batch among the ranks."""

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batches: GlobalBatches,
        num_workers: int,
        seed: int,
        *,
        collate_fn: Collate | None = None,
        seeds_samples: bool = False,
        without_effect: Sequence[str] = (),
    ) -> None:
        self._dataset = dataset
        self._batches = batches
        self._seed = seed
        self._without_effect = without_effect
        self.num_workers = num_workers
        self._filler: Any = None
        self._collate = collate_fn or torch_data.default_collate
        self._generator = torch.Generator()  # so that the loader draws nothing from the script's generators
        is_seeded = seeds_samples or num_workers > 0
        self._loader: Iterable[Any] = torch_data.DataLoader(
            _SeededSamples(dataset, seed) if is_seeded else dataset,
            batch_sampler=_FilledParts(batches, with_epoch=is_seeded),
            num_workers=num_workers,
            collate_fn=self._collate,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=self._generator,
        )

    @property
    def num_steps(self) -> int:
        return len(self._batches)

    @property
    def num_left(self) -> int:
        return self._batches.num_left

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
                f"{counted(self.num_steps, 'step')} an epoch, with the global batches that the batch sampler makes"
                f"{whatever(self._without_effect)}; {num_steps:,} in all"
            )
        size, passes, world_size = self._batches.batch_size, self._batches.parts_of_a_batch, rank_and_size()[1]
        return (
            f"global batch {size} = {counted(world_size, 'rank')} x {counted(passes, 'pass')} x "
            f"{size / world_size / passes:g}; {counted(self._batches.length, 'sample')}, "
            f"{counted(self.num_steps, 'step')} an epoch, {num_steps:,} in all"
        )

    def close(self) -> None:
        self._loader = ()

    def begin_epoch(self, epoch: int) -> None:
        if epoch != self._batches.epoch:
            self._batches.epoch, self._batches.place = epoch, 0

    def together(self, step: Step | None) -> Step | None:
        return step  # never None: every rank has a part of each step, maybe an empty part

    def steps(self) -> Iterator[Step]:
        self._generator.manual_seed(derive_seed(self._seed, "workers", self._batches.epoch))
        filled = iter(self._loader)
        for num_samples, sizes in self._batches.sizes():
            parts = [(next(filled) if size else self._fill(), size) for size in sizes]
            yield parts, num_samples
            del parts

    def _fill(self) -> Any:
        """Return a batch for a part without samples; it has no weight in the step."""
        if self._filler is None:
            self._filler = filler(self._dataset, [0], self.num_workers, collate_fn=self._collate)
        return self._filler

    def advance(self) -> None:
        """Count one more batch that all ranks have trained on."""
        self._batches.advance()

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)


class _FilledParts:
    """A batch sampler that yields the non-empty parts; if samples are seeded, it pairs each index with the epoch."""

    def __init__(self, batches: GlobalBatches, *, with_epoch: bool) -> None:
        self._batches = batches
        self._with_epoch = with_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self._batches.epoch
        for part in filter(None, itertools.chain.from_iterable(self._batches)):
            yield [(epoch, index) for index in part] if self._with_epoch else part


class _SeededSamples(torch_data.Dataset[Any]):
    """Dataset that seeds each sample's random numbers by epoch and index, so they do not depend on earlier samples."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_process(derive_seed(self._seed, "sample", epoch, index))
        return self._dataset[index]
