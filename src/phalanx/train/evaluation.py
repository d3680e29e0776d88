"""This rank's batches of a dataset of which each sample counts once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data as torch_data

from phalanx.train.feed import Part, leave_group


class EvaluationBatches:
    """Divides datasets among the ranks, in their order; the loader of the last one is kept.

    Args:
        batch_size: At most so many samples of this rank at a time.
        num_workers: Of the loader.
    """

    def __init__(self, batch_size: int, num_workers: int) -> None:
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._data: Any = None
        self._loader: Any = None

    def of(self, data: Any, *, are_padded: bool) -> Iterator[Part]:
        """Yield this rank's batches with their sizes.

        Args:
            are_padded: All ranks get equally many, the last maybe of size 0: for models whose forward pass is a
                collective operation.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        length, size = len(data), self._batch_size
        own = range(length * rank // world_size, length * (rank + 1) // world_size)
        if self._data is not data:
            self._data, self._loader = data, torch_data.DataLoader(
                torch_data.Subset(data, own), batch_size=size, num_workers=self._num_workers,
                persistent_workers=self._num_workers > 0, generator=torch.Generator(), worker_init_fn=leave_group,
            )  # fmt: skip
        number, batch = 0, None
        for number, batch in enumerate(self._loader, start=1):
            yield batch, min(size, len(own) - (number - 1) * size)
        largest = -(-length // world_size)  # number of samples of any rank
        for _ in range(number, -(-largest // size) if are_padded else number):
            yield batch if batch is not None else next(iter(torch_data.DataLoader(data, batch_size=1))), 0


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
