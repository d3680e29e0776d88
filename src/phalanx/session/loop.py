"""Functions behind a `Session`'s methods for a hand-written training loop.

They gather results, let one rank go first, synchronize gradients and check precisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._errors import PhalanxError
from phalanx._text import class_and_message
from phalanx.wire.rank_group import RankGroup

_NUMBERS = "numbers"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_OTHER_NAMES = {  # maps the names of precisions in torch and in other libraries to ours
    "32": "fp32", "32-true": "fp32", "float32": "fp32", "float": "fp32", "no": "fp32", "none": "fp32",
    "bf16-mixed": "bf16", "bfloat16": "bf16",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
}  # fmt: skip
_OF_WEIGHTS = {
    "bf16-true": "bfloat16",
    "16-true": "float16",
    "64": "float64",
    "64-true": "float64",
    "float64": "float64",
}


def right_precision(given: object) -> str:
    """Return our spelling of a precision that another library names `given`; "" if the name is unknown."""
    name = str(given).lower().removeprefix("torch.")
    if name in _OF_WEIGHTS:
        return f'"fp32" and model.to(torch.{_OF_WEIGHTS[name]}), because this changes the weights too'
    return f'"{_OTHER_NAMES[name]}"' if name in _OTHER_NAMES else ""


def checked_precision(call: str, precision: str) -> str:
    """Return `precision` if it is a precision that phalanx supports.

    Raises:
        ValueError: There is no such precision; the error suggests the right call if another library uses the name.
    """
    if precision in DTYPES:
        return precision
    right = right_precision(precision)
    hint = f"; right: {call}({right})" if right in map('"{}"'.format, DTYPES) else f"; right: {right}" if right else ""
    raise ValueError(f"{call}: precision must be one of {', '.join(DTYPES)}, got {precision!r}{hint}")


@contextlib.contextmanager
def synchronizing(model: Any, averages: bool) -> Iterator[None]:
    """Let backward passes in the block average gradients over the ranks if `averages`, else only accumulate them."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(averages)
    with contextlib.nullcontext() if averages or not hasattr(model, "no_sync") else model.no_sync():
        yield


@contextlib.contextmanager
def going_first(rank: int, is_first: bool) -> Iterator[None]:
    """Run a block on the ranks with `is_first`, then on the other ranks. Every rank must call this.

    Raises:
        PhalanxError: The block raised an exception on a rank that went first. The block then does not run on the other
            ranks, which raise this error instead.
    """
    if is_first:
        try:
            yield
        except BaseException as error:
            RankGroup().gather(class_and_message(error))
            raise
    failures = RankGroup().gather("")
    if failed := [number for number, failure in enumerate(failures) if failure]:
        raise PhalanxError(
            f"rank {rank}: main_process_first: rank {failed[0]} went first and failed with "
            f"{failures[failed[0]]}{'' if is_first else '; the block did not run here'}. Fix the error on that rank",
            op="main_process_first",
            ranks=tuple(failed),
            is_victim=True,
            entry="first-rank-failed",
        )
    if not is_first:
        yield


def gather_rows(value: Any, total: int | None) -> Any:
    """Return the rows of all ranks' tensors, as `Session.gather` describes."""
    leaves: list[Any] = []
    shape = _take_apart(value, leaves)
    ranks = RankGroup()
    told = ranks.gather((shape, [_describe(leaf) for leaf in leaves], total))
    _check(told)
    gathered: list[Any] = []
    for number, leaf in enumerate(leaves):
        of_ranks = [leaves_of_rank[number] for _, leaves_of_rank, _ in told]
        if isinstance(leaf, Tensor):
            gathered.append(_gather_tensor(leaf, [rows for rows, *_ in of_ranks], total, ranks))
        else:
            gathered.append([other for (other,) in of_ranks])
    return _put_together(value, iter(gathered))


def _gather_tensor(tensor: Tensor, num_rows: Sequence[int], total: int | None, ranks: RankGroup) -> Tensor:
    rows = (tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()).to(ranks.device)
    most = max(num_rows)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = ranks.gather_tensor(padded)
    if total is None:
        joined = torch.cat([part[:num] for part, num in zip(parts, num_rows, strict=True)])
    else:  # row i of rank r is sample i * num_ranks + r of the dataset, because the sampler deals out samples in turn
        joined = torch.stack(parts, dim=1).flatten(0, 1)[:total]
    return joined.to(tensor.device)


def _check(told: Sequence[Any]) -> None:
    """Raise ValueError unless all ranks have values of the same structure, and enough rows."""
    if any(_has_numbers(shape) for shape, *_ in told):
        raise ValueError(
            "gather: a list of numbers may be samples or separate values; pass samples as a tensor, "
            "torch.tensor(numbers), and separate values as a tuple, tuple(numbers)"
        )
    kinds = [(shape, [leaf[1:] if len(leaf) > 1 else None for leaf in leaves], total) for shape, leaves, total in told]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"gather: rank 0 has {kinds[0]} and rank {rank} has {kind}; give all ranks the same structure, dtypes "
                "and shapes"
            )
    total = told[0][2]
    for number in range(len(told[0][1])) if total is not None else ():
        of_ranks = [leaves[number] for _, leaves, _ in told]
        if len(of_ranks[0]) == 1:
            continue
        num_rows = [rows for rows, *_ in of_ranks]
        least = [(total - rank + len(told) - 1) // len(told) for rank in range(len(told))]
        if total < 0 or any(num < needed for num, needed in zip(num_rows, least, strict=True)):
            raise ValueError(f"gather: total={total} needs at least {least} rows from the ranks, got {num_rows}")


def _describe(leaf: Any) -> tuple[Any, ...]:
    """Return a tensor's number of rows, its dtype and its other dimensions; return any other value in a tuple."""
    if not isinstance(leaf, Tensor):
        return (leaf,)
    return (len(leaf) if leaf.dim() else 1, str(leaf.dtype), tuple(leaf.shape[1:]))


def _take_apart(value: Any, leaves: list[Any]) -> Any:
    """Append everything that is not a container to `leaves`, and return the structure of the containers."""
    if isinstance(value, Mapping):
        return [(repr(key), _take_apart(item, leaves)) for key, item in value.items()]
    if type(value) is list and value and all(isinstance(item, int | float) for item in value):
        return _NUMBERS  # marks a list that holds only numbers, which every rank rejects
    if isinstance(value, tuple | list):
        return [_take_apart(item, leaves) for item in value]
    leaves.append(value)
    return "tensor" if isinstance(value, Tensor) else "value"


def _has_numbers(shape: Any) -> bool:
    """Return whether the structure contains a list that holds only numbers."""
    return shape == _NUMBERS or (isinstance(shape, list | tuple) and any(map(_has_numbers, shape)))


def _put_together(value: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _put_together(item, leaves) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_put_together(item, leaves) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
