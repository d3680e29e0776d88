"""Forking after initialisation: children are no ranks, and their lives do not touch the parents'."""

from __future__ import annotations

import os
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from phalanx import GroupUnusable


def in_a_child(function):
    """Fork, run `function` in the child, return what it returned; the child ends as Python programs do."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            answer = function()
        except BaseException as error:
            answer = error
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pickle.load(pipe)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return answer


def load_with_workers(rank, world_size):
    """As in every training script: workers are forked while the group exists and operations are on their way."""
    data = TensorDataset(torch.arange(32.0) + 100 * rank)
    total, totals = 0.0, torch.zeros(1)
    pending = dist.all_reduce(torch.ones(100_000), async_op=True)
    future = pending.get_future()
    for _ in range(2):
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        for (batch,) in loader:
            mean = batch.mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            total += mean.item()
        del loader
    pending.wait()
    future.wait()
    totals += total
    dist.all_reduce(totals)
    return totals.item()


def call_in_a_child(rank, world_size):
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()  # every thread of ours is up
    sent = dist.isend(torch.ones(3), 1 - rank)
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "barrier": dist.barrier,
        "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "send": lambda: dist.send(torch.ones(3), 1 - rank),
        "message in flight": lambda: dist.recv(torch.ones(3), 1 - rank),
    }
    answers = {name: in_a_child(call) for name, call in calls.items()}
    dist.recv(torch.zeros(3), 1 - rank)
    sent.wait()
    total = torch.ones(3)
    dist.all_reduce(total)
    return answers, total.tolist()


def destroy_in_a_child(rank, world_size):
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

    def destroy():
        dist.destroy_process_group()
        return "destroyed"

    def begin_anew():
        dist.destroy_process_group()
        dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.full((70_000,), 3.0)
        dist.all_reduce(tensor)
        value = dist.all_reduce(tensor, async_op=True).get_future().wait()[0][0].item()
        dist.destroy_process_group()
        return value

    answers = in_a_child(destroy), in_a_child(begin_anew)
    total = torch.full((70_000,), 1.0)
    dist.all_reduce(total)
    return answers, total.unique().tolist()


def end_children_every_way(rank, world_size):
    """A child that exits, with and without Python's clean-up, or is killed, is not a dead rank to the others."""
    dist.barrier()
    for how in ("interpreter", "exit", "kill"):
        pid = os.fork()
        if pid == 0:
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "exit":
                os._exit(3)
            import gc

            dist.distributed_c10d._world.pg_map.clear()
            gc.collect()
            os._exit(0)
        work = dist.all_reduce(torch.ones(50_000), async_op=True)
        os.waitpid(pid, 0)
        work.wait()
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 2.0], how
    return "alive"


def test_data_loader_workers_live_beside_a_group(run_ranks):
    # Two passes over 8 batches; their means, averaged over the ranks, sum up to 2 * 8 * (15.5 + 50) on each rank.
    assert run_ranks(load_with_workers, 2) == [2 * 2 * 8 * (15.5 + 50)] * 2


def test_a_forked_child_that_calls_gets_a_clear_error(run_ranks):
    for rank, (answers, total) in enumerate(run_ranks(call_in_a_child, 2)):
        assert total == [2.0] * 3
        for name, error in answers.items():
            assert isinstance(error, GroupUnusable), (name, error)
            assert f"forked from rank {rank}" in str(error)
            assert "init_process_group in the child" in str(error)


def test_a_forked_child_may_destroy_its_copy_and_begin_anew(run_ranks):
    assert run_ranks(destroy_in_a_child, 2) == [(("destroyed", 3.0), [2.0])] * 2


def test_the_end_of_a_child_disturbs_nobody(run_ranks):
    assert run_ranks(end_children_every_way, 2) == ["alive", "alive"]


@pytest.mark.parametrize("world_size", [1])
def test_a_world_of_one_can_fork_too(run_ranks, world_size):
    assert run_ranks(load_with_workers, world_size) == [2 * 8 * 15.5]
