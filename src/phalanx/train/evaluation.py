"""A model over data of which each sample counts once, divided among the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import data as torch_data

from phalanx import checkpoint
from phalanx.data.place import share
from phalanx.train.feed import Part, leave_group, to_device
from phalanx.train.objective import Objective
from phalanx.train.ranks import Ranks
from phalanx.train.wrapper import is_sharded


class Evaluator:
    """Evaluates a model, in evaluation mode, without gradients; the loader of the last data is kept.

    Args:
        model: As it trains.
        objective: Whose values are wanted.
        device: The model's.
        batch_size: At most so many samples of this rank at a time.
        num_workers: Of the loader.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        ranks: Ranks,
        device: torch.device,
        batch_size: int,
        num_workers: int,
    ) -> None:
        self._model = model
        # Without averaging, since ranks may have different numbers of batches; where that can't be, they are padded.
        self._is_padded = is_sharded(model)
        self._evaluated = model if self._is_padded else checkpoint.unwrap(model)
        self._objective = objective
        self._ranks = ranks
        self._device = device
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._data: Any = None
        self._loader: Any = None

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the means of the objective's values over all samples, the same on every rank."""
        sums = dict.fromkeys(self._objective.names, 0.0)
        with _evaluating(self._model):
            for batch, size in self._batches(data):
                values = self._objective.values_of(self._evaluated, batch)
                if size:
                    for name, value in values.items():
                        sums[name] += float(value.double().mean()) * size
        totals = zip(*self._ranks.gather_numbers([*sums.values()]), strict=True)
        return {name: sum(of_ranks) / len(data) for name, of_ranks in zip(sums, totals, strict=True)}

    def predict(self, data: Any) -> Tensor:
        """Return the outputs for all samples, in their order, on the CPU of every rank."""
        outputs = []
        with _evaluating(self._model):
            for batch, size in self._batches(data):
                inputs = batch[0] if isinstance(batch, tuple | list) else batch
                outputs.append(self._evaluated(inputs)[:size].cpu())
        every = self._ranks.gather(torch.cat(outputs) if outputs else None)
        return torch.cat([part for part in every if part is not None])

    def _batches(self, data: Any) -> Iterator[Part]:
        """Yield this rank's batches; all ranks get equally many if they must, the last maybe of size 0."""
        self._ranks.refuse_different(data)
        length, size, world_size = len(data), self._batch_size, self._ranks.world_size
        own = share(length, self._ranks.rank, world_size)
        if self._data is not data:
            self._data, self._loader = data, torch_data.DataLoader(
                torch_data.Subset(data, own), batch_size=size, num_workers=self._num_workers,
                persistent_workers=self._num_workers > 0, generator=torch.Generator(), worker_init_fn=leave_group,
            )  # fmt: skip
        starts = range(0, len(own), size)
        batch = None
        for first, loaded in zip(starts, self._loader, strict=True):
            batch = to_device(loaded, self._device)
            yield batch, min(size, len(own) - first)
        if self._is_padded:
            largest = -(-length // world_size)  # number of samples of any rank
            for _ in range(len(starts), len(range(0, largest, size))):
                if batch is None:
                    batch = to_device(next(iter(torch_data.DataLoader(data, batch_size=1))), self._device)
                yield batch, 0


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
