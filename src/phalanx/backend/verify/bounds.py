"""Decides which results of a reduction are right, given the inputs of all ranks.

Sums, averages and products of floats depend on the order of the operations, so two right results may differ. A result
is right if its error is within a bound that holds for any order. Let u be the unit roundoff of the dtype, n the number
of ranks, and g(k) = k·u / (1 - k·u), which is Higham's gamma:

- **Sums**, for any order: ``|computed - exact| <= g(n-1) · Σ|x|`` (Higham, Accuracy and Stability of Numerical
  Algorithms, 2nd edition, 2002, section 4.2, (4.4) and (4.6)). An average has two more roundings: of 1/n and of the
  division. The parts of complex numbers are summed separately.
- **Products**, for any order: ``|computed - exact| <= g(n-1) · |exact|`` (Higham, lemma 3.1). For complex products the
  factor is g(4(n-1)), since the product of two numbers has a relative error of at most √2·g(2) (Higham, lemma 3.5).
- **Underflow** adds an absolute error: half a spacing of subnormal numbers for each rounding, or the smallest normal
  number where a program flushes subnormals. In a product, later factors enlarge it by at most Π max(1, |x|).
- **Overflow.** Where Σ|x|, or Π max(1, |x|), reaches the largest finite number, some order overflows, and an infinity
  or NaN is right, too. Otherwise, an infinity or NaN is wrong.
- **inf and NaN in the inputs**: a NaN makes the result NaN; so do infinities of both signs in a sum, and an infinity
  and a zero in a product; otherwise infinities stay, with their sign.
- **Minimum and maximum** are NaN if an input is. The sign of a zero, and the bits of a NaN, depend on the order.

The reference value is computed in float64. Its own error is at most the float64 bound, so every bound is doubled. A
test checks each bound against all orders of many random inputs, including those that nearly cancel.
"""

from __future__ import annotations

import torch

from phalanx.backend.types import RedOpType

SUMS = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)


def wrong(result: torch.Tensor, inputs: torch.Tensor, kind: object) -> torch.Tensor:
    """Return which elements of a reduction are wrong.

    Args:
        result: Elements that were computed, of a floating or complex dtype, shape ``(m,)``.
        inputs: Elements of each rank from which `result` was computed, shape ``(n, m)``; already multiplied by the
            factor if `kind` is PREMUL_SUM.
        kind: torch's reduce operation.

    Returns:
        Booleans of shape ``(m,)``.
    """
    if kind in SUMS:
        if not result.is_complex():
            return ~_is_sum(result, inputs, kind)
        parts = zip(_parts(result), _parts(inputs), strict=True)
        return ~torch.stack([_is_sum(part, given, kind) for part, given in parts]).all(0)
    if kind == RedOpType.PRODUCT:
        return ~_is_product(result, inputs)
    return ~_is_extreme(result, inputs, kind)


def exact(inputs: torch.Tensor, kind: object) -> torch.Tensor:
    """Return the reduction of the inputs of all ranks, computed in float64 and rounded once to their dtype.

    Args:
        inputs: Elements of each rank, of a floating or complex dtype, shape ``(n, ...)``; already multiplied by the
            factor if `kind` is PREMUL_SUM.
        kind: torch's reduce operation.
    """
    wide = inputs.to(torch.complex128 if inputs.is_complex() else torch.float64)
    if kind in (RedOpType.MIN, RedOpType.MAX):
        value = wide.amin(0) if kind == RedOpType.MIN else wide.amax(0)
    elif kind == RedOpType.PRODUCT:
        value = wide.prod(0)
    else:
        value = wide.sum(0)
        if kind == RedOpType.AVG:  # in parts, because complex division would turn infinities into NaN
            value = (torch.view_as_real(value) if value.is_complex() else value) / len(inputs)
            value = torch.view_as_complex(value) if wide.is_complex() else value
    return value.to(inputs.dtype)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.real, tensor.imag


def _gamma(roundings: int, info: torch.finfo) -> float:
    share = roundings * info.eps / 2
    return share / (1 - share) if share < 1 else float("inf")


def _underflow(info: torch.finfo, roundings: int) -> float:
    """Return the largest absolute error that underflow can cause; 16-bit floats are computed in float32."""
    flushed = torch.finfo(torch.float64 if info.bits == 64 else torch.float32).tiny
    return info.smallest_normal * info.eps + (roundings + 1) * flushed


def _is_sum(result: torch.Tensor, inputs: torch.Tensor, kind: object) -> torch.Tensor:
    info, n = torch.finfo(result.dtype), inputs.shape[0]
    given = inputs.double()
    finite = torch.where(given.isfinite(), given, 0.0)
    share = 1 / n if kind == RedOpType.AVG else 1.0
    sizes = finite.abs().sum(0)
    roundings = n - 1 + 2 * (kind == RedOpType.AVG)
    bound = 2 * _gamma(roundings, info) * sizes * share + _underflow(info, roundings)
    may_overflow = sizes * (1 + _gamma(n, info)) + bound >= info.max
    got = result.double()
    exact = finite.sum(0) * share
    is_near = ((got - exact).abs() <= bound) | ~exact.isfinite()
    is_nan = given.isnan().any(0)
    up, down = (given == torch.inf).any(0), (given == -torch.inf).any(0)
    right = torch.where(may_overflow, is_near | ~got.isfinite(), is_near)
    right = torch.where(up, (got == torch.inf) | (may_overflow & got.isnan()), right)
    right = torch.where(down, (got == -torch.inf) | (may_overflow & got.isnan()), right)
    return torch.where(is_nan | (up & down), got.isnan(), right)


def _is_product(result: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    n, is_complex = inputs.shape[0], result.is_complex()
    info = torch.finfo(result.dtype)
    given, got = (t.to(torch.complex128 if is_complex else torch.float64) for t in (inputs, result))
    exact = given.prod(0)
    most = given.abs().clamp(min=1.0).prod(0)
    least = given.abs().clamp(max=1.0).prod(0)
    roundings = (4 if is_complex else 1) * (n - 1)
    bound = 2 * _gamma(roundings, info) * given.abs().prod(0) + most * _underflow(info, roundings)
    may_overflow = ~(most * (1 + _gamma(roundings, info)) * (2.0 if is_complex else 1.0) < info.max)
    is_near = ((got - exact).abs() <= bound) | (given.isfinite().all(0) & ~exact.isfinite())
    is_finite, has_inf = got.isfinite(), given.isinf().any(0)
    right = torch.where(may_overflow, is_near | ~is_finite, is_near)
    if is_complex:  # libraries differ in complex products with infinities: C's Annex G is optional
        return torch.where(given.isfinite().all(0), right, ~is_finite)
    may_vanish = least <= info.tiny * n
    is_infinite = got == torch.where((given < 0).sum(0) % 2 == 1, -torch.inf, torch.inf)
    right = torch.where(has_inf, is_infinite | (may_vanish & got.isnan()), right)
    return torch.where(given.isnan().any(0) | (has_inf & (given == 0).any(0)), got.isnan(), right)


def _is_extreme(result: torch.Tensor, inputs: torch.Tensor, kind: object) -> torch.Tensor:
    given, got = inputs.double(), result.double()
    want = given.amin(0) if kind == RedOpType.MIN else given.amax(0)
    return torch.where(given.isnan().any(0), got.isnan(), got == want)
