"""Tensors as ranges of memory: flat views of them, and views of flat buffers in their shape."""

from __future__ import annotations

from torch import Tensor

from phalanx._tensors import is_one_range


def flat(tensor: Tensor) -> Tensor:
    """View the elements of a dense tensor in the order of their memory, shape ``(tensor.numel(),)``."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shaped(buffer: Tensor, like: Tensor) -> Tensor:
    """View ``like.numel()`` contiguous elements in the shape of `like` and, if that is dense, its memory layout."""
    if is_one_range(like):
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset())
    return buffer.view(like.shape)
