"""Lists the state of a model that must be equal on all ranks: parameters, buffers, the optimizer's state, by name."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx import _torch
from phalanx._torch.nested import tensors_in
from phalanx.checkpoint import unwrap

Owner = Callable[[nn.Parameter], bool]


class Entry(NamedTuple):
    """A tensor that must be the same on all ranks.

    Attributes:
        name: Name in messages, such as ``parameter '0.weight'``.
        fetch: Function that returns the current tensor, or None if it no longer exists.
    """

    name: str
    fetch: Callable[[], Tensor | None]


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has its elements in one storage: it is no DTensor, and not quantized, sparse or meta."""
    is_own_class = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_own_class and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def ignored_by_ddp(model: nn.Module) -> set[str]:
    """Return the names that the model tells DistributedDataParallel to ignore, because they differ between ranks."""
    return set(getattr(unwrap(model), _torch.MARK_IGNORED_BY_DDP, ()))


def parameters(model: nn.Module) -> Iterator[Entry]:
    """Yield the parameters, trained or frozen."""
    ignored = ignored_by_ddp(model)
    for name, parameter in unwrap(model).named_parameters():
        if name not in ignored and not is_lazy(parameter):
            yield Entry(f"parameter {name!r}", lambda p=parameter: p)  # type: ignore[misc]


def buffers(model: nn.Module) -> Iterator[Entry]:
    """Yield the buffers of the model's ``state_dict`` that do not depend on the batches that this rank has seen."""
    module, ignored = unwrap(model), ignored_by_ddp(model)
    saved = module.state_dict(keep_vars=True).keys()
    own = {
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        if hasattr(child, "track_running_stats") and "SyncBatchNorm" not in type(child).__name__
        for name, _ in child.named_buffers(recurse=False)
    }
    for name, buffer in module.named_buffers():
        if name in saved and name not in own | ignored and not is_lazy(buffer):
            yield Entry(f"buffer {name!r}", lambda b=buffer: b)  # type: ignore[misc]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, leaves_out: Owner) -> Iterator[Entry]:
    """Yield the learning rates, and the optimizer's state of each parameter, unless that state is divided among ranks.

    Args:
        leaves_out: Function that returns whether the state of a parameter is divided among the ranks.
    """
    for number, group in enumerate(optimizer.param_groups):
        yield Entry(f"lr of parameter group {number}", lambda g=group: _as_tensor(g.get("lr")))  # type: ignore[misc]
    if hasattr(optimizer, "consolidate_state_dict"):  # a ZeroRedundancyOptimizer: its state is divided
        return
    ignored, names = ignored_by_ddp(model), {p: name for name, p in unwrap(model).named_parameters()}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(every):
        name = names.get(parameter)
        if name in ignored or leaves_out(parameter):
            continue
        owner = f"parameter {name!r}" if name else _unnamed(number)
        for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            for path in _tensors_of(key, value):
                yield Entry(f"{path} of {owner}", _fetcher(optimizer, parameter, key, path))


def _fetcher(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: Any, path: str
) -> Callable[[], Tensor | None]:
    """Return a function that looks up the tensor at each call: loading a state dictionary replaces the tensors."""
    return lambda: _tensors_of(key, optimizer.state.get(parameter, {}).get(key)).get(path)


def _tensors_of(key: Any, value: Any) -> dict[str, Tensor]:
    """Return the tensors in a value of an optimizer's state, by path; a number becomes a tensor.

    For example, L-BFGS has a tensor at ``old_dirs[0]``.
    """
    number = _as_tensor(value)
    return dict(tensors_in(value if number is None else number, str(key)))


def other_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Entry]:
    """Yield the parameters that the optimizer has but the model lacks, such as those of a loss."""
    of_model = set(unwrap(model).parameters())
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in of_model and not is_lazy(parameter):
            yield Entry(_unnamed(number), lambda p=parameter: p)  # type: ignore[misc]


def _unnamed(number: int) -> str:
    return f"the optimizer's parameter {number}"


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return torch.tensor(float(value), dtype=torch.float64) if is_number else None
