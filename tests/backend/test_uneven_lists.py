"""Lists whose tensors differ in size by rank, as NCCL takes them: all_gather and reduce_scatter, and who disagrees."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import CollectiveMismatch
from tests.backend._calls import check_equal, values
from tests.backend.test_dtypes import MEANINGFUL, reduced

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp
# Of a rank's block, by rank: none at all, short ones, one that takes several chunks.
SIZES = [(0, 3, 1, 2), (1, 0, 0, 0), (70_001, 5, 3, 0), (2, 300_007, 40_000, 1)]


def finish(work):
    if work is not None:
        assert work.wait()


def block(rank, num, dtype, salt=0):
    return values(rank * 131 + num + salt, (num,), dtype)


def gather_uneven(rank, world_size, async_op):
    for sizes in SIZES:
        sizes = sizes[:world_size]
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.uint8):
            want = [block(r, num, dtype) for r, num in enumerate(sizes)]
            outputs = [torch.ones(num, dtype=dtype) for num in sizes]
            finish(dist.all_gather(outputs, want[rank].clone(), async_op=async_op))
            for got, expected in zip(outputs, want, strict=True):
                check_equal(got, expected, f"all_gather of {sizes} {dtype}")
        # Views, one of which is the input.
        whole = torch.full((2 * sum(sizes),), -1.0)
        outputs = list(whole[::2].split(list(sizes)))
        outputs[rank].fill_(float(rank))
        finish(dist.all_gather(outputs, outputs[rank], async_op=async_op))
        want = torch.cat([torch.full((num,), float(r)) for r, num in enumerate(sizes)])
        check_equal(whole[::2].contiguous(), want, f"all_gather of views of {sizes}")
        assert (whole[1::2] == -1).all()


def scatter_uneven(rank, world_size, async_op):
    for sizes in SIZES:
        sizes = sizes[:world_size]
        dtypes = MEANINGFUL if max(sizes) < 70_000 else {torch.float32: [ReduceOp.SUM, ReduceOp.AVG]}
        for dtype, ops in dtypes.items():
            for op in ops:
                inputs = [[block(r, num, dtype, salt=j) for j, num in enumerate(sizes)] for r in range(world_size)]
                output = torch.ones(sizes[rank], dtype=dtype)
                finish(dist.reduce_scatter(output, inputs[rank], op, async_op=async_op))
                want = reduced(op, [blocks[rank] for blocks in inputs])
                what = f"reduce_scatter {op} of {sizes} {dtype}"
                if op == ReduceOp.AVG and dtype.is_floating_point | dtype.is_complex:
                    torch.testing.assert_close(output, want, msg=what)  # hosts may divide at the end
                else:
                    check_equal(output, want, what)


def coalesce_uneven(rank, world_size):
    """Several as one: torch's coalesced calls, and its manager."""
    group = dist.group.WORLD
    sizes = [(0, 3, 1, 2)[:world_size], (4, 4, 4, 4)[:world_size], (9, 1, 2, 0)[:world_size]]
    inputs = [block(rank, row[rank], torch.float32) for row in sizes]
    want = [[block(r, row[r], torch.float32) for row in sizes] for r in range(world_size)]
    outputs = [[torch.ones(row[r]) for row in sizes] for r in range(world_size)]
    finish(group.allgather_coalesced(outputs, inputs, c10d.AllgatherOptions()))
    for r in range(world_size):
        for got, expected in zip(outputs[r], want[r], strict=True):
            check_equal(got, expected, f"allgather_coalesced from rank {r}")
    targets = [torch.ones(row[rank]) for row in sizes]
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        for target, row in zip(targets, sizes, strict=True):
            dist.reduce_scatter(target, [torch.full((num,), float(rank)) for num in row], async_op=True)
    works.wait()
    for target in targets:
        assert (target == sum(range(world_size))).all()


def run_all(rank, world_size):
    for async_op in (False, True):
        gather_uneven(rank, world_size, async_op)
        scatter_uneven(rank, world_size, async_op)
    if world_size > 1:
        coalesce_uneven(rank, world_size)
    return True


def disagree_about_sizes(rank, world_size, op):
    """The last rank has another size for the one before it; sums and each rank's own are as the others have them."""
    sizes = [2, 3, 1, 4][:world_size]
    if rank == world_size - 1:
        sizes[0], sizes[1] = sizes[1], sizes[0]
    tensors = [torch.ones(num) for num in sizes]
    dist.barrier()
    with pytest.raises(CollectiveMismatch) as error:
        if op == "all_gather":
            dist.all_gather(tensors, torch.ones(sizes[rank]))
        else:
            dist.reduce_scatter(torch.ones(sizes[rank]), tensors)
    return str(error.value)


def give_a_wrong_own_size(rank, world_size):
    """The list holds this rank's own block, too: that is its caller's mistake."""
    texts = []
    wrong = [torch.ones(2), torch.ones(3)]
    for call in (
        lambda: dist.all_gather(wrong, torch.ones(4)),
        lambda: dist.reduce_scatter(torch.ones(4), wrong),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_lists_of_different_sizes_are_gathered_and_scattered(run_ranks, world_size):
    assert all(run_ranks(run_all, world_size))


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_sizes_that_contradict_each_other_are_named(run_ranks, op):
    for text in run_ranks(disagree_about_sizes, 3, op):
        assert "rank 0's list has 2 elements for rank 0, rank 2's has 3" in text
        assert text.count(f"{op}(float32, split sizes") == 3


def test_a_wrong_size_of_its_own_is_the_caller_s_mistake(run_ranks):
    for rank, texts in enumerate(run_ranks(give_a_wrong_own_size, 2)):
        for text, op, name in zip(texts, ("all_gather", "reduce_scatter"), ("tensor_list", "input_list"), strict=True):
            assert f"rank {rank}: {op} at tests/backend/test_uneven_lists.py" in text
            assert f"{name}[{rank}] is" in text
