"""Puts a model into the wrapper that keeps it the same on all ranks; finds out whether a model is wrapped."""

from __future__ import annotations

import torch
from torch import nn

from phalanx import checkpoint
from phalanx.parallel import DistributedDataParallel


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model, so that each forward pass is a collective operation."""
    return hasattr(model, "set_requires_gradient_sync")


def can_wrap(model: nn.Module) -> bool:
    """Return whether the model has no wrapper of the script's, so that `wrap` can make one again for another group."""
    return model is checkpoint.unwrap(model) and not is_sharded(model)


def leave_wrapper(model: nn.Module) -> None:
    """Permanently remove the wrapper that `wrap` has put around a model."""
    if isinstance(model, DistributedDataParallel):
        model.remove_hooks()


def wrap(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """Return the model in its wrapper; a model that is wrapped already stays as it is."""
    if not can_wrap(model):
        return model
    model.to(device)
    return DistributedDataParallel(model) if world_size > 1 else model
