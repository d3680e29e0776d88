"""Codes of torch's dtypes and reduce operations, as the core numbers them (``csrc/collectives/reduce.h``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

RedOpType: Any = ReduceOp.RedOpType

# In the order of Dtype in csrc/collectives/reduce.h. Dtypes that are not in this list have no arithmetic here.
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
# These pack several elements into a byte, so an element has no address.
_PACKED = {torch.quint4x2, torch.quint2x4}
_ALL = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _PACKED
_ORDERED = (*_ARITHMETIC, *sorted(_ALL.difference(_ARITHMETIC), key=str))

DTYPE_CODES: dict[torch.dtype, tuple[int, int]] = {d: (code, d.itemsize) for code, d in enumerate(_ORDERED)}
"""``dtype -> (code, bytes of an element)``; the same on every rank that runs the same version of torch.

Dtypes that pack several elements into a byte are left out, because no operation accepts them.
"""

ITEM_BYTES = [dtype.itemsize for dtype in _ORDERED]
DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in _ORDERED]

# In the order of ReduceOp in csrc/collectives/reduce.h.
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
REDUCE_CODES: dict[Any, tuple[int, int]] = {op: (code, code) for code, op in enumerate(_REDUCE_OPS)}
"""``operation -> (kernel that computes it, code on which ranks must agree)``."""
# The kernel is SUM's, because each rank multiplies its input beforehand. The code differs, so ranks notice a mix-up.
REDUCE_CODES[RedOpType.PREMUL_SUM] = (REDUCE_CODES[RedOpType.SUM][0], len(_REDUCE_OPS))

SUM_CODES = REDUCE_CODES[RedOpType.SUM]

REDUCE_NAMES = [op.name for op in (*_REDUCE_OPS, RedOpType.PREMUL_SUM)]


def premul_factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM operation."""
    return op.__getstate__()[1]


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point or complex, so that results are rounded."""
    return dtype.is_floating_point or dtype.is_complex
