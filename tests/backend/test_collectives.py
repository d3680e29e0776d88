"""Every collective gives what Gloo gives, on every number of ranks, from every root, blocking and not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.backend._calls import CALLS, REDUCING, ROOTED, Call, check_equal, gloo_group, values

pytestmark = pytest.mark.kept_ranks

ALL_SIZES = [1, 2, 3, 4, 6]  # six ranks oversubscribe the cores of a small machine

# In float32: nothing, one, an odd few; 48 bytes fit the line of a rank; 32 KiB and 64 KiB end the one-shot way of
# all_reduce and of the others; 128 KiB is a chunk; the last is several chunks and a bit.
LENGTHS = [0, 1, 5, 12, 13, 8191, 8192, 8193, 16384, 16385, 32768, 32769, 1_000_003]


def compare_with_gloo(rank, world_size, names):
    gloo, ours = gloo_group(), dist.group.WORLD
    for name in names:
        for root in range(world_size) if name in ROOTED else [0]:
            for shape, dtype in (((7,), torch.float32), ((5, 3), torch.int64)):
                call = Call(name, ours, shape, dtype, root=root, seed=root + 3)
                want = call.on(gloo).run()
                for async_op in (False, True):
                    for got, expected in zip(replace(call, async_op=async_op).run(), want, strict=True):
                        check_equal(got, expected, f"{name} root={root} async={async_op} {shape} {dtype}")


def reduce_with_every_op(rank, world_size):
    gloo, ours = gloo_group(), dist.group.WORLD
    for name in REDUCING:
        for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            call = Call(name, ours, (9,), torch.int32, op, root=world_size - 1)
            for got, want in zip(call.run(), call.on(gloo).run(), strict=True):
                check_equal(got, want, f"{name} {op}")


def move_every_length(rank, world_size):
    """Exact arithmetic, since every rank can make every rank's input."""
    group, last = dist.group.WORLD, world_size - 1
    for n in LENGTHS:
        by_rank = [values(r, (n,), torch.float32) for r in range(world_size)]
        mine, total = by_rank[rank], sum(by_rank)
        expected = {
            "broadcast": (Moved.broadcast, by_rank[last]),
            "all_reduce": (Moved.all_reduce, total),
            "reduce": (Moved.reduce, total if rank == last else mine),
            "all_gather": (Moved.all_gather, torch.cat(by_rank)),
            "gather": (Moved.gather, torch.cat(by_rank) if rank == last else None),
            "scatter": (Moved.scatter, by_rank[rank]),
            "reduce_scatter": (Moved.reduce_scatter, total + world_size * rank),
            "all_to_all": (Moved.all_to_all, torch.cat([t + rank for t in by_rank])),
        }
        for name, (move, want) in expected.items():
            got = move(mine, by_rank, rank, world_size, last, group)
            assert (got is None) == (want is None), name
            if want is not None:
                check_equal(got, want, f"{name} of {n} elements")


class Moved:
    """Each collective on a tensor of a given length, from or to the last rank."""

    @staticmethod
    def broadcast(mine, by_rank, rank, world_size, last, group):
        tensor = mine.clone()
        dist.broadcast(tensor, last)
        return tensor

    @staticmethod
    def all_reduce(mine, by_rank, rank, world_size, last, group):
        tensor = mine.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def reduce(mine, by_rank, rank, world_size, last, group):
        tensor = mine.clone()
        dist.reduce(tensor, last)
        return tensor

    @staticmethod
    def all_gather(mine, by_rank, rank, world_size, last, group):
        output = mine.new_empty(world_size * mine.numel())
        dist.all_gather_into_tensor(output, mine)
        return output

    @staticmethod
    def gather(mine, by_rank, rank, world_size, last, group):
        outputs = [torch.empty_like(mine) for _ in by_rank] if rank == last else None
        dist.gather(mine, outputs, dst=last)
        return torch.cat(outputs) if outputs else None

    @staticmethod
    def scatter(mine, by_rank, rank, world_size, last, group):
        output = torch.empty_like(mine)
        dist.scatter(output, by_rank if rank == last else None, src=last)
        return output

    @staticmethod
    def reduce_scatter(mine, by_rank, rank, world_size, last, group):
        output = torch.empty_like(mine)
        dist.reduce_scatter_tensor(output, torch.cat([mine + j for j in range(world_size)]))
        return output

    @staticmethod
    def all_to_all(mine, by_rank, rank, world_size, last, group):
        output = mine.new_empty(world_size * mine.numel())
        dist.all_to_all_single(output, torch.cat([mine + j for j in range(world_size)]))
        return output


def split_in_odd_ways(rank, world_size):
    gloo = gloo_group()
    empty = [0] * world_size
    # Everything to the last rank; nothing at all; only to oneself; large and uneven.
    plans = [
        [[5 if dst == world_size - 1 else 0 for dst in range(world_size)] for _ in range(world_size)],
        [empty] * world_size,
        [[3 if dst == src else 0 for dst in range(world_size)] for src in range(world_size)],
        [[(src + 1) * 20_011 * (dst % 2) + dst for dst in range(world_size)] for src in range(world_size)],
    ]
    for plan in plans:
        sent, received = plan[rank], [row[rank] for row in plan]
        whole = values(rank, (sum(sent),), torch.float64)
        got, want = (torch.zeros(sum(received), dtype=torch.float64) for _ in range(2))
        dist.all_to_all_single(got, whole, received, sent)
        dist.all_to_all_single(want, whole, received, sent, group=gloo)
        check_equal(got, want, f"splits {plan}")
        # The same, as lists of tensors of different sizes.
        outputs = list(torch.zeros_like(got).split(received))
        dist.all_to_all(outputs, list(whole.split(sent)))
        check_equal(torch.cat(outputs), want, f"lists {plan}")


def one_side_gives_splits(rank, world_size):
    # Ranks may write even splits out, or leave them to the default: rank 0 does the one, the others do the other.
    whole = torch.arange(2.0 * world_size) + 100 * rank
    output = torch.empty_like(whole)
    sizes = [2] * world_size
    dist.all_to_all_single(output, whole, sizes, sizes)
    want = torch.cat([torch.arange(2.0 * rank, 2 * rank + 2) + 100 * r for r in range(world_size)])
    check_equal(output, want, "explicit even splits")
    output.zero_()
    dist.all_to_all_single(output, whole, output_split_sizes=sizes)
    check_equal(output, want, "only output splits")


def gather_into_one_tensor(rank, world_size):
    if not hasattr(dist, "gather_single"):
        return "absent"
    tensor = torch.arange(3.0) + rank
    output = torch.empty(3 * world_size) if rank == 0 else None
    dist.gather_single(tensor, output, dst=0)
    if rank == 0:
        check_equal(output, torch.cat([torch.arange(3.0) + r for r in range(world_size)]), "gather_single")
    return "there"


def barrier_holds_back(rank, world_size):
    """A rank leaves the barrier only after the last one came: the counter in the store is full by then."""
    store = c10d._get_default_store()
    store.add("before", 1)
    dist.barrier()
    return store.add("before", 0)


def reduce_leaves_other_ranks_inputs(rank, world_size):
    tensor = torch.full((50_000,), float(rank))
    dist.reduce(tensor, 0)
    want = float(sum(range(world_size))) if rank == 0 else float(rank)
    check_equal(tensor, torch.full((50_000,), want), "reduce")


@pytest.mark.parametrize("world_size", ALL_SIZES)
@pytest.mark.parametrize("names", [REDUCING, sorted(set(CALLS) - set(REDUCING))], ids=["reducing", "moving"])
def test_a_collective_gives_what_gloo_gives(run_ranks, names, world_size):
    run_ranks(compare_with_gloo, world_size, names)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_reduce_operation_gives_what_gloo_gives(run_ranks, world_size):
    run_ranks(reduce_with_every_op, world_size)


@pytest.mark.parametrize("world_size", ALL_SIZES)
def test_every_length_arrives(run_ranks, world_size):
    run_ranks(move_every_length, world_size)


@pytest.mark.parametrize("world_size", ALL_SIZES)
def test_all_to_all_splits_as_gloo_does(run_ranks, world_size):
    run_ranks(split_in_odd_ways, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_even_splits_may_be_written_out(run_ranks, world_size):
    run_ranks(one_side_gives_splits, world_size)


def test_gather_single_fills_one_tensor(run_ranks):
    if "absent" in run_ranks(gather_into_one_tensor, 3):
        pytest.skip("this torch has no gather_single")


@pytest.mark.parametrize("world_size", ALL_SIZES)
def test_a_barrier_holds_every_rank_back(run_ranks, world_size):
    assert run_ranks(barrier_holds_back, world_size) == [world_size] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_reduce_leaves_the_inputs_of_the_other_ranks(run_ranks, world_size):
    run_ranks(reduce_leaves_other_ranks_inputs, world_size)
