"""`Feed`: the source of a trainer's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import data as torch_data

from phalanx.data.random_state import random_state_kept

Collate = Callable[[list[Any]], Any]
"""Function that collates samples into a batch, as for torch's loaders."""

Part = tuple[Any, int]
"""Batch of one forward pass, and its number of samples; a batch with 0 has no weight, and only keeps ranks in step."""

Step = tuple[list[Part], int]
"""This rank's parts of a step, and the step's number of samples over all ranks; 0: unknown."""


class Feed(Protocol):
    """Steps of an epoch, from the position that `load_state_dict` has restored.

    Attributes:
        num_workers: Number of processes that load this rank's data.
        num_steps: Number of steps in an epoch; None if unknown.
        num_left: Number of steps left in this epoch; None if unknown.
        is_at_start: Whether no batch of the epoch has been trained on.
        is_at_end: Whether every batch of the epoch has been trained on; False if unknown.
    """

    num_workers: int

    @property
    def num_steps(self) -> int | None: ...
    @property
    def num_left(self) -> int | None: ...
    @property
    def is_at_start(self) -> bool: ...
    @property
    def is_at_end(self) -> bool: ...
    def steps(self) -> Iterator[Step]:
        """Yield this rank's parts of each step, and the step's number of samples over all ranks; 0: unknown."""
        ...

    def together(self, step: Step | None) -> Step | None:
        """Return the step that all ranks take, even if this rank has no part in it; None if no rank has a step.

        Every rank must call this, with None after its own last step.

        Raises:
            ValueError: On every rank: a rank has no batch with which it could take part.
        """
        ...

    def resize(self, batch_size: int) -> None:
        """Set the number of samples in a step over all ranks, if the feed makes the batches."""
        ...

    def describe(self, num_steps: int) -> str:
        """Return a line about the batches of a step, in a run of at most `num_steps`."""
        ...

    def close(self) -> None:
        """End the data-loading processes that the feed has started."""
        ...

    def begin_epoch(self, epoch: int) -> None: ...
    def advance(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def is_dataset(data: Any) -> bool:
    """Return whether `data` is a map-style dataset, torch's or another: not a loader, a stream or a list of batches."""
    if isinstance(data, torch_data.Dataset):
        return not isinstance(data, torch_data.IterableDataset)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Sequence | Mapping)


def filler(dataset: Any, keys: Any, num_workers: int, **options: Any) -> Any:
    """Return a batch with which a rank that has no batches left takes part in a step.

    The batch is always the same, so it does not depend on where a run was stopped. If worker processes load the
    dataset, a worker process loads this batch, too. Many datasets open a file at the first sample. If this process
    opened the file, workers that it forks later would share the file's position.

    Args:
        keys: Only item of the loader's sampler: the indices of a batch, or the index of a sample that is a batch.
        options: Further arguments of torch's DataLoader.
    """
    how = {"batch_sampler": [keys]} if isinstance(keys, list) else {"sampler": [keys], "batch_size": None}
    workers = min(1, num_workers)
    with random_state_kept():
        [batch] = torch_data.DataLoader(dataset, num_workers=workers, generator=torch.Generator(), **how, **options)
    return batch


def whatever(settings: Sequence[str]) -> str:
    """Return a phrase about settings that have no effect on a feed; "" if there are none."""
    return f", whatever {', '.join(settings)} says" if settings else ""
