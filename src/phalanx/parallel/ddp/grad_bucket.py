"""The argument of a communication hook, `GradBucket`, and checks of the hook's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

CommHook: TypeAlias = Callable[[Any, Any], torch.futures.Future[Any]]
"""Communication hook, called as ``hook(state, bucket)``."""
_WHERE = "DistributedDataParallel"
_RIGHT = "right: a torch.futures.Future of the averaged bucket.buffer(), with as many elements"


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


def tensor_of(future: torch.futures.Future[Any], buffer: Tensor) -> Tensor:
    """Wait for a hook's future, and return its tensor (or the tensor in its one-element list), in the buffer's shape.

    Raises:
        TypeError: The future holds no tensor.
        ValueError: The tensor and the buffer differ in their number of elements.
    """
    value = future.wait()
    tensor = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{_WHERE}: the future of the communication hook holds {_described(tensor)}; {_RIGHT}")
    if tensor.is_sparse or buffer.is_sparse:
        fits = tensor.is_sparse == buffer.is_sparse and tensor.shape == buffer.shape
    else:
        fits = tensor.numel() == buffer.numel()
    if not fits:
        raise ValueError(
            f"{_WHERE}: the communication hook made {_described(tensor)} of a buffer of shape {list(buffer.shape)}; "
            f"{_RIGHT}"
        )
    return tensor if tensor.is_sparse else tensor.view_as(buffer)


def checked_future(returned: Any) -> torch.futures.Future[Any]:
    """Return the result of a hook, which must be a future.

    Raises:
        TypeError: The result is not a future.
    """
    if not callable(getattr(returned, "wait", None)):  # futures from C++ have another class
        raise TypeError(f"{_WHERE}: the communication hook returned {_described(returned)}; {_RIGHT}")
    return returned


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {'sparse ' * value.is_sparse}tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
