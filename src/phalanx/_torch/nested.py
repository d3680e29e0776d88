"""The tensors of a batch or of a model's output, however they are nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a pair of path and tensor for each tensor in mappings, tuples, lists and dataclasses.

    Args:
        value: Tensor, or container of tensors and anything else.
        path: Name of `value`, with which every path begins; ``"batch"`` gives paths such as ``batch['image'][0]``.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{path}.{field.name}")


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch, or a model's arguments, with all tensors moved to the device, except those in dataclasses."""
    return with_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch, or a model's arguments, with `change` applied to all tensors, except those in dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value) if isinstance(value, MutableMapping) else {}  # keeps the mapping's class
        changed.update({key: with_tensors(item, change) for key, item in value.items()})
        return changed
    if isinstance(value, tuple | list):
        items = [with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def num_collated(batch: Any, num_samples: int) -> int:
    """Return how many of `num_samples` samples a collate function kept in a batch.

    The result is the tensors' first dimension if that is the same for all tensors and smaller than `num_samples`;
    otherwise it is `num_samples`.
    """
    lengths = {len(tensor) if tensor.dim() else num_samples for _, tensor in tensors_in(batch)}
    return min(lengths.pop(), num_samples) if len(lengths) == 1 else num_samples
