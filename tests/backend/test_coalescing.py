"""Several operations as one: the coalescing manager, coalesced calls, and torch's functional collectives."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from tests.backend._calls import check_equal, gloo_group, values

pytestmark = pytest.mark.kept_ranks

SHAPES = [(5,), (3, 4), (0,), (40_001,), (1,)]
CPU = torch.device("cpu")


def inputs(rank, scale=1):
    return [values(rank * 97 + i, (shape[0] * scale, *shape[1:]), torch.float32) for i, shape in enumerate(SHAPES)]


def reduced(world_size, scale=1):
    return [sum(parts) for parts in zip(*(inputs(r, scale) for r in range(world_size)), strict=True)]


def check_all(got, want, what):
    for g, w in zip(got, want, strict=True):
        check_equal(g, w, what)


def coalesce(rank, world_size, device, async_ops):
    def run(calls):
        """As users write it: the calls inside look blocking, or are asked for a work that nobody keeps."""
        with c10d._coalescing_manager(device=device, async_ops=async_ops) as works:
            for call in calls:
                call()
        if async_ops:
            works.wait()

    inner = {"async_op": True} if device is not None and async_ops else {}
    tensors = inputs(rank)
    run([functools.partial(dist.all_reduce, t, **inner) for t in tensors])
    check_all(tensors, reduced(world_size), "all_reduce")
    outputs = [torch.zeros(t.shape[0] * world_size, *t.shape[1:]) for t in inputs(rank)]
    run(
        [
            functools.partial(dist.all_gather_into_tensor, o, t, **inner)
            for o, t in zip(outputs, inputs(rank), strict=True)
        ]
    )
    want = [torch.cat(parts) for parts in zip(*(inputs(r) for r in range(world_size)), strict=True)]
    check_all(outputs, want, "all_gather_into_tensor")
    outputs = [torch.zeros_like(t) for t in inputs(rank)]
    wholes = inputs(rank, world_size)
    run([functools.partial(dist.reduce_scatter_tensor, o, t, **inner) for o, t in zip(outputs, wholes, strict=True)])
    want = [t.chunk(world_size)[rank] if t.numel() else t for t in reduced(world_size, world_size)]
    check_all(outputs, want, "reduce_scatter_tensor")
    total = torch.ones(2)
    dist.all_reduce(total)  # the group is as before
    assert total.tolist() == [world_size] * 2


def coalesce_anything(rank, world_size):
    """With a device, operations of different kinds may share a handle, and nothing at all may, too."""
    a, b = torch.full((3,), float(rank)), torch.full((30_000,), float(rank))
    outputs = [torch.zeros(3) for _ in range(world_size)]
    with c10d._coalescing_manager(device=CPU, async_ops=True) as works:
        dist.all_reduce(b, async_op=True)
        dist.broadcast(a, world_size - 1, async_op=True)
        dist.all_gather(outputs, torch.full((3,), float(rank)), async_op=True)
    works.wait()
    with c10d._coalescing_manager(device=CPU, async_ops=True) as nothing:
        pass
    nothing.wait()
    return a.unique().item(), b.unique().item(), [t.unique().item() for t in outputs]


def coalesce_messages(rank, world_size):
    got = [torch.zeros(n) for n in (4, 50_000)]
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    with c10d._coalescing_manager(device=CPU, async_ops=True) as works:
        for tensor in got:
            dist.isend(torch.full_like(tensor, float(rank)), after)
            dist.irecv(tensor, before)
    works.wait()
    return [tensor.unique().item() for tensor in got]


def reduce_lists(rank, world_size):
    tensors = inputs(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers the manager
        dist.all_reduce_coalesced(tensors)
        check_all(tensors, reduced(world_size), "all_reduce_coalesced")
        tensors = inputs(rank)
        future = dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.MAX, async_op=True)
        future.wait()
        want = [torch.stack(parts).amax(0) for parts in zip(*(inputs(r) for r in range(world_size)), strict=True)]
        check_all(tensors, want, "all_reduce_coalesced MAX")
        outputs = [[torch.zeros_like(t) for t in inputs(r)] for r in range(world_size)]
        dist.all_gather_coalesced(outputs, inputs(rank))
        for r, got in enumerate(outputs):
            check_all(got, inputs(r), "all_gather_coalesced")


def call_functional(rank, world_size):
    gloo, results = gloo_group(), []
    for group in (dist.group.WORLD, gloo):
        got = []
        mine = values(rank, (6, world_size), torch.float32)
        whole = values(rank + 50, (2 * world_size, 3), torch.float32)
        got.append(funcol.all_reduce(mine, "sum", group))
        got.append(funcol.all_reduce(mine.t(), "max", group))
        got.append(funcol.broadcast(mine, world_size - 1, group))
        got.append(funcol.all_gather_tensor(mine, gather_dim=0, group=group))
        got.append(funcol.all_gather_tensor(mine, gather_dim=1, group=group))
        got.append(funcol.reduce_scatter_tensor(whole, "sum", scatter_dim=0, group=group))
        got.append(funcol.reduce_scatter_tensor(mine, "sum", scatter_dim=1, group=group))
        got.append(funcol.all_to_all_single(whole, None, None, group))
        sent = [(rank + dst) % 3 for dst in range(world_size)]
        received = [(src + rank) % 3 for src in range(world_size)]
        got.append(funcol.all_to_all_single(values(rank, (sum(sent), 2), torch.float32), received, sent, group))
        got += funcol.all_reduce_coalesced([mine, whole], "sum", group)
        got += funcol.all_gather_into_tensor_coalesced([mine, whole], group)
        got += funcol.reduce_scatter_tensor_coalesced([whole, whole * 2], "sum", [0, 0], group)
        got.append(
            funcol.permute_tensor(mine[:, 0].contiguous(), [(r + 1) % world_size for r in range(world_size)], group)
        )
        results.append([t.wait() if hasattr(t, "wait") else funcol.wait_tensor(t) for t in got])
    check_all(*results, "functional")
    return len(results[0])


def wait_for_functional(rank, world_size):
    """The result is pending until somebody looks; dropped ones do no harm."""
    base = torch.full((70_000,), float(rank))
    result = funcol.all_reduce(base, "sum", dist.group.WORLD)
    funcol.all_reduce(base, "sum", dist.group.WORLD)  # dropped
    raw = torch.ops._c10d_functional.all_reduce(base, "sum", dist.group.WORLD.group_name)
    waited = torch.ops._c10d_functional.wait_tensor(raw)
    in_place = base.clone()
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(in_place, "sum", dist.group.WORLD.group_name)
    )
    assert base.unique().item() == rank
    return (result + 0).unique().item(), waited.unique().item(), in_place.unique().item()


def differentiate_functional(rank, world_size):
    leaf = torch.full((2 * world_size,), 1.0 + rank, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    (gathered * torch.arange(gathered.numel())).sum().backward()
    first = leaf.grad.clone()
    leaf.grad = None
    funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, dist.group.WORLD).sum().mul(rank + 1).backward()
    return first.tolist(), leaf.grad.tolist()


@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.parametrize("device", [None, CPU], ids=["no device", "device"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_coalescing_manager_runs_what_it_collected(run_ranks, world_size, device, async_ops):
    run_ranks(coalesce, world_size, device, async_ops)


@pytest.mark.parametrize("world_size", [1, 3])
def test_different_operations_share_a_handle(run_ranks, world_size):
    ranks = [float(r) for r in range(world_size)]
    want = (ranks[-1], sum(ranks), ranks)
    assert run_ranks(coalesce_anything, world_size) == [want] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_share_a_handle(run_ranks, world_size):
    want = [[float((r - 1) % world_size)] * 2 for r in range(world_size)]
    assert run_ranks(coalesce_messages, world_size) == want


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_coalesced_calls_take_lists(run_ranks, world_size):
    run_ranks(reduce_lists, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_functional_collectives_give_what_gloo_gives(run_ranks, world_size):
    assert run_ranks(call_functional, world_size) == [16] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_functional_results_are_waited_for(run_ranks, world_size):
    total = float(sum(range(world_size)))
    assert run_ranks(wait_for_functional, world_size) == [(total, total, total)] * world_size


def test_functional_collectives_have_gradients(run_ranks):
    results = run_ranks(differentiate_functional, 2)
    assert [first for first, _ in results] == [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0]]
    assert [second for _, second in results] == [[1.0, 1.0, 2.0, 2.0]] * 2
