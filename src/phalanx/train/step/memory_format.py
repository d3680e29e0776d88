"""Channels-last memory format, for a model's weights and for the images in a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx import checkpoint
from phalanx._torch.nested import with_tensors
from phalanx.train.wrapper import is_sharded


def lay_out_model(model: nn.Module) -> None:
    """Convert a model's weights and buffers with four dimensions to channels-last, in place.

    Raises:
        ValueError: The model is wrapped already, so its gradients may already be laid out.
    """
    if model is not checkpoint.unwrap(model) or is_sharded(model):
        raise ValueError(
            "Trainer: channels_last lays out the model's weights, which must come before it is wrapped: pass the model "
            "itself, or write model.to(memory_format=torch.channels_last) before you wrap it"
        )
    for tensor in (*model.parameters(), *model.buffers()):  # Module.to() would refuse a tensor of five dimensions
        tensor.data = lay_out(tensor.data)


def lay_out_batch(batch: Any) -> Any:
    """Return a batch with its floating-point tensors of four dimensions in channels-last format."""
    return with_tensors(batch, lay_out)


def lay_out(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor of four dimensions in channels-last format; any other tensor as it is."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    is_image = is_dense and tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor
