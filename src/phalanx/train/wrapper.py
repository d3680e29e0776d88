"""The wrapper that keeps a model alike on all ranks: phalanx's, torch's, or FSDP2's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from phalanx import checkpoint
from phalanx.parallel import DistributedDataParallel


def is_sharded(model: nn.Module) -> bool:
    """Return whether its weights are divided among the ranks, by FSDP2: each forward pass is a collective operation."""
    return hasattr(model, "set_requires_gradient_sync")


def wrap(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """Return the model as it trains on all ranks; one that is wrapped already stays as it is."""
    if model is not checkpoint.unwrap(model) or is_sharded(model):
        return model
    model.to(device)
    return DistributedDataParallel(model) if world_size > 1 else model


@contextlib.contextmanager
def synchronizing(model: Any, averages: bool) -> Iterator[None]:
    """Average gradients over the ranks in this backward pass, or let them add up."""
    if is_sharded(model):
        model.set_requires_gradient_sync(averages)
    with contextlib.nullcontext() if averages or not hasattr(model, "no_sync") else model.no_sync():
        yield
