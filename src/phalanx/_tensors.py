"""What a tensor is made of: whether its elements lie in memory, and whether its storage holds them.

Dense memory is that of a CPU tensor whose storage holds all of its elements. A tensor that is something else (a
DTensor, a FakeTensor, one of torch.func) has no address that means anything: torch's dispatcher must unwrap it first.
The dispatch keys tell the two apart in one look, whatever the tensor's class.
"""

from __future__ import annotations

import torch

from phalanx import _torch
from phalanx._torch import dispatch_keys

# What dense CPU tensors have; all else means that someone must be asked before the memory is touched.
_DENSE_KEYS = frozenset(
    {"CPU", "QuantizedCPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU", "Conjugate", "Negative"}
)
_are_dense: dict[int, bool] = {}  # by the bits of the keys
_OWN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


class Overridden(TypeError):
    """The tensor is dense, but its class answers in torch's place unless `DisableTorchFunctionSubclass` is active."""


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements lie in memory, if its storage holds them: strided, conjugated, negated."""
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
    """True if the storage of a dense tensor holds all of its elements; it may be resized under its tensors."""
    end = tensor.storage_offset() * tensor.itemsize + span_bytes(tensor)
    return bool(tensor.untyped_storage().nbytes() >= end) or tensor.numel() == 0


def is_one_range(tensor: torch.Tensor) -> bool:
    """True if the elements of a strided tensor fill one range of memory, each its own place, in whatever order."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def is_expanded(tensor: torch.Tensor) -> bool:
    """True if a place in memory stands for several elements of a strided tensor, as ``expand`` makes them."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last, in memory."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(steps + 1) * tensor.itemsize
