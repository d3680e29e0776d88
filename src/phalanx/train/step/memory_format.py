"""Convolutions with their channels last in memory: the layout of a model's weights and of the images in a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx import checkpoint
from phalanx._torch.nested import with_tensors
from phalanx.train.wrapper import is_sharded


def lay_out_model(model: nn.Module) -> None:
    """Put the channels of a model's weights and buffers with four dimensions last in memory, in place.

    Raises:
        ValueError: The model is wrapped already, so that its gradients may have their places.
    """
    if model is not checkpoint.unwrap(model) or is_sharded(model):
        raise ValueError(
            "Trainer: channels_last lays out the model's weights, which must come before it is wrapped: pass the model "
            "itself, or write model.to(memory_format=torch.channels_last) before you wrap it"
        )
    for tensor in (*model.parameters(), *model.buffers()):  # Module.to() would refuse one of five dimensions
        tensor.data = lay_out(tensor.data)


def lay_out_batch(batch: Any) -> Any:
    """Return a batch whose floating tensors with four dimensions have their channels last in memory."""
    return with_tensors(batch, lay_out)


def lay_out(tensor: Tensor) -> Tensor:
    """Return a floating tensor of four dimensions with its channels last in memory; any other tensor as it is."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    is_image = is_dense and tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor
