"""Collectives over several hosts give what they give on one: every operation, dtype, length and layout."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from tests.backend._calls import CALLS, REDUCING, check_equal, values
from tests.backend.test_average import DTYPES as AVERAGED
from tests.backend.test_average import SHAPES, average_all, tensors_of
from tests.backend.test_coalescing import call_functional, coalesce, coalesce_anything, reduce_lists
from tests.backend.test_collectives import (
    barrier_holds_back,
    compare_with_gloo,
    gather_into_one_tensor,
    move_every_length,
    one_side_gives_splits,
    reduce_leaves_other_ranks_inputs,
    reduce_with_every_op,
    split_in_odd_ways,
)
from tests.backend.test_communicator import do_as_torch_does, take_unusual_tensors
from tests.backend.test_dtypes import (
    COMPLEX,
    FLOATS,
    MEANINGFUL,
    any_bits,
    bits_on_every_rank,
    check_reduction,
    copy_every_dtype,
    count_kinds_of_calls,
    order_with_nans,
    reduced,
    signed_zeros_and_infinities,
)
from tests.backend.test_groups import split_groups, use_a_reversed_group, use_every_subset
from tests.backend.test_objects import move_objects, pass_monitored_barrier
from tests.backend.test_overlaps import overlap_lists, overlap_wholes
from tests.backend.test_shapes import move_leaves, move_nothing
from tests.backend.test_uneven_lists import run_all as move_uneven_lists
from tests.hosts._layouts import LAYOUTS, interleaved, layouts

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp
INLINE_BYTES = 4032  # what travels with the head of a call
every_layout = layouts(*LAYOUTS)


def run_all(rank, world_size, functions):
    """Run several checks in one group, since meeting takes longer than many of them."""
    return [function(rank, world_size, *args) for function, *args in functions]


def numbers(seed, num, dtype):
    """Return numbers whose reductions are the same in any order: integers of any size, small whole floats."""
    if dtype not in FLOATS + COMPLEX:
        return any_bits(seed, num, dtype)
    return torch.randint(-3, 4, (num,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def reduce_every_dtype(rank, world_size):
    num = 20_003
    share = num // world_size
    for dtype, ops in MEANINGFUL.items():
        for op in ops:
            what = f"{op} of {dtype}"
            inputs = [numbers(r * 31 + 1, num, dtype) for r in range(world_size)]
            want = reduced(op, inputs)
            for part in (slice(None), slice(7)):
                tensor = inputs[rank][part].clone()
                dist.all_reduce(tensor, op)
                check_sum(tensor, want[part], op, f"all_reduce {what}")
            tensor = inputs[rank].clone()
            dist.reduce(tensor, world_size - 1, op)
            check_sum(tensor, want if rank == world_size - 1 else inputs[rank], op, f"reduce {what}")
            output = torch.empty(share, dtype=dtype)
            dist.reduce_scatter_tensor(output, inputs[rank][: share * world_size], op)
            check_sum(output, want[rank * share : (rank + 1) * share], op, f"reduce_scatter {what}")


def check_sum(got, want, op, what):
    """Bits, but for averages of floating numbers, which are divided once or host by host."""
    if op == ReduceOp.AVG and (got.is_floating_point() or got.is_complex()):
        torch.testing.assert_close(got, want, msg=lambda text: f"{what}: {text}")
    else:
        check_reduction(got, want, what)


def average_integers(rank, world_size):
    """It is the mean of all ranks, not of the hosts' means, truncated towards zero."""
    for dtype in (torch.int8, torch.int32, torch.uint8, torch.int64):
        for sign in (1, -1) if dtype.is_signed else (1,):
            want = sign * (sum(100 + r for r in range(world_size)) // world_size)
            for num in (1, 5, 50_001):
                tensor = torch.full((num,), sign * (100 + rank), dtype=dtype)
                dist.all_reduce(tensor, ReduceOp.AVG)
                assert tensor.unique().tolist() == [want], f"{dtype} {num}"
                output = torch.empty(num, dtype=dtype)
                shares = torch.full((num * world_size,), sign * (100 + rank), dtype=dtype)
                dist.reduce_scatter_tensor(output, shares, ReduceOp.AVG)
                assert output.unique().tolist() == [want], f"{dtype} {num} scattered"


def premultiply(rank, world_size):
    want = sum((r + 1) * 0.5 * r for r in range(world_size))
    for dtype in (torch.float32, torch.bfloat16):
        for num in (3, 40_000):
            op = dist._make_nccl_premul_sum((rank + 1) * 0.5)
            tensor = torch.full((num,), float(rank), dtype=dtype)
            dist.all_reduce(tensor, op)
            assert tensor.unique().tolist() == [want]
            output = torch.empty(num, dtype=dtype)
            dist.reduce_scatter_tensor(output, torch.full((num * world_size,), float(rank), dtype=dtype), op)
            assert output.unique().tolist() == [want]


def move_around_the_inline_limit(rank, world_size):
    """Bytes, so that every length is one: nothing, the limit of a message in the head, and one less and more.

    The rails of a host share a message, so that multiples of the limit count too.
    """
    group, last = dist.group.WORLD, world_size - 1
    lengths = [0, 1, *(n * INLINE_BYTES + d for n in (1, 2, world_size) for d in (-1, 0, 1)), 32_768, 65_537]
    for num in lengths:
        by_rank = [values(r, (num,), torch.uint8) for r in range(world_size)]
        mine, total = by_rank[rank], sum(by_rank)
        tensor = mine.clone()
        dist.all_reduce(tensor)
        check_equal(tensor, total, f"all_reduce of {num} bytes")
        for root in range(world_size):
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            check_equal(tensor, by_rank[root], f"broadcast of {num} bytes from {root}")
        output = mine.new_empty(world_size * num)
        dist.all_gather_into_tensor(output, mine)
        check_equal(output, torch.cat(by_rank), f"all_gather of {num} bytes")
        outputs = list(output.zero_().split(num)) if rank == last and num else None
        if num:
            dist.gather(mine, outputs, dst=last)
            if rank == last:
                check_equal(output, torch.cat(by_rank), f"gather of {num} bytes")
        scattered = torch.empty_like(mine)
        dist.reduce_scatter_tensor(scattered, torch.cat([mine + j for j in range(world_size)]))
        check_equal(scattered, total + world_size * rank, f"reduce_scatter of {num} bytes")
        output = mine.new_empty(world_size * num)
        dist.all_to_all_single(output, torch.cat([mine + j for j in range(world_size)]), group=group)
        check_equal(output, torch.cat([t + rank for t in by_rank]), f"all_to_all of {num} bytes")


def move_many_mib(rank, world_size):
    num = 2_000_003
    by_rank = [values(r, (num,), torch.float32) for r in range(world_size)]
    tensor = by_rank[rank].clone()
    work = dist.all_reduce(tensor, async_op=True)
    second = by_rank[rank].clone()
    dist.broadcast(second, world_size - 1)  # blocking, behind one that is on its way
    assert work.is_completed()
    work.wait()
    check_equal(tensor, sum(by_rank), "all_reduce")
    check_equal(second, by_rank[-1], "broadcast")
    outputs = torch.empty(world_size * num)
    dist.all_gather_into_tensor(outputs, by_rank[rank])
    check_equal(outputs, torch.cat(by_rank), "all_gather")


def use_views(rank, world_size):
    """Tensors that are not contiguous are read and written as they are."""
    for num in (6, 20_000):
        whole = values(rank, (num, 3), torch.float64)
        want = sum(values(r, (num, 3), torch.float64) for r in range(world_size))
        column = whole[:, 1]
        dist.all_reduce(column)
        check_equal(whole[:, 1].contiguous(), want[:, 1].contiguous(), "a column")
        check_equal(whole[:, 0].contiguous(), values(rank, (num, 3), torch.float64)[:, 0].contiguous(), "its neighbour")
        turned = values(rank, (num, 3), torch.float64).t()
        outputs = [torch.zeros(num, 3, dtype=torch.float64).t() for _ in range(world_size)]
        dist.all_gather(outputs, turned)
        for r, got in enumerate(outputs):
            check_equal(got.contiguous(), values(r, (num, 3), torch.float64).t().contiguous(), "turned")
        tensor = values(rank, (num, 3), torch.float64).t()
        dist.broadcast(tensor, 0, async_op=True).wait()
        check_equal(tensor.contiguous(), values(0, (num, 3), torch.float64).t().contiguous(), "broadcast turned")


def keep_the_order(rank, world_size):
    """Blocking and asynchronous calls of many kinds take effect in the order in which they were made."""
    tensor = torch.ones(5)
    works = []
    for turn in range(30):
        if turn % 3 == 0:
            dist.all_reduce(tensor)
        elif turn % 3 == 1:
            works.append(dist.all_reduce(tensor, async_op=True))
        else:
            works.append(dist.broadcast(tensor, turn % world_size, async_op=True))
        if turn % 7 == 0:
            dist.barrier()
        if turn % 3 == 2:
            for work in works:
                work.wait()
            tensor /= world_size**2
    total = tensor.tolist()
    numbers = [torch.full((3,), float(i)) for i in range(20)]
    futures = [dist.all_reduce(number, async_op=True).get_future() for number in numbers]
    results = [future.wait()[0][0].item() for future in futures]
    assert results == [float(world_size * i) for i in range(20)]
    return total


def digest_of_sums(rank, world_size):
    digests = bits_on_every_rank(rank, world_size)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            made = torch.Generator().manual_seed(rank)
            mine = (torch.rand(30_001, generator=made) + 0.5).to(dtype)
            for _ in range(2):
                tensor = mine.clone()
                dist.all_reduce(tensor, op)
                digests.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


def add_halves(rank, world_size):
    """Between hosts a half's sum is rounded, but it is of as many ranks as a host has: close to that in float32."""
    errors = []
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [torch.rand(20_001, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensor = inputs[rank].to(dtype)
            dist.all_reduce(tensor, op)
            exact = sum(one.to(dtype).double() for one in inputs) / (world_size if op == ReduceOp.AVG else 1)
            errors.append(((tensor.double() - exact).abs() / exact).max().item() / torch.finfo(dtype).eps)
    return max(errors)


def average_near_the_largest_half(rank, world_size):
    """The average of numbers in a half's range is in it, though their sum is not."""
    tensor = torch.full((5_000,), 60_000.0, dtype=torch.float16)
    dist.all_reduce(tensor, ReduceOp.AVG)
    return tensor.unique().tolist()


REDUCE = [(compare_with_gloo, REDUCING), (reduce_with_every_op,)]
MOVE = [(compare_with_gloo, sorted(set(CALLS) - set(REDUCING))), (split_in_odd_ways,), (one_side_gives_splits,)]
LENGTHS = [(move_every_length,), (move_around_the_inline_limit,), (move_many_mib,)]
KINDS = [
    (average_integers,),
    (premultiply,),
    (copy_every_dtype, ["broadcast", "all_gather", "scatter", "all_to_all", "ring"]),
]
KINDS += [(count_kinds_of_calls,), (order_with_nans,), (signed_zeros_and_infinities,)]
WAYS = [(use_views,), (move_nothing,), (move_leaves,), (move_objects,), (pass_monitored_barrier,)]
WAYS += [
    (reduce_leaves_other_ranks_inputs,),
    (gather_into_one_tensor,),
    (reduce_lists,),
    (coalesce, torch.device("cpu"), True),
]
WAYS += [(call_functional,), (coalesce_anything,)]


@every_layout
@pytest.mark.parametrize("checks", [REDUCE, MOVE], ids=["reducing", "moving"])
def test_a_collective_gives_what_gloo_gives(run_ranks, hosts, checks):
    run_ranks(run_all, sum(hosts), checks, hosts=hosts)


@pytest.mark.parametrize("order", ["abab", "bacab", pytest.param("abba", marks=pytest.mark.slow)])
def test_ranks_of_a_host_need_not_follow_each_other(run_ranks, order):
    checks = [*REDUCE[:1], *MOVE, (keep_the_order,)]
    run_ranks(interleaved, len(order), order, run_all, checks, init=False)


@layouts([1, 1], [2, 2], [1, 2, 1], slow=[[2, 1], [1, 1, 1]])
def test_every_length_arrives(run_ranks, hosts):
    run_ranks(run_all, sum(hosts), LENGTHS, hosts=hosts)


@layouts([1, 2, 1], slow=[[2, 2]])
def test_lists_of_different_sizes(run_ranks, hosts):
    assert all(run_ranks(move_uneven_lists, sum(hosts), hosts=hosts))


@layouts([1, 2, 1], slow=[[2, 2]])
def test_every_dtype_is_reduced_by_every_operation(run_ranks, hosts):
    run_ranks(reduce_every_dtype, sum(hosts), hosts=hosts)


@layouts([2, 2], slow=[[1, 2, 1]])
def test_every_dtype_and_special_number_travels(run_ranks, hosts):
    run_ranks(run_all, sum(hosts), KINDS, hosts=hosts)


@layouts([2, 2], [1, 2, 1])
def test_every_way_to_call_works(run_ranks, hosts):
    run_ranks(run_all, sum(hosts), WAYS, hosts=hosts)


def test_the_direct_way_does_what_torch_distributed_does(run_ranks):
    dtypes = torch.float32, torch.bfloat16, torch.int64  # the others go the same way between hosts
    run_ranks(run_all, 3, [(do_as_torch_does, dtypes), (take_unusual_tensors,)], hosts=[2, 1])


@every_layout
def test_blocking_and_asynchronous_calls_keep_their_order(run_ranks, hosts):
    results = run_ranks(keep_the_order, sum(hosts), hosts=hosts)
    assert results == [results[0]] * sum(hosts)


@layouts([1, 1], [2, 1], slow=[[2, 2]])
def test_tensors_of_one_call_that_overlap(run_ranks, hosts):
    checks = [(overlap_lists, False, True), (overlap_wholes, True)]
    assert run_ranks(run_all, sum(hosts), checks, hosts=hosts) == [[[], []]] * sum(hosts)


@every_layout
def test_a_barrier_holds_every_rank_back(run_ranks, hosts):
    assert run_ranks(barrier_holds_back, sum(hosts), hosts=hosts) == [sum(hosts)] * sum(hosts)


@layouts([2, 2], [2, 1], [1, 1, 1])
def test_the_bits_are_the_same_on_every_rank_and_in_every_run(run_ranks, hosts):
    first = run_ranks(digest_of_sums, sum(hosts), hosts=hosts)
    assert first == [first[0]] * sum(hosts)
    assert [len(set(first[0][i : i + 5])) for i in range(0, 20, 5)] == [1, 1, 1, 1]
    assert all(first[0][i] == first[0][i + 1] for i in range(20, len(first[0]), 2))
    assert run_ranks(digest_of_sums, sum(hosts), hosts=hosts)[0] == first[0]


@layouts([2, 2], [2, 1], [1, 1, 1])
def test_halves_are_rounded_once_on_each_level(run_ranks, hosts):
    assert max(run_ranks(add_halves, sum(hosts), hosts=hosts)) < 2


def test_an_average_of_large_halves_stays_in_their_range(run_ranks):
    assert run_ranks(average_near_the_largest_half, 4, hosts=[2, 2]) == [[60_000.0]] * 4


@layouts(slow=[[1, 1], [2, 2], [2, 1]])
def test_average_coalesced_has_the_same_bits_on_all_ranks(run_ranks, hosts):
    results = run_ranks(average_all, sum(hosts), hosts=hosts)
    for name in SHAPES:
        for dtype in AVERAGED:
            tensors, marks, squares = results[0][name, dtype]
            every = [tensors_of(rank, SHAPES[name], dtype) for rank in range(sum(hosts))]
            wide = torch.complex128 if dtype.is_complex else torch.float64
            rounding = 4 * torch.finfo(dtype).eps
            for got, same in zip(tensors, zip(*every, strict=True), strict=True):
                want = torch.stack([t.to(wide) for t in same]).mean(0)
                torch.testing.assert_close(got.to(wide), want, rtol=rounding, atol=rounding)
            assert marks == pytest.approx([1, (sum(hosts) - 1) / 2], rel=4 * rounding)
            for other in results[1:]:
                assert other[name, dtype][1:] == (marks, squares)
                assert all(torch.equal(a, b) for a, b in zip(other[name, dtype][0], tensors, strict=True))


# ---------------------------------------------------------------- groups


@layouts([2, 2], [1, 2, 1])
def test_groups_lie_within_a_host_and_across(run_ranks, hosts):
    checks = [(use_every_subset,), (use_a_reversed_group,), (split_groups,)]
    run_ranks(run_all, 4, checks, hosts=hosts)


@pytest.mark.parametrize("init_method", ["file", "tcp", "env"])
def test_ranks_meet_by_every_method(run_ranks, init_method):
    results = run_ranks(keep_the_order, 3, hosts=[2, 1], init_method=init_method)
    assert results == [results[0]] * 3
