"""average_coalesced: many tensors averaged where they lie, in one pass that also adds up the squares."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import phalanx

pytestmark = pytest.mark.kept_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
SHAPES = {
    "nothing": [(0,)],
    "one element": [()],
    "within a line": [(3,), (1,), (0,), (2, 2)],
    "one-shot": [(1023,), (7, 11), (5000,)],
    "chunks": [(3,), (70_000,), (129,), (40_001,), (1,)],
}


def tensors_of(rank, shapes, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def average_all(rank, world_size):
    group = dist.group.WORLD
    results = {}
    for name, shapes in SHAPES.items():
        for dtype in DTYPES:
            tensors, marks = tensors_of(rank, shapes, dtype), torch.tensor([1, rank]).to(dtype)
            squares = group.average_coalesced(tensors, marks, with_squares=True)
            again = tensors_of(rank, shapes, dtype)
            assert group.average_coalesced(again, marks.clone()) == 0.0
            assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
            results[name, dtype] = (tensors, marks.tolist(), squares)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_averages_every_tensor_with_the_same_bits_on_all_ranks(run_ranks, world_size):
    results = run_ranks(average_all, world_size)
    for (name, dtype), (tensors, marks, squares) in results[0].items():
        every = [tensors_of(rank, SHAPES[name], dtype) for rank in range(world_size)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        means = [torch.stack([t.to(wide) for t in same]).mean(0) for same in zip(*every, strict=True)]
        rounding = torch.finfo(dtype).eps
        for got, want in zip(tensors, means, strict=True):
            torch.testing.assert_close(got.to(wide), want, rtol=2 * rounding, atol=2 * rounding)
        assert marks == pytest.approx([1, (world_size - 1) / 2], rel=4 * rounding)
        total = sum(t.to(wide).abs().square().sum().item() for t in tensors)
        assert squares == pytest.approx(total, rel=1e-5)
        for other in results[1:]:
            assert other[name, dtype][2] == squares
            assert all(torch.equal(a, b) for a, b in zip(other[name, dtype][0], tensors, strict=True))


def average_a_mixture(rank, world_size):
    tensors = [
        torch.full((3, 4), float(rank)).t(),
        torch.full((5,), float(rank), dtype=torch.float64),
        torch.full((2, 2), float(rank), dtype=torch.bfloat16)[:, 1],
    ]
    marks = torch.tensor([float(rank)])
    squares = dist.group.WORLD.average_coalesced(tensors, marks, with_squares=True)
    return [t.unique().tolist() for t in tensors], marks.item(), squares


def test_takes_layouts_and_dtypes_in_one_call(run_ranks):
    for values, mark, squares in run_ranks(average_a_mixture, 2):
        assert values == [[0.5]] * 3
        assert mark == 0.5
        assert squares == (12 + 5 + 2) / 4


def average_in_other_layouts(rank, world_size):
    tensor = torch.full((3, 4), float(rank)) if rank == 0 else torch.full((4, 3), float(rank)).t()
    squares = dist.group.WORLD.average_coalesced([tensor], torch.ones(1), with_squares=True)
    return tensor.unique().tolist(), squares


def test_a_plain_tensor_meets_one_that_needs_a_copy(run_ranks):
    assert run_ranks(average_in_other_layouts, 2) == [([0.5], 3.0)] * 2


def disagree(rank, world_size):
    dist.group.WORLD.average_coalesced([torch.ones(4 + rank)], torch.ones(1))


def test_lengths_that_differ_are_an_error_on_every_rank(run_ranks):
    outcomes = run_ranks(disagree, 2, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, phalanx.CollectiveMismatch), outcome
        assert "count=5" in str(outcome.error)
        assert "count=6" in str(outcome.error)


def profile(rank, world_size):
    with torch.profiler.profile() as profiler:
        dist.group.WORLD.average_coalesced([torch.ones(4)], torch.ones(1))
    return [event.name for event in profiler.events() if event.name.startswith("phalanx:")]


def test_shows_in_a_profile(run_ranks):
    assert run_ranks(profile, 2) == [["phalanx:average_coalesced"]] * 2
