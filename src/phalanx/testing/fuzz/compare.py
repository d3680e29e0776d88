"""Computes the expected result of an operation, and describes how a result differs from it.

Data that is only moved must have the same bits on both sides. The results of reductions of integers or bools must also
be identical: integers wrap, an average of integers is truncated towards zero, and any non-zero byte of a bool is true.
Reductions of floats depend on the order of the ranks, so two correct results may differ:
`phalanx.backend.verify.bounds` says which results are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.calls.memory import plain
from phalanx.backend.verify.bounds import exact, wrong
from phalanx.backend.verify.cases import differ
from phalanx.backend.verify.oracle import as_bytes

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def difference(got: Tensor, want: Tensor, parts: Sequence[Tensor] = (), reduce_op: str = "", factor: Any = None) -> str:
    """Return a description of how a result differs from the expected one; empty if it is acceptable.

    Args:
        got: Result, of any strides.
        want: Expected result, such as another backend's, of the same shape and dtype.
        parts: Inputs of all ranks, if the result is their reduction; without them, the result must be identical to
            `want`.
        reduce_op: Name of the reduction in ``torch.distributed.ReduceOp``, such as ``"SUM"``.
        factor: Factor of a ``PREMUL_SUM``: a number, or a tensor.
    """
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, expected {want.dtype}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return ""
    if not parts or not (got.dtype.is_floating_point or got.dtype.is_complex):
        return _words(differ(plain(got.detach()), plain(want.detach())), got, want)
    if factor is not None:
        parts = [(part * factor).to(part.dtype) for part in parts]
    inputs = torch.stack([part.reshape(-1) for part in parts])
    return _words(wrong(got.reshape(-1), inputs, getattr(dist.ReduceOp.RedOpType, reduce_op)), got, want)


def reduced(parts: Sequence[Tensor], reduce_op: str, factor: Any = None) -> Tensor:
    """Return the reduction of the inputs of all ranks: exact for integers, rounded once for floats.

    Args:
        parts: Inputs in rank order, of one shape and dtype.
        reduce_op: Name of the reduction in ``torch.distributed.ReduceOp``.
        factor: Factor of a ``PREMUL_SUM``: a number, or a tensor.
    """
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return _reduced_bool([as_bytes(plain(part.detach())) != 0 for part in parts], reduce_op).reshape(parts[0].shape)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _reduced_integers(parts, reduce_op)
    inputs = torch.stack(list(parts))
    if reduce_op == "PREMUL_SUM":
        inputs = inputs.to(torch.complex128 if dtype.is_complex else torch.float64) * torch.as_tensor(factor).double()
    return exact(inputs, getattr(dist.ReduceOp.RedOpType, reduce_op)).to(dtype)


def _folded(combine: Any, values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for other in values[1:]:
        total = combine(total, other)
    return total


def _reduced_bool(parts: list[Tensor], reduce_op: str) -> Tensor:
    if reduce_op in ("SUM", "MAX", "BOR"):
        return _folded(torch.logical_or, parts)
    return _folded(torch.logical_xor if reduce_op == "BXOR" else torch.logical_and, parts)


def _reduced_integers(parts: Sequence[Tensor], reduce_op: str) -> Tensor:
    """Reduce as signed integers of the same size, for which torch has all operations; the bits are the same."""
    dtype = parts[0].dtype
    signed = _SIGNED[dtype.itemsize]
    values = [part.contiguous().view(signed) for part in parts]
    if reduce_op == "AVG":
        return _mean(values, is_unsigned=dtype in _UNSIGNED).to(signed).view(dtype)
    # The smallest signed number is the sign bit alone. With that bit flipped, unsigned numbers have the order of signed
    # numbers.
    turn = torch.iinfo(signed).min if dtype in _UNSIGNED and reduce_op in ("MIN", "MAX") else 0
    combine = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[reduce_op]
    return (_folded(combine, [value ^ turn for value in values]) ^ turn).view(dtype)


def _mean(values: list[Tensor], *, is_unsigned: bool) -> Tensor:
    """Return the averages, truncated towards zero, in int64. The sum is kept in two halves, so it can't overflow."""
    high = torch.zeros(values[0].shape, dtype=torch.int64)
    low = torch.zeros_like(high)
    bits = values[0].itemsize * 8
    for value in values:
        whole = value.long()
        if is_unsigned and bits < 64:
            whole = whole & ((1 << bits) - 1)
        upper = whole >> 32
        high += upper & 0xFFFFFFFF if is_unsigned else upper
        low += whole & 0xFFFFFFFF
    high, low = high + (low >> 32), low & 0xFFFFFFFF
    num = len(values)
    above = torch.div(high, num, rounding_mode="floor")
    rest = ((high - above * num) << 32) + low
    below = torch.div(rest, num, rounding_mode="floor")
    floor = (above << 32) + below
    return floor + ((high < 0) & (rest - below * num != 0)).long()


def _words(differs: Tensor, got: Tensor, want: Tensor) -> str:
    """Return a description of the elements that differ."""
    where = differs.nonzero().flatten()
    if not len(where):
        return ""
    first, last = int(where[0]), int(where[-1])
    shown = [_shown(tensor, first) for tensor in (got, want)]
    return f"{len(where)} of {got.numel()} elements differ, from {first} to {last}: {shown[0]}, expected {shown[1]}"


def _shown(tensor: Tensor, index: int) -> str:
    element = tensor.reshape(-1)[index]
    try:
        return f"{element.item()!r}"
    except (RuntimeError, NotImplementedError):  # a dtype that torch can only store
        return bytes(as_bytes(plain(element.detach())).tolist()).hex()
