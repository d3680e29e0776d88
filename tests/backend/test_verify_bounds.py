"""The bounds of `phalanx.backend.verify.bounds`: any order of the operations is right, and more than that is wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed import ReduceOp

from phalanx.backend.verify.bounds import wrong

SUM, AVG, PRODUCT, MIN, MAX = (getattr(ReduceOp.RedOpType, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"))
INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.complex64, torch.complex128)


def some(n, m, dtype, seed):
    """Return inputs of which many nearly cancel, and whose sizes differ by far."""
    made = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(n, m, dtype=wide, generator=made)
    values = values * 10.0 ** torch.randint(-2, 3, (n, m), generator=made)
    values[1, ::3] = -values[0, ::3] * (1 + 1e-3 * torch.randn(len(values[0, ::3]), generator=made))
    return values.to(dtype)


def folded(inputs, kind):
    """Reduce in the order of the rows, rounding after each step, as a ring does."""
    total = inputs[0]
    for row in inputs[1:]:
        total = total * row if kind == PRODUCT else total + row
    return total / len(inputs) if kind == AVG else total


def as_tree(inputs, kind):
    """Reduce pairs, and pairs of pairs."""
    while len(inputs) > 1:
        pairs = [folded(inputs[i : i + 2], PRODUCT if kind == PRODUCT else SUM) for i in range(0, len(inputs), 2)]
        inputs = torch.stack(pairs)
    return inputs[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [SUM, AVG, PRODUCT], ids=["sum", "avg", "product"])
def test_every_order_is_right(dtype, kind):
    for seed, n in itertools.product(range(4), (2, 3, 4)):
        inputs = some(n, 300, dtype, seed)
        for order in itertools.permutations(range(n)):
            assert not wrong(folded(inputs[list(order)], kind), inputs, kind).any()
    inputs = some(16, 300, dtype, 9)
    assert not wrong(as_tree(inputs, kind) / (16 if kind == AVG else 1), inputs, kind).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [SUM, AVG, PRODUCT], ids=["sum", "avg", "product"])
def test_a_result_beyond_the_bound_is_wrong(dtype, kind):
    inputs = (
        some(3, 200, dtype, 1).abs().clamp(max=8).to(dtype) + 1
    )  # no cancellation: the bound is a few units of the result
    right = folded(inputs, kind)
    steps = 64 if dtype.is_complex and kind == PRODUCT else 16
    moved = right * (1 + steps * torch.finfo(dtype).eps)
    assert wrong(moved.to(dtype), inputs, kind).all()
    alike = (inputs / inputs.abs() * 1.5).to(dtype)
    rest = folded(alike[:2], SUM if kind == AVG else kind) / (3 if kind == AVG else 1)
    assert wrong(rest, alike, kind).all(), "an input is left out"


SPECIAL = {  # inputs of two ranks, right results, wrong results
    "a NaN": (SUM, [NAN, 1.0], [NAN], [INF, 1.0]),
    "an infinity": (SUM, [INF, 1.0], [INF], [NAN, -INF, 3e38]),
    "both infinities": (SUM, [INF, -INF], [NAN], [INF, 0.0]),
    "an overflow": (SUM, [3e38, 3e38], [INF], [1.0, 0.0]),
    "an average that may overflow on the way": (AVG, [3e38, 3e38], [INF, 3e38], [1.0]),
    "no overflow": (SUM, [1.0, 2.0], [3.0], [INF, NAN]),
    "an infinity times zero": (PRODUCT, [INF, 0.0], [NAN], [INF, 0.0]),
    "an infinity times minus two": (PRODUCT, [INF, -2.0], [-INF], [INF, NAN, -2.0]),
    "a product that overflows": (PRODUCT, [1e30, 1e30], [INF], [1e30]),
    "a product that vanishes": (PRODUCT, [1e-30, 1e-30], [0.0, 1e-45], [1e-30]),
    "a minimum with a NaN": (MIN, [NAN, 1.0], [NAN], [1.0]),
    "a minimum of zeros": (MIN, [0.0, -0.0], [0.0, -0.0], [1.0]),
    "a maximum": (MAX, [3.0, 1.0], [3.0], [1.0, NAN]),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_infinities_and_nans_are_right_only_where_an_order_makes_them(what):
    kind, given, right, wrongs = SPECIAL[what]
    inputs = torch.tensor(given).reshape(2, 1)
    for value in right:
        assert not wrong(torch.tensor([value]), inputs, kind).item(), value
    for value in wrongs:
        assert wrong(torch.tensor([value]), inputs, kind).item(), value
