"""What the ranks of a run tell each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset

from phalanx.data import Partition
from phalanx.session import Session


class Ranks:
    """All ranks of the job; every rank calls the same methods in the same order. One that is alone asks nobody."""

    def __init__(self, session: Session) -> None:
        self.rank, self.world_size = session.rank, session.world_size
        on_cpu = any(name in session.backend for name in ("phalanx", "gloo", "mpi"))
        self._device = torch.device("cpu") if on_cpu else session.device
        self._number = torch.zeros((), dtype=torch.int64, device=self._device)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return each rank's numbers, in rank order."""
        if self.world_size == 1:
            return [[*numbers]]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [row.tolist() for row in self.gather_tensor(own)]

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, alike in shape and dtype, in rank order."""
        if self.world_size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def largest(self, value: int) -> int:
        """Return the largest value of any rank."""
        if self.world_size == 1:
            return value
        self._number.fill_(value)
        dist.all_reduce(self._number, dist.ReduceOp.MAX)
        return int(self._number)

    def refuse_different(self, data: Any) -> None:
        """Refuse a dataset that is to be divided among the ranks if each has another one, such as its own part already.

        Raises:
            ValueError: On every rank.
        """
        indices = data.indices if isinstance(data, (Partition, Subset)) else ()
        lengths = self.gather((len(data), hashlib.blake2b(repr(list(indices)).encode()).digest()))
        if len(set(lengths)) > 1:
            raise ValueError(
                "Trainer: ranks have different datasets, and it divides one that all of them have. Pass the whole "
                "dataset, or phalanx.DataLoader(part, is_own_part=True) to fit() on this rank's own; samples by rank: "
                + ", ".join(str(length) for length, _ in lengths)
            )
