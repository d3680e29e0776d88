"""Tensors as ranges of memory: flat views of tensors, and views of flat buffers in the shapes of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx._torch.tensors import is_one_range

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
_ALIGN_ELEMS = 64


def flat(tensor: Tensor) -> Tensor:
    """View the elements of a dense tensor in memory order, with shape ``(tensor.numel(),)``."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shaped(buffer: Tensor, like: Tensor) -> Tensor:
    """View ``like.numel()`` contiguous elements in the shape of `like` and, if `like` is dense, with its strides."""
    if is_one_range(like):
        return buffer.as_strided(like.shape, like.stride(), buffer.storage_offset())
    return buffer.view(like.shape)


def laid_out_like(like: Tensor, values: Tensor) -> Tensor:
    """Return `values`, which have the shape of `like`, in the memory layout of `like`; copy them if necessary."""
    if values.stride() == like.stride():
        return values
    return torch.empty_like(like, dtype=values.dtype).copy_(values)


def packed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of tensors of these sizes in one buffer, and the buffer's length, all in elements."""
    *begins, length = itertools.accumulate((-(-size // _ALIGN_ELEMS) * _ALIGN_ELEMS for size in sizes), initial=0)
    return begins, length


def num_reals(tensor: Tensor) -> int:
    """Return how many real numbers a tensor holds: two for each complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def views_of(buffer: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """View the consecutive parts of a flat buffer of real numbers in the shape and memory layout of each member."""
    views, begin = [], 0
    for member in members:
        part = buffer[begin : begin + num_reals(member)]
        begin += part.numel()
        views.append(shaped(torch.view_as_complex(part.view(-1, 2)) if member.is_complex() else part, member))
    return views


def by_kind(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Group tensors by dtype and device, in order: the tensors of a group fit into one buffer."""
    kinds: dict[Any, list[AnyTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
