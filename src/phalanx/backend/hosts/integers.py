"""Averages of integers over ranks by quotients and remainders: sums may overflow, and averages can't be averaged."""

from __future__ import annotations

import torch


def split(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the quotients and the remainders of integers, in int64 and in this order, to be summed over the ranks."""
    is_unsigned = values.dtype is torch.uint64
    wide = values.to(torch.int64)
    quotients = _divide(wide, divisor, is_unsigned=is_unsigned)
    return torch.stack([quotients, wide - quotients * divisor])


def mean(sums: torch.Tensor, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the averages, truncated towards zero, from the sums over all ranks of what `split` returned."""
    is_unsigned = dtype is torch.uint64
    carry = _divide(sums[1], divisor, is_unsigned=False)
    rest, means = sums[1] - carry * divisor, sums[0] + carry
    if is_unsigned:
        return means.view(torch.uint64)
    return means + ((means < 0) & (rest > 0)).long() - ((means > 0) & (rest < 0)).long()


def _divide(values: torch.Tensor, divisor: int, *, is_unsigned: bool) -> torch.Tensor:
    """Divide int64 values towards zero; they may hold the bits of uint64, which torch can't divide."""
    if not is_unsigned:
        return torch.div(values, divisor, rounding_mode="trunc")
    halves = (values >> 1) & torch.iinfo(torch.int64).max
    quotients = halves // divisor * 2
    return quotients + (values - quotients * divisor >= divisor)
