"""Helpers of the behaviours of DistributedDataParallel: a model, its batches, and the result in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from tests.parallel._behaviours import Behaviour

BEHAVIOURS: list[Behaviour] = []
OF_SEVERAL: list[Behaviour] = []


def behaviour(function: Behaviour) -> Behaviour:
    """Have the ranks of all setups of `test_ddp` run this; a test of the same name looks at the outcome."""
    BEHAVIOURS.append(function)
    return function


def behaviour_of_several(function: Behaviour) -> Behaviour:
    """One that has no meaning for a rank alone."""
    OF_SEVERAL.append(function)
    return behaviour(function)


class Net(nn.Module):
    """Two layers, a third on request, and one that nobody uses if `spare`."""

    def __init__(self, *, spare: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.last = nn.Linear(7, 3)
        self.more = nn.Linear(3, 3)
        if spare:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, more: bool = True) -> torch.Tensor:
        x = self.last(torch.tanh(self.norm(self.first(x))))
        return self.more(x) if more else x


def wrap(module: nn.Module, **options: Any) -> phalanx.DistributedDataParallel:
    """With buckets so small that Gloo reduces most of them while backward runs."""
    return phalanx.DistributedDataParallel(module, bucket_cap_mb=1e-4, **options)


def batch(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * number + rank))


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def mean_grads(world_size: int, *numbers: int, **options: Any) -> dict[str, torch.Tensor | None]:
    """Return what one process makes of the batches of all ranks."""
    module = Net(**{name: options.pop(name) for name in ("spare", "norm") if name in options})
    for number in numbers:
        for rank in range(world_size):
            (module(batch(rank, number), **options).square().sum() / world_size).backward()
    return grads_of(module)


def assert_grads(module: nn.Module, want: dict[str, torch.Tensor | None]) -> None:
    got = grads_of(module)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(
                got[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


def assert_same_on_all_ranks(*tensors: torch.Tensor) -> None:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(other, flat) for other in every)


def train_step(model: nn.Module, rank: int, number: int = 0, **options: Any) -> None:
    model.zero_grad()
    model(batch(rank, number), **options).square().sum().backward()
