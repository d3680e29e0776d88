"""What a communication hook is given, a `GradBucket`, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

CommHook: TypeAlias = Callable[[Any, Any], torch.futures.Future[Any]]
"""Communication hook, called as ``hook(state, bucket)``."""


class GradBucket:
    """Bucket of gradients for a communication hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(
        self, index: int, buffer: Tensor, gradients: list[Tensor], parameters: list[nn.Parameter], is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """Return the position of the bucket in the order of reduction."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, in one tensor of shape ``(num_elems,)``."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the tensor that `buffer` returns."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer with the shapes of the parameters."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this bucket is the last to be reduced."""
        return self._is_last


def tensor_of(future: torch.futures.Future[Any]) -> Tensor:
    """Wait for a hook's future, and return the tensor that it holds, by itself or in a list."""
    value = future.wait()
    return value[0] if isinstance(value, list | tuple) else value
