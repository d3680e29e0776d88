"""The batches that each rank evaluates: from a dataset, a loader that all ranks share, or the rank's own loader.

A dataset is divided among the ranks. If all ranks have the same torch loader, the ranks take turns at the loader's
batches: the sampler draws from a fixed seed, and the ranks compare the indices that the sampler yields. If the ranks'
loaders divide the data, each rank takes all batches of its own loader. In all these cases, the indices in each batch
are known in advance. So the size of a batch is known, too, whatever the batch looks like, unless a `collate_fn` leaves
samples out. In a stream or a list of batches, the first tensor of a batch shows the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._errors import warn_caller
from phalanx._ranges import share
from phalanx._text import counted
from phalanx._torch.nested import num_collated, tensors_in
from phalanx.data.parts import have_the_same, refuse_different
from phalanx.data.random_state import random_state_kept
from phalanx.data.seeds import seed_process
from phalanx.train.feed.feed import Collate, filler, is_dataset
from phalanx.train.feed.loader_feed import is_divided
from phalanx.wire.rank_group import RankGroup

Counted = tuple[Any, int]
"""A batch and its number of samples; 0 for padding, with which the rank only takes part in collectives."""


class Planned:
    """Batches of a map-style dataset, or of a torch loader of such a dataset, with indices that are known in advance.

    A dataset is divided among the ranks. If all ranks have the same loader, they take turns at its batches. A loader
    that yields only this rank's part is used as it is.

    Raises:
        ValueError: Ranks have different data.
    """

    def __init__(
        self, data: Any, ranks: RankGroup, batch_size: int, num_workers: int, collate_fn: Collate | None
    ) -> None:
        if isinstance(data, torch_data.DataLoader):
            self._lists = _lists_of(data, None if is_divided(data, ranks) else ranks)
            names = ("num_workers", "collate_fn", "multiprocessing_context", "worker_init_fn")
            options = {name: getattr(data, name) for name in names}
            self._is_batched = data.batch_sampler is not None
            data = data.dataset
        else:
            refuse_different(data, ranks)
            own = share(len(data), ranks.rank, ranks.world_size)
            self._lists = [[*own[first : first + batch_size]] for first in range(0, len(own), batch_size)]
            options = {"num_workers": num_workers, "collate_fn": collate_fn}
            self._is_batched = True
        self._options = options
        lists = {"batch_sampler": self._lists} if self._is_batched else {"sampler": self._lists, "batch_size": None}
        self._loader: Any = torch_data.DataLoader(
            data, **lists, **options, persistent_workers=options["num_workers"] > 0, generator=torch.Generator()
        )
        self._num_of_longest = ranks.largest(len(self._lists))

    def batches(self, pads: bool) -> Iterator[Counted]:
        """Yield this rank's batches; with `pads`, padded until all ranks have equally many."""
        batch = None
        for batch, indices in zip(self._loader, self._lists, strict=True):
            yield batch, self._num_samples(batch, indices)
        for _ in range(self._num_of_longest - len(self._lists) if pads else 0):
            if batch is None:
                batch = filler(self._loader.dataset, [0] if self._is_batched else 0, **self._options)
            yield batch, 0

    def _num_samples(self, batch: Any, indices: Any) -> int:
        if not self._is_batched:
            return count_samples(batch)
        is_default = self._loader.collate_fn is torch_data.default_collate
        return len(indices) if is_default else num_collated(batch, len(indices))


class Own:
    """Batches of a stream or another iterable that yields this rank's own batches."""

    def __init__(self, loader: Any, ranks: RankGroup) -> None:
        self._loader = loader
        self._ranks = ranks

    def batches(self, pads: bool) -> Iterator[Counted]:
        """Yield this rank's batches; with `pads`, padded until all ranks have equally many."""
        batch, loaded = None, iter(self._loader)
        following = next(loaded, None)
        while following is not None or pads:
            if pads and not self._ranks.largest(following is not None):
                return
            batch = batch if following is None else following
            if batch is None:
                raise ValueError("Trainer.evaluate: this rank's loader is empty, and the model needs every rank")
            yield batch, 0 if following is None else count_samples(batch)
            following = next(loaded, None)


def plan(data: Any, ranks: RankGroup, batch_size: int, num_workers: int, collate_fn: Collate | None) -> Planned | Own:
    """Return the batches of a dataset, or of a loader.

    Raises:
        ValueError: Ranks have different datasets, or undivided loaders that differ.
    """
    if not is_dataset(data.dataset if isinstance(data, torch_data.DataLoader) else data):
        return Own(data, ranks)
    if ranks.rank == 0:
        _warn_of_padding(getattr(data, "sampler", None))
    return Planned(data, ranks, batch_size, num_workers, collate_fn)


def _warn_of_padding(sampler: Any) -> None:
    if isinstance(sampler, torch_data.DistributedSampler) and getattr(sampler, "pad", True):
        num_twice = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if num_twice > 0:
            warn_caller(
                f"Trainer.evaluate: the loader's sampler pads, so {counted(num_twice, 'sample')} would be counted "
                "twice. Pass the dataset itself, or a loader with "
                "sampler=phalanx.DistributedSampler(dataset, shuffle=False, pad=False)"
            )


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor, however nested.

    Raises:
        ValueError: The batch has no tensor.
    """
    tensor = next((tensor for _, tensor in tensors_in(batch) if tensor.dim()), None)
    if tensor is None:
        raise ValueError(
            f"Trainer.evaluate: the number of samples in a batch, a {type(batch).__name__} without a tensor, is not "
            "known: pass the dataset and collate_fn instead of the loader"
        )
    return len(tensor)


def _lists_of(loader: Any, ranks: RankGroup | None) -> list[Any]:
    """Return the indices in each batch of a loader; if `ranks` share the loader, only for this rank's turns."""
    with random_state_kept():
        seed_process(0)  # so that a random sampler gives all ranks the same order
        lists = list(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    if ranks is None:
        return lists
    if not have_the_same(lists, ranks):
        raise ValueError(
            "Trainer.evaluate: the ranks' loaders give different batches: pass the dataset itself, or "
            "phalanx.DataLoader(part, is_own_part=True) of this rank's own"
        )
    if lists and loader.batch_sampler is not None:  # if there are fewer batches than ranks, batches are cut
        num = -(-ranks.world_size // len(lists))
        pieces = ([batch[at] for at in share(len(batch), part, num)] for batch in lists for part in range(num))
        lists = [piece for piece in pieces if piece]
    return lists[ranks.rank :: ranks.world_size]
