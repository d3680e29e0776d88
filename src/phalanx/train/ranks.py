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
        self.rank: int = session.rank
        self.world_size: int = session.world_size
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
        described = self.gather((len(data), _digest(_chosen(data)[0])))
        if len(set(described)) > 1:
            raise ValueError(
                "Trainer: ranks have different datasets, and it divides one that all of them have. Pass the whole "
                "dataset, or phalanx.DataLoader(part, is_own_part=True) to fit() on this rank's own; samples by rank: "
                + ", ".join(str(length) for length, _ in described)
            )

    def have_own_parts(self, data: Any) -> bool:
        """Return whether each rank has its own part of the data, told by their lengths and by the indices of subsets.

        Raises:
            ValueError: On every rank: they have different parts, with samples in common.
        """
        indices, whole = _chosen(data)
        num = len(whole) if hasattr(whole, "__len__") else 0
        described = self.gather((num, _digest(indices)))
        if len(set(described)) == 1:
            return False
        if len({length for length, _ in described}) == 1:
            every = [index for of_rank in self.gather({*indices}) for index in of_rank]
            if len(set(every)) < len(every):
                raise ValueError(
                    "Trainer: ranks have different parts of a dataset, and some samples are in several of them: was it "
                    "split with another seed on each rank? Give all ranks the same dataset, or each a part of its own; "
                    "parts that overlap on purpose: phalanx.DataLoader(part, is_own_part=True)"
                )
        return True


def _chosen(data: Any) -> tuple[list[Any], Any]:
    """Return the indices that a subset, also one of a subset, takes of a dataset, and the whole dataset."""
    if not isinstance(data, Partition | Subset):
        return [], data
    inner, whole = _chosen(data.data if isinstance(data, Partition) else data.dataset)
    indices = data.indices.tolist() if hasattr(data.indices, "tolist") else list(data.indices)
    return [inner[index] for index in indices] if inner else indices, whole


def _digest(indices: list[Any]) -> bytes:
    return hashlib.blake2b(repr(indices).encode()).digest()
