"""Exchange of values among the ranks of a process group; a process without a group counts as rank 0 of 1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_on_meeting: Callable[[], None] | None = None


def call_when_solo(look: Callable[[], None] | None) -> None:
    """Make a group of one rank call `look` whenever `gather` or `largest_of_each` would otherwise meet other ranks.

    `look` may raise an exception.
    """
    global _on_meeting
    _on_meeting = look


def _meet_nobody() -> None:
    if _on_meeting is not None:
        _on_meeting()


class RankGroup:
    """The ranks of a group. Every rank calls the same methods in the same order.

    Args:
        group: Process group; None for the default group, if there is one.

    Attributes:
        rank: This process's rank in the group.
        world_size: Number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the tensors that the group exchanges: the CPU if a backend supports it, else the accelerator."""
        if self.world_size > 1 and not any(name in self._backends for name in ("phalanx", "gloo", "mpi")):
            return torch.accelerator.current_accelerator() or torch.device("cpu")
        return torch.device("cpu")

    @property
    def _backends(self) -> str:
        return str(dist.get_backend_config(self._group))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self._group)
        else:
            _meet_nobody()
        return values

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order; all tensors must have the same shape and dtype."""
        if self.world_size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor, group=self._group)
        return tensors

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the global rank `source`, on the CPU; all ranks pass tensors of its shape and dtype."""
        if self.world_size > 1:
            sent = tensor.to(self.device)
            dist.broadcast(sent, source, group=self._group)
            tensor = sent.cpu()
        return tensor

    def send(self, tensor: Tensor, destination: int) -> None:
        """Send a tensor to one global rank, which calls `receive`."""
        dist.send(tensor.to(self.device), destination, group=self._group)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor that a global rank sends, on the CPU, with the shape and dtype of `tensor`."""
        came = tensor.to(self.device)
        dist.recv(came, source, group=self._group)
        return came.cpu()

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order; all ranks must pass the same count of numbers."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return [row.tolist() for row in self.gather_tensor(own)]

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        return self.largest_of_each([number])[0]

    def largest_of_each(self, numbers: Sequence[int]) -> list[int]:
        """Return, for each position, the largest of all ranks' numbers, which must fit into 64 bits."""
        if self.world_size == 1:
            _meet_nobody()
            return [int(number) for number in numbers]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def barrier(self, timeout_s: float) -> None:
        """Return once every rank has called this; return at once if the group uses neither Gloo nor phalanx.

        Raises:
            RuntimeError: Some ranks did not call this within the timeout; the message names them.
        """
        if self.world_size == 1 or not any(name in self._backends for name in ("phalanx", "gloo")):
            return
        group: Any = self._group or dist.group.WORLD
        # Only Gloo and phalanx have this method. dist.monitored_barrier would reject a group of Gloo and NCCL before
        # torch 2.14.
        group.monitored_barrier(timedelta(seconds=timeout_s), True)


def group_or_world(process_group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return the given group, else the default group.

    Raises:
        ValueError: There is no process group yet.
    """
    group = process_group or dist.group.WORLD
    if group is None:
        raise ValueError(
            f"{caller}: there is no process group yet; call phalanx.init() or "
            'torch.distributed.init_process_group("phalanx") first'
        )
    return group


def group_with_this_rank(process_group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return the given group, else the default group.

    Raises:
        ValueError: There is no process group yet, or this rank is not in it.
    """
    group = group_or_world(process_group, caller)
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()}: {caller}: this rank is not in the group")
    return group
