"""The tensors of a batch, however they are nested in mappings, tuples and lists."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path, such as ``batch['image'][0]`` if `path` is ``batch``."""
    if isinstance(value, Tensor):
        yield path, value
    items: Any = value.items() if isinstance(value, Mapping) else ()
    items = enumerate(value) if isinstance(value, tuple | list) else items
    for key, item in items:
        yield from tensors_in(item, f"{path}[{key!r}]")


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch, or the arguments of a model, with the tensors moved to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        moved = copy.copy(value) if isinstance(value, MutableMapping) else {}  # of the same class
        moved.update({key: to_device(item, device) for key, item in value.items()})
        return moved
    if isinstance(value, tuple | list):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def num_collated(batch: Any, num_samples: int) -> int:
    """Return how many of `num_samples` samples a collate function kept in a batch.

    That is the first dimension of the tensors, if all agree and it is smaller; else all samples count as kept.
    """
    lengths = {len(tensor) if tensor.dim() else num_samples for _, tensor in tensors_in(batch)}
    return min(lengths.pop(), num_samples) if len(lengths) == 1 else num_samples
