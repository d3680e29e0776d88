"""Every dtype: reductions by exact arithmetic, bit by bit; copies of whatever torch can hold."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.backend.types import DTYPE_CODES
from tests.backend._calls import CALLS, Call, as_bytes, check_equal, values
from tests.hosts._layouts import layout_name

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = SIGNED + UNSIGNED
PARTS_OF_BYTES = [getattr(torch, f"{kind}{num_bits}") for kind in ("int", "uint") for num_bits in range(1, 8)]
# Those that torch can fill through a view of bytes; the others have no bytes of their own.
COPIED = [
    *FLOATS,
    *COMPLEX,
    *INTEGERS,
    torch.bool,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.bits8,
    torch.bits16,
    torch.bits4x2,
    torch.quint8,
    torch.qint8,
    torch.qint32,
]

ARITHMETIC = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT]
ORDER = [ReduceOp.MIN, ReduceOp.MAX]
BITS = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
MEANINGFUL = {
    **dict.fromkeys(FLOATS, ARITHMETIC + ORDER),
    **dict.fromkeys(COMPLEX, ARITHMETIC[:2]),  # torch itself refuses the product
    **dict.fromkeys(INTEGERS, ARITHMETIC + ORDER + BITS),
    torch.bool: [ReduceOp.SUM, ReduceOp.PRODUCT, *ORDER, *BITS],
}
# A few; one block of the kernels and a bit; several chunks.
LENGTHS = (1, 7, 1029, 70_003)


def any_bits(seed, num, dtype):
    """Return numbers over the dtype's range, so that sums round and integers wrap."""
    made = torch.Generator().manual_seed(seed)
    if dtype in FLOATS:
        return torch.randn(num, generator=made, dtype=torch.float64).to(dtype)
    if dtype in COMPLEX:
        return torch.randn(num, generator=made, dtype=torch.complex128).to(dtype)
    raw = torch.randint(0, 256, (num * dtype.itemsize,), generator=made, dtype=torch.uint8)
    return raw > 127 if dtype is torch.bool else raw.view(dtype)


def reduced(op, tensors):
    """Return the reduction in rank order: halves in float32, integers as numpy has them, which wraps like torch."""
    dtype = tensors[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.from_numpy(_reduced_whole(op, [t.numpy() for t in tensors], dtype is torch.bool))
    wide = [t.float() if dtype.itemsize == 2 else t for t in tensors]
    total = wide[0]
    combine = {
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }.get(op, torch.add)
    for other in wide[1:]:
        total = combine(total, other)
    if op == ReduceOp.AVG:
        parts = torch.view_as_real(total) if total.is_complex() else total
        total = parts / len(tensors)
        total = torch.view_as_complex(total) if tensors[0].is_complex() else total
    return total.to(dtype)


def _reduced_whole(op, arrays, is_bool):
    if op == ReduceOp.AVG:
        # Exact, towards zero: 64-bit numbers as Python's own, which have no range.
        total = sum(a.astype(object if a.itemsize == 8 else np.int64) for a in arrays)
        return (np.abs(total) // len(arrays) * np.where(total < 0, -1, 1)).astype(arrays[0].dtype)
    combine = {
        ReduceOp.SUM: np.logical_or if is_bool else np.add,
        ReduceOp.PRODUCT: np.logical_and if is_bool else np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }[op]
    total = arrays[0].copy()
    for other in arrays[1:]:
        total = combine(total, other)
    return total


def check_reduction(got, want, what):
    if got.dtype in COMPLEX:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    # Two NaNs may differ in their payload.
    if got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places"
        got, want = got.nan_to_num(), want.nan_to_num()
    check_equal(got, want, what)


def average_near_the_limits(rank, world_size):
    """Every combination of the largest, smallest and small numbers, of each dtype, by a few collectives."""
    averages = {}
    for dtype in INTEGERS:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        picks = sorted({low, low + 1, low // 2 + 1, max(low, -1), 0, 1, high // 2, high - 1, high})
        table = list(itertools.product(picks, repeat=world_size))
        whole = torch.from_numpy(np.array([row[rank] for row in table], dtype=str(dtype).removeprefix("torch.")))
        dist.all_reduce(whole, ReduceOp.AVG)
        sums = [sum(row) for row in table]
        want = [abs(total) // world_size * (-1 if total < 0 else 1) for total in sums]
        assert whole.tolist() == want, dtype
        averages[str(dtype)] = len(want)
    return averages


def reduce_every_dtype(rank, world_size, dtypes):
    last = world_size - 1
    for dtype in dtypes:
        for op in MEANINGFUL[dtype]:
            for num in LENGTHS if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX) else LENGTHS[1:3]:
                what = f"{op} of {num} {dtype}"
                inputs = [any_bits(r * 31 + num, num, dtype) for r in range(world_size)]
                want = reduced(op, inputs)
                for repeat in range(2):
                    tensor = inputs[rank].clone()
                    dist.all_reduce(tensor, op)
                    check_reduction(tensor, want, f"all_reduce {what}, run {repeat}")
                tensor = inputs[rank].clone()
                dist.reduce(tensor, last, op)
                if rank == last:
                    check_reduction(tensor, want, f"reduce {what}")
                # Each rank's share is the whole, rolled by its number, so that no two shares are the same.
                shares = [_rolled(inputs[rank], r) for r in range(world_size)]
                output = torch.empty_like(tensor)
                dist.reduce_scatter(output, shares, op)
                check_reduction(output, _rolled(want, rank), f"reduce_scatter {what}")
                output.zero_()
                dist.reduce_scatter_tensor(output, torch.cat(shares), op)
                check_reduction(output, _rolled(want, rank), f"reduce_scatter_tensor {what}")


def _rolled(tensor, by):
    raw = as_bytes(tensor).roll(by, 0).reshape(-1)
    return raw.view(tensor.dtype)


def copy_every_dtype(rank, world_size, names):
    for dtype in COPIED:
        for num in (3, 20_000):
            by_rank = [_copied(r, num, dtype) for r in range(world_size)]
            for name in names:
                _copy(name, by_rank, rank, world_size, f"{name} of {num} {dtype}")


def _copied(rank, num, dtype):
    raw = torch.randint(0, 256, (num * dtype.itemsize,), generator=torch.Generator().manual_seed(rank))
    raw = raw.to(torch.uint8) & (1 if dtype is torch.bool else 255)
    if dtype in (torch.quint8, torch.qint8, torch.qint32):
        whole = raw.view({torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}[dtype])
        empty = torch._empty_affine_quantized([num], scale=0.5, zero_point=0, dtype=dtype)
        empty.untyped_storage().copy_(whole.untyped_storage())
        return empty
    return raw.view(dtype)


def _raw(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _blank(tensor):
    blank = tensor.clone()
    blank.untyped_storage().fill_(0)
    return blank


def _copy(name, by_rank, rank, world_size, what):
    mine, root = by_rank[rank], world_size - 1
    blank = [_blank(t) for t in by_rank]
    if name == "broadcast":
        output = [mine.clone()]
        dist.broadcast(output[0], root)
        want = [by_rank[root]]
    elif name == "all_gather":
        output, want = blank, by_rank
        dist.all_gather(output, mine)
    elif name == "gather":
        output, want = (blank, by_rank) if rank == root else ([], [])
        dist.gather(mine, output or None, root)
    elif name == "scatter":
        output, want = [blank[0]], [mine]
        dist.scatter(output[0], by_rank if rank == root else None, root)
    elif name == "all_to_all":
        output, want = blank, by_rank
        dist.all_to_all(output, [mine] * world_size)
    else:
        output, want = [blank[0]], [by_rank[(rank - 1) % world_size]]
        sent = dist.isend(mine, (rank + 1) % world_size)
        dist.recv(output[0], (rank - 1) % world_size)
        sent.wait()
    for got, expected in zip(output, want, strict=True):
        assert _raw(got) == _raw(expected), what


def premultiply(rank, world_size):
    for dtype in (*FLOATS, torch.complex64):
        for num in (7, 40_000):
            inputs = [any_bits(r, num, dtype) for r in range(world_size)]
            for factors in ([0.5] * world_size, [r + 0.25 for r in range(world_size)], "tensor"):
                if factors == "tensor":
                    scale = [torch.tensor(r + 1.5, dtype=dtype) for r in range(world_size)]
                else:
                    scale = factors
                want = reduced(ReduceOp.SUM, [(t * s).to(dtype) for t, s in zip(inputs, scale, strict=True)])
                what = f"PREMUL_SUM of {num} {dtype} by {factors}"
                op = dist._make_nccl_premul_sum(scale[rank])
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, op)
                check_reduction(tensor, want, f"all_reduce {what}")
                output = torch.empty(num, dtype=dtype)
                dist.reduce_scatter_tensor(output, inputs[rank].repeat(world_size), op)
                check_reduction(output, want, f"reduce_scatter {what}")
                tensor = inputs[rank].clone()
                dist.reduce(tensor, 0, op)
                check_reduction(tensor, want if rank == 0 else inputs[rank], f"reduce {what}")


def add_where_halves_would_lose(rank, world_size):
    """2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16: rounding after each addition would lose every one."""
    found = {}
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        # Every number of ranks up to the eight lanes of the wide kernels and past them, and the whole chunked way.
        for num in (1, 9, 100_003):
            tensor = torch.full((num,), large if rank == 0 else 1.0, dtype=dtype)
            dist.all_reduce(tensor)
            found[f"{dtype} {num}"] = tensor.unique().tolist()
    # In the middle, the sum passes the largest float16; at the end it fits again.
    most = torch.finfo(torch.float16).max
    tensor = torch.tensor([most if rank < 2 else -most / (world_size - 2)], dtype=torch.float16)
    dist.all_reduce(tensor)
    found["overflow"] = tensor.item()
    return found


def order_with_nans(rank, world_size):
    seen = []
    for dtype in FLOATS:
        for num in (4, 50_000):
            for at in range(world_size):
                tensor = torch.full((num,), float(rank), dtype=dtype)
                if rank == at:
                    tensor[::2] = math.nan
                for op in ORDER:
                    result = tensor.clone()
                    dist.all_reduce(result, op)
                    assert result[::2].isnan().all(), f"{op} {dtype} lost the NaN of rank {at}"
                    want = 0 if op == ReduceOp.MIN else world_size - 1
                    assert (result[1::2] == want).all(), f"{op} {dtype}"
                    seen.append(result.isnan().sum().item())
    return seen


def signed_zeros_and_infinities(rank, world_size):
    table = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.inf, 1e-45, 65504.0])
    mine = table if rank == 0 else torch.tensor([math.inf, -math.inf, 0.0, -0.0, -math.inf, 0.0, 0.0])
    for dtype in FLOATS:
        tensor = mine.to(dtype, copy=True)
        dist.all_reduce(tensor)
        others = torch.tensor([math.inf, -math.inf, 0.0, -0.0, -math.inf, 0.0, 0.0])
        inputs = [table.to(dtype), *[others.to(dtype)] * (world_size - 1)]
        check_reduction(tensor, reduced(ReduceOp.SUM, inputs), f"special values in {dtype}")


def multiply_complex(rank, world_size):
    """Below dist.all_reduce, which refuses it. torch may contract a product differently, so it is only close."""
    inputs = [any_bits(r, 40_001, torch.complex128) for r in range(world_size)]
    want = functools.reduce(torch.mul, inputs)
    opts = dist.AllreduceOptions()
    opts.reduceOp = ReduceOp.PRODUCT
    dist.group.WORLD.allreduce([inputs[rank]], opts).wait()
    torch.testing.assert_close(inputs[rank], want)


def bits_on_every_rank(rank, world_size):
    """Numbers of very different size, whose sum depends on the order of additions."""
    digests = []
    for num in (3, 1000, 20_000, 150_001):
        made = torch.Generator().manual_seed(rank)
        mine = torch.randn(num, generator=made) * 10.0 ** torch.randint(-6, 7, (num,), generator=made)
        for _ in range(5):
            tensor = mine.clone()
            dist.all_reduce(tensor)
            digests.append(hashlib.sha256(_raw(tensor)).hexdigest())
    return digests


def count_kinds_of_calls(rank, world_size):
    """Every collective takes every dtype that it has a meaning for, also in a world where numbers are small."""
    for dtype in (torch.int8, torch.uint16, torch.bool, torch.bfloat16, torch.complex64):
        for name in CALLS:
            Call(name, dist.group.WORLD, (3, 2), dtype, seed=2).run()
    return sorted(CALLS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", [(*FLOATS, *COMPLEX), (*SIGNED, torch.bool), UNSIGNED], ids=lambda d: str(d[0]))
def test_reductions_have_the_bits_of_exact_arithmetic(run_ranks, dtypes, world_size):
    run_ranks(reduce_every_dtype, world_size, dtypes)


def test_reductions_on_more_ranks_than_lanes(run_ranks):
    run_ranks(reduce_every_dtype, 7, (torch.float16, torch.int16))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_dtype_is_copied_byte_by_byte(run_ranks, world_size):
    names = ["broadcast", "all_gather", "gather", "scatter", "all_to_all", *(["ring"] if world_size > 1 else [])]
    run_ranks(copy_every_dtype, world_size, names)


def test_every_dtype_of_torch_has_a_code():
    """A dtype that a later torch brings is at least copied, and one that is only copied here is a true dtype there."""
    of_torch = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert set(DTYPE_CODES) == of_torch - {torch.quint4x2, torch.quint2x4}  # less memory than elements: refused
    assert set(COPIED) <= of_torch
    assert len({code for code, _ in DTYPE_CODES.values()}) == len(DTYPE_CODES)


@pytest.mark.parametrize("world_size", [1, 3])
def test_premul_sum_multiplies_each_ranks_input_by_its_factor(run_ranks, world_size):
    run_ranks(premultiply, world_size)


@pytest.mark.parametrize("world_size", [3, 5])
def test_halves_are_added_up_in_float32(run_ranks, world_size):
    results = run_ranks(add_where_halves_would_lose, world_size)
    assert results == [results[0]] * world_size
    assert results[0]["overflow"] == pytest.approx(torch.finfo(torch.float16).max, rel=2e-3)
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        exact = torch.tensor(large + world_size - 1).to(dtype).item()
        assert exact > large
        for num in (1, 9, 100_003):
            assert results[0][f"{dtype} {num}"] == [exact]


@pytest.mark.parametrize("hosts", [[2], [3], [1, 1], [2, 1]], ids=layout_name)
def test_averages_of_integers_are_exact_up_to_the_limits_of_their_dtype(run_ranks, hosts):
    counted = run_ranks(average_near_the_limits, sum(hosts), hosts=hosts if len(hosts) > 1 else ())
    assert all(len(counts) == len(INTEGERS) and min(counts.values()) >= 5**2 for counts in counted)


@pytest.mark.parametrize("world_size", [2, 3])
def test_min_and_max_hand_on_nans(run_ranks, world_size):
    assert all(count > 0 for counts in run_ranks(order_with_nans, world_size) for count in counts)


@pytest.mark.parametrize("world_size", [2, 3])
def test_infinities_subnormals_and_signed_zeros_add_up_as_in_torch(run_ranks, world_size):
    run_ranks(signed_zeros_and_infinities, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_complex_numbers_multiply(run_ranks, world_size):
    run_ranks(multiply_complex, world_size)


def test_the_bits_are_the_same_on_every_rank_and_in_every_run(run_ranks):
    first = run_ranks(bits_on_every_rank, 4)
    assert first == [first[0]] * 4
    assert [len(set(first[0][i : i + 5])) for i in range(0, 20, 5)] == [1, 1, 1, 1]
    assert run_ranks(bits_on_every_rank, 4)[0] == first[0]


def test_every_collective_takes_small_unsigned_logical_half_and_complex_tensors(run_ranks):
    assert run_ranks(count_kinds_of_calls, 2) == [sorted(CALLS)] * 2


def test_values_are_small_enough_to_be_exact():
    for dtype in MEANINGFUL:
        made = values(3, (50,), dtype)
        assert made.dtype == dtype
        assert made.abs().max() <= 6 if dtype is not torch.bool and dtype not in UNSIGNED else True


def reduce_parts_of_bytes(rank, world_size):
    errors = []
    for dtype in PARTS_OF_BYTES:
        tensor = torch.full((4,), 15, dtype=torch.uint8).view(dtype)
        for reduce in (dist.all_reduce, phalanx.communicator().all_reduce, lambda t: dist.reduce(t, 0)):
            with pytest.raises(ValueError, match=f"elements of {dtype} can't be reduced") as caught:
                reduce(tensor)
            errors.append(str(caught.value))
        dist.broadcast(tensor, 0)
        assert tensor.view(torch.uint8).tolist() == [15] * 4
    return errors


def test_integers_of_less_than_a_byte_are_copied_and_not_reduced(run_ranks):
    """Their sum could leave their range, and torch has no arithmetic for them."""
    for error in itertools.chain.from_iterable(run_ranks(reduce_parts_of_bytes, 2)):
        assert "convert the tensor: tensor.view(torch.uint8)" in error
