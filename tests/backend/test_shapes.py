"""Tensors that do not lie in one piece: views, empty ones, single numbers, leaves of autograd."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.backend._calls import check_equal

pytestmark = pytest.mark.kept_ranks

GUARD = -77.0


def transposed(n):
    whole = torch.full((n + 1, 3), GUARD)
    return whole, whole[:n].t()


def strided(n):
    whole = torch.full((2 * n + 1,), GUARD)
    return whole, whole[1::2]


def columns(n):
    whole = torch.full((n, 5), GUARD)
    return whole, whole[:, 1:4]


def channels_last(n):
    whole = torch.full((1, 3, n, 2), GUARD).to(memory_format=torch.channels_last)
    return whole, whole


def flipped_axes(n):
    whole = torch.full((2, n, 3), GUARD)
    return whole, whole.permute(2, 0, 1)[1:]


LAYOUTS = [transposed, strided, columns, channels_last, flipped_axes]


def outside(whole, view):
    """Return what of `whole` lies outside `view`."""
    mask = torch.ones_like(whole, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return whole[mask]


def numbered(like, start):
    return (torch.arange(like.numel(), dtype=torch.float32) + start).reshape(like.shape)


def move_views(rank, world_size, async_op):
    last = world_size - 1
    for n in (1, 4, 30_011):
        for layout in LAYOUTS:
            what = f"{layout.__name__}({n})"
            wholes, views = zip(*(layout(n) for _ in range(world_size)), strict=True)
            view = views[0]
            plain = torch.empty(view.shape)
            by_rank = [numbered(view, 3.0 * r) for r in range(world_size)]

            def done(work):
                if work is not None:
                    assert work.wait()

            def filled(value, view=view):
                view.copy_(value)
                return view

            done(dist.broadcast(filled(by_rank[rank]), last, async_op=async_op))
            check_equal(view, by_rank[last], f"broadcast {what}")
            done(dist.all_reduce(filled(by_rank[rank]), async_op=async_op))
            check_equal(view, sum(by_rank), f"all_reduce {what}")
            done(dist.reduce(filled(by_rank[rank]), last, async_op=async_op))
            check_equal(view, sum(by_rank) if rank == last else by_rank[rank], f"reduce {what}")
            done(dist.all_gather(list(views), by_rank[rank], async_op=async_op))
            check_all_equal(views, by_rank, f"all_gather into {what}")
            done(dist.gather(by_rank[rank], list(views) if rank == last else None, last, async_op=async_op))
            check_all_equal(views, by_rank, f"gather into {what}")
            done(dist.all_to_all(list(views), [by_rank[rank]] * world_size, async_op=async_op))
            check_all_equal(views, by_rank, f"all_to_all into {what}")
            done(dist.scatter(plain, list(views) if rank == last else None, last, async_op=async_op))
            check_equal(plain, by_rank[rank], f"scatter of {what}")
            done(dist.scatter(filled(0 * plain), by_rank if rank == last else None, last, async_op=async_op))
            check_equal(view, by_rank[rank], f"scatter into {what}")
            done(dist.reduce_scatter(filled(0 * plain), list(by_rank), async_op=async_op))
            check_equal(view, world_size * by_rank[rank], f"reduce_scatter into {what}")
            if world_size > 1:
                sent = dist.isend(filled(by_rank[rank]), (rank + 1) % world_size)
                received = dist.irecv(views[1], (rank - 1) % world_size)
                done(sent), done(received)
                check_equal(views[1], by_rank[rank - 1], f"recv into {what}")
            for w, v in zip(wholes, views, strict=True):
                assert (outside(w, v) == GUARD).all(), f"{what}: wrote outside the view"


def check_all_equal(got, want, what):
    for g, w in zip(got, want, strict=True):
        check_equal(g, w, what)


def move_whole_views(rank, world_size):
    """The operations on one tensor that holds a block for each rank."""
    for n in (1, 5, 20_001):
        whole = torch.full((3, world_size * n), GUARD)
        view = whole.t()[:, 1]
        rows = [numbered(torch.empty(n), 5.0 * r) for r in range(world_size)]
        for async_op in (False, True):
            view.fill_(0)
            work = dist.all_gather_into_tensor(view, rows[rank], async_op=async_op)
            assert work is None or work.wait()
            check_equal(view, torch.cat(rows), "all_gather_into_tensor")
            output = torch.zeros(2, n)[:1].reshape(n)
            work = dist.reduce_scatter_tensor(output, view, async_op=async_op)
            assert work is None or work.wait()
            check_equal(output, rows[rank] * world_size, "reduce_scatter_tensor")
            view.fill_(0)
            work = dist.all_to_all_single(view, rows[rank].repeat(world_size), async_op=async_op)
            assert work is None or work.wait()
            check_equal(view, torch.cat(rows), "all_to_all_single")
            assert (outside(whole, view) == GUARD).all()


def read_repeated_inputs(rank, world_size):
    """Expanded tensors have several elements in one place: good to read from."""
    for n in (3, 40_000):
        mine = torch.tensor(float(rank + 1)).expand(n)
        outputs = [torch.zeros(n) for _ in range(world_size)]
        dist.all_gather(outputs, mine)
        assert [t.unique().item() for t in outputs] == [r + 1.0 for r in range(world_size)]
        output = torch.zeros(n)
        dist.reduce_scatter(output, [mine] * world_size)
        assert output.unique().item() == sum(range(world_size + 1))
        output.zero_()
        dist.reduce_scatter_tensor(output, torch.tensor(float(rank + 1)).expand(n * world_size))
        assert output.unique().item() == sum(range(world_size + 1))
        dist.scatter(output, [torch.tensor(r + 0.5).expand(n) for r in range(world_size)] if rank == 0 else None)
        assert output.unique().item() == rank + 0.5
        sent = dist.isend(mine, (rank + 1) % world_size)
        dist.recv(output, (rank - 1) % world_size)
        sent.wait()
        assert output.unique().item() == (rank - 1) % world_size + 1


def write_to_one_place(rank, world_size):
    tensor = torch.zeros(1).expand(4)
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError) as error:
        dist.barrier()  # the group still works
        return str(error)
    return "no error"


def move_conjugates_and_negatives(rank, world_size):
    for n in (1, 3, 30_000):
        base = torch.complex(torch.arange(n, dtype=torch.float32) + rank, torch.ones(n))
        # torch's own functions refuse conjugate views, so they come this way only.
        view, opts = base.clone().conj(), dist.BroadcastOptions()
        opts.rootRank = world_size - 1
        dist.group.WORLD.broadcast([view], opts).wait()
        assert view.is_conj()
        check_equal(view, (base - rank + world_size - 1).conj().resolve_conj(), "conj broadcast")
        imaginary = base.clone().conj().imag
        assert imaginary.is_neg()
        dist.all_reduce(imaginary)
        check_equal(imaginary, torch.full((n,), -float(world_size)), "neg all_reduce")


def move_nothing(rank, world_size):
    """Empty tensors go through every operation and change nothing; single numbers have no dimension at all."""
    for shape in ((0,), (0, 3), (3, 0)):
        for _ in range(2):
            mine = torch.zeros(shape)
            dist.broadcast(mine, 0)
            dist.all_reduce(mine)
            dist.reduce(mine, world_size - 1)
            dist.all_gather([torch.zeros(shape) for _ in range(world_size)], mine)
            dist.gather(mine, [torch.zeros(shape) for _ in range(world_size)] if rank == 0 else None)
            dist.scatter(mine, [torch.zeros(shape) for _ in range(world_size)] if rank == 0 else None)
            dist.reduce_scatter(mine, [torch.zeros(shape) for _ in range(world_size)])
            dist.all_to_all([torch.zeros(shape) for _ in range(world_size)], [mine] * world_size)
            dist.all_gather_into_tensor(torch.zeros(shape[0] * world_size, *shape[1:]), mine)
            dist.reduce_scatter_tensor(mine, torch.zeros(shape[0] * world_size, *shape[1:]))
            dist.all_to_all_single(torch.zeros(shape[0] * world_size), torch.zeros(shape[0] * world_size))
            if world_size > 1:
                sent = dist.isend(mine, (rank + 1) % world_size)
                dist.irecv(torch.zeros(shape), (rank - 1) % world_size).wait(timedelta(seconds=20))
                sent.wait()
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    numbers = [torch.tensor(0.0) for _ in range(world_size)]
    dist.all_gather(numbers, torch.tensor(float(rank)))
    gathered = torch.zeros(world_size)
    dist.all_gather_into_tensor(gathered, torch.tensor(float(rank)))
    scattered = torch.tensor(0.0)
    dist.reduce_scatter_tensor(scattered, torch.arange(float(world_size)))
    return number.item(), [n.item() for n in numbers], gathered.tolist(), scattered.item()


def move_leaves(rank, world_size):
    """Parameters are written in place without autograd knowing, as every backend does, also channels-last ones."""
    plain = torch.nn.Parameter(torch.full((4,), float(rank)))
    weight = torch.full((2, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last)
    leaf = torch.nn.Parameter(weight)
    for async_op in (False, True):
        for parameter in (plain, leaf):
            with torch.no_grad():
                parameter.fill_(float(rank))
            work = dist.broadcast(parameter, world_size - 1, async_op=async_op)
            assert work is None or work.wait()
            assert (parameter == world_size - 1).all()
            assert parameter.is_leaf
            assert parameter.grad_fn is None
            with torch.no_grad():
                parameter.fill_(1.0)
            work = dist.all_reduce(parameter, async_op=async_op)
            if work is not None:
                work.get_future().wait()  # settled by another thread
            assert (parameter == world_size).all()
            assert parameter.is_leaf
            assert parameter.grad_fn is None
    outputs = [torch.zeros_like(leaf) for _ in range(world_size)]
    dist.all_gather(outputs, leaf)
    assert not any(output.requires_grad for output in outputs)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_views_are_read_and_written_and_nothing_around_them(run_ranks, world_size, async_op):
    run_ranks(move_views, world_size, async_op)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_views_that_hold_a_block_for_each_rank(run_ranks, world_size):
    run_ranks(move_whole_views, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_expanded_tensors_can_be_read(run_ranks, world_size):
    run_ranks(read_repeated_inputs, world_size)


def test_expanded_tensors_cannot_be_written_and_the_group_lives_on(run_ranks):
    for text in run_ranks(write_to_one_place, 2):
        assert "single memory location" in text


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_conjugate_and_negative_views_keep_their_meaning(run_ranks, world_size):
    run_ranks(move_conjugates_and_negatives, world_size)


def shifted(num, dtype, value):
    """Return a tensor whose elements are not aligned."""
    room = bytearray(num * dtype.itemsize + 1)
    tensor = torch.frombuffer(room, dtype=dtype, offset=1)
    assert dtype.itemsize == 1 or tensor.data_ptr() % dtype.itemsize != 0
    return tensor.fill_(value)


def move_unaligned(rank, world_size):
    total = sum(range(1, world_size + 1))
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int16, torch.int64, torch.complex64)
    for dtype in dtypes:
        for num in (1, 9, 3001, 60_001):
            reduced = shifted(num, dtype, rank + 1)
            dist.all_reduce(reduced)
            assert (reduced == total).all(), f"{dtype} {num}"
            scattered = shifted(num, dtype, 0)
            dist.reduce_scatter(scattered, [shifted(num, dtype, rank + 1) for _ in range(world_size)])
            assert (scattered == total).all(), f"{dtype} {num} scattered"
            gathered = [shifted(num, dtype, 0) for _ in range(world_size)]
            dist.all_gather(gathered, shifted(num, dtype, rank + 1))
            assert [one[-1].item() for one in gathered] == list(range(1, world_size + 1))
            sent = dist.isend(shifted(num, dtype, rank + 1), (rank + 1) % world_size)
            got = shifted(num, dtype, 0)
            dist.recv(got, (rank - 1) % world_size)
            sent.wait()
            assert (got == (rank - 1) % world_size + 1).all()
    gradients = [shifted(num, torch.float32, rank + 1) for num in (5, 40_000)]
    squares = dist.group.WORLD.average_coalesced(gradients, torch.zeros(1), with_squares=True)
    assert squares == pytest.approx(40_005 * (total / world_size) ** 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_elements_that_are_not_aligned_are_moved_and_reduced(run_ranks, world_size):
    run_ranks(move_unaligned, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_empty_tensors_and_single_numbers(run_ranks, world_size):
    total = float(sum(range(world_size)))
    ranks = [float(r) for r in range(world_size)]
    want = [(total, ranks, ranks, float(r * world_size)) for r in range(world_size)]
    assert run_ranks(move_nothing, world_size) == want


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_written_behind_autograds_back(run_ranks, world_size):
    run_ranks(move_leaves, world_size)
