"""`Feed`: the source of a trainer's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils import data as torch_data

Collate = Callable[[list[Any]], Any]
"""Function that makes a batch of samples, as torch's loaders have it."""

Part = tuple[Any, int]
"""Batch of one forward pass, and its number of samples; a batch of 0 samples only keeps the ranks together."""

Step = tuple[list[Part], int]
"""This rank's parts of a step, and its number of samples over all ranks; 0: unknown."""


class Feed(Protocol):
    """Steps of an epoch, from wherever `load_state_dict` has put it.

    Attributes:
        num_steps: Number of steps in an epoch; None if unknown.
        num_left: Number of steps that this epoch still has; None if unknown.
        is_at_start: Whether nothing of the epoch was trained on.
        is_at_end: Whether all of it was, as far as is known.
    """

    @property
    def num_steps(self) -> int | None: ...
    @property
    def num_left(self) -> int | None: ...
    @property
    def is_at_start(self) -> bool: ...
    @property
    def is_at_end(self) -> bool: ...
    def steps(self) -> Iterator[Step]:
        """Yield this rank's parts of each step, and its number of samples over all ranks; 0: unknown."""
        ...

    def together(self, step: Step | None) -> Step | None:
        """Return a step as all ranks take it, also one of which this rank has no part; None if no rank has one.

        Every rank calls it, with None once its own steps are over.

        Raises:
            ValueError: On every rank: one has no batch with which it could go along.
        """
        ...

    def resize(self, batch_size: int) -> None:
        """Set the number of samples in a step, over all ranks, if the feed makes the batches."""
        ...

    def describe(self, num_steps: int) -> str:
        """Return a line that tells what a step is made of, in a run of at most `num_steps`."""
        ...

    def close(self) -> None:
        """End the processes that load data, if they are the feed's own, once no more steps are asked for."""
        ...

    def begin_epoch(self, epoch: int) -> None: ...
    def advance(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def is_dataset(data: Any) -> bool:
    """Return whether it is a map-style dataset, torch's or any with indices; no loader, stream or list of batches."""
    if isinstance(data, torch_data.Dataset):
        return not isinstance(data, torch_data.IterableDataset)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Sequence | Mapping)


def whatever(settings: Sequence[str]) -> str:
    """Return the words for settings that change nothing about a feed; empty if there are none."""
    return f", whatever {', '.join(settings)} says" if settings else ""
