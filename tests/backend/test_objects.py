"""Python objects, and the barrier that names who did not come."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout, GroupUnusable
from phalanx.testing import await_release, reached

pytestmark = pytest.mark.kept_ranks


def thing(rank):
    """Return an object whose pickle has another length on every rank."""
    return {"rank": rank, "text": "x" * 100 * rank, "nested": [(rank, None), {1, 2}], "tensor": torch.arange(rank)}


def same(one, other):
    return str(one) == str(other)


def move_objects(rank, world_size):
    last = world_size - 1
    gathered = [None] * world_size
    dist.all_gather_object(gathered, thing(rank))
    assert same(gathered, [thing(r) for r in range(world_size)])
    shared = [thing(7), "second", 3] if rank == last else [None] * 3
    dist.broadcast_object_list(shared, last)
    assert same(shared, [thing(7), "second", 3])
    collected = [None] * world_size if rank == 0 else None
    dist.gather_object(thing(rank), collected, 0)
    assert rank != 0 or same(collected, gathered)
    received = [None]
    dist.scatter_object_list(received, [thing(r + 1) for r in range(world_size)] if rank == 0 else None, 0)
    assert same(received, [thing(rank + 1)])
    if world_size > 1:
        if rank == 0:
            dist.send_object_list([thing(3), "end"], 1)
        if rank == 1:
            objects = [None, None]
            assert dist.recv_object_list(objects, 0) == 0
            assert same(objects, [thing(3), "end"])
    group = dist.new_group([0]) if world_size == 1 else dist.new_group([world_size - 1, 0], sort_ranks=False)
    if rank in (0, last):
        inside = [None] * group.size()
        dist.all_gather_object(inside, rank, group=group)
        assert inside == ([0] if world_size == 1 else [last, 0])


def pass_monitored_barrier(rank, world_size):
    for _ in range(3):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    group = dist.new_group(list(range(min(2, world_size))))
    if rank < 2:
        dist.monitored_barrier(group)
    with pytest.raises(ValueError, match=f"rank {rank}: monitored_barrier at .*: timeout must be at least 0 s"):
        dist.monitored_barrier(timeout=timedelta(seconds=-5))
    dist.monitored_barrier()  # the group still works
    return True


def miss_monitored_barrier(rank, world_size, present, wait_all_ranks):
    if rank not in present:
        await_release("end")
        return
    start = time.monotonic()
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=wait_all_ranks)
    except RuntimeError as error:
        took_s = time.monotonic() - start
        try:
            dist.all_reduce(torch.ones(1))
        except GroupUnusable as later:
            after = str(later)
        reached("failed", (type(error), str(error), getattr(error, "ranks", None), took_s, after))
        return
    raise AssertionError("it passed")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_objects_travel_by_every_function_that_torch_has(run_ranks, world_size):
    run_ranks(move_objects, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_monitored_barrier_that_all_reach_is_a_barrier(run_ranks, world_size):
    assert run_ranks(pass_monitored_barrier, world_size) == [True] * world_size


@pytest.mark.parametrize(
    ("present", "wait_all_ranks", "named"),
    [([0], False, {1}), ([0], True, {1, 2, 3}), ([0, 2], True, {1, 3}), ([0, 1, 2], False, {3})],
)
def test_a_monitored_barrier_names_who_did_not_come(spawn_ranks, present, wait_all_ranks, named):
    with spawn_ranks(miss_monitored_barrier, 4, present, wait_all_ranks) as ranks:
        for kind, text, missing, took_s, after in ranks.wait_until_reached("failed", present):
            assert kind is CollectiveTimeout
            assert set(missing) == named, text
            assert "monitoredBarrier" in text
            assert all(str(rank) in text for rank in named)
            assert took_s < 10
            assert "can no longer be used" in after
            assert "init_process_group" in after
        ranks.release("end", ranks=[rank for rank in range(4) if rank not in present])
        assert [str(outcome) for outcome in ranks.join(30) if not outcome.ok] == []
