"""Tests whether a tensor's elements lie in CPU memory, and whether its storage holds all of them.

A tensor with its elements in CPU memory is called dense here. The address of any other tensor (a DTensor, a FakeTensor,
a tensor wrapped by torch.func) is meaningless until torch's dispatcher has unwrapped the tensor. The dispatch keys show
whether a tensor is dense, whatever its class.
"""

from __future__ import annotations

import torch

from phalanx import _torch
from phalanx._torch import dispatch_keys

# The keys of dense CPU tensors. The memory of a tensor with any other key must be accessed through the dispatcher only.
_DENSE_KEYS = frozenset(
    {"CPU", "QuantizedCPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU", "Conjugate", "Negative"}
)
_are_dense: dict[int, bool] = {}  # whether a tensor is dense, by the bits of its dispatch keys
_OWN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


class Overridden(TypeError):
    """A dense tensor's class may override torch's functions, and `DisableTorchFunctionSubclass` is not active."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in CPU memory, possibly strided, conjugated or negated; see also `is_stored`."""
    raw = dispatch_keys(tensor).raw_repr()
    dense = _are_dense.get(raw)
    if dense is None:
        dense = _are_dense[raw] = _key_names(tensor) <= _DENSE_KEYS
    if dense and type(tensor) not in _OWN_TYPES and _torch.is_torch_function_enabled():
        raise Overridden
    return dense


def unusual_keys(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the tensor's dispatch keys that dense tensors do not have."""
    return _key_names(tensor) - _DENSE_KEYS


def _key_names(tensor: torch.Tensor) -> frozenset[str]:
    return frozenset(str(dispatch_keys(tensor)).removeprefix("DispatchKeySet(").removesuffix(")").split(", "))


def is_stored(tensor: torch.Tensor) -> bool:
    """Whether the storage of a dense tensor holds all of its elements; a resized storage may not."""
    end = tensor.storage_offset() * tensor.itemsize + span_bytes(tensor)
    return bool(tensor.untyped_storage().nbytes() >= end) or tensor.numel() == 0


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor: each rank holds a part of it. Does not import torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_one_range(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor fill one range of memory without overlap, in any order."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of a strided tensor share one place in memory, as after ``expand``."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(steps + 1) * tensor.itemsize
