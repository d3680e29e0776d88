"""Codes that the core and torch agree on: dtypes and reduce operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

RedOpType: Any = ReduceOp.RedOpType

# In the order of Dtype in csrc/reduce.h; the dtypes after these are only copied.
_ARITHMETIC = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# Several elements a byte, and less memory than elements: no address of an element.
_PACKED = {torch.quint4x2, torch.quint2x4}
_ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _PACKED
_ORDERED = (*_ARITHMETIC, *sorted(_ALL.difference(_ARITHMETIC), key=str))

DTYPE_CODES: dict[torch.dtype, tuple[int, int]] = {d: (code, d.itemsize) for code, d in enumerate(_ORDERED)}
"""``dtype -> (code, bytes of an element)``; the same on every rank that runs the same torch.

Without the dtypes that pack several elements into a byte, which no operation takes.
"""

ITEM_BYTES = [dtype.itemsize for dtype in _ORDERED]
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in _ORDERED]

# In the order of ReduceOp in csrc/reduce.h.
_REDUCE_OPS = (
    RedOpType.SUM,
    RedOpType.AVG,
    RedOpType.PRODUCT,
    RedOpType.MIN,
    RedOpType.MAX,
    RedOpType.BAND,
    RedOpType.BOR,
    RedOpType.BXOR,
)
REDUCE_CODES: dict[object, tuple[int, int]] = {op: (code, code) for code, op in enumerate(_REDUCE_OPS)}
"""``operation -> (kernel, code that ranks must agree on)``."""
# The inputs are multiplied before they are summed, but ranks must agree that they are.
REDUCE_CODES[RedOpType.PREMUL_SUM] = (REDUCE_CODES[RedOpType.SUM][0], len(_REDUCE_OPS))

SUM_CODES = REDUCE_CODES[RedOpType.SUM]

REDUCE_NAMES = [op.name for op in (*_REDUCE_OPS, RedOpType.PREMUL_SUM)]


def premul_factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM operation."""
    return op.__getstate__()[1]


def is_inexact(dtype: torch.dtype) -> bool:
    """Return whether elements of a dtype are rounded: floating-point and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex
