"""Forking after initialisation: children are no ranks, and their lives do not touch the parents'."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from phalanx import GroupUnusable
from phalanx.testing import await_release, reached
from tests.faults._watch import wait_until_asleep
from tests.hosts._layouts import layout_name


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


def fork_while_another_thread_is_inside(rank, world_size):
    """The child does not have the threads that hold the group's locks."""
    total = torch.ones(3)
    if rank == 1:
        await_release("the children have ended")
        dist.all_reduce(total)
        dist.all_reduce(torch.ones(3))
        dist.send(total, 0)
        return total.tolist(), {}
    pending, got = [], torch.zeros(3)

    def wait():
        dist.all_reduce(total)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until_asleep(waiting.native_id)
    pending.append(dist.all_reduce(torch.ones(3), async_op=True))
    pending.append(dist.irecv(got, 1))
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "async": lambda: dist.all_reduce(torch.ones(3), async_op=True),
        "wait": pending[0].wait,
        "brief wait": lambda: pending[0].wait(timedelta(seconds=20)),
        "future": lambda: pending[0].get_future().wait(),
        "send": lambda: dist.send(torch.ones(3), 1),
        "message": pending[1].wait,
        "future of a message": lambda: pending[1].get_future().wait(),
    }
    answers = {name: in_a_child(call) for name, call in calls.items()}
    answers["destroy"] = in_a_child(begin_in_a_child)
    reached("the children have ended")
    waiting.join()
    for work in pending:
        work.wait()
    return total.tolist(), answers


def begin_in_a_child():
    dist.destroy_process_group()
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.full((70_000,), 3.0)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    dist.destroy_process_group()
    return tensor[0].item()


def fork_from_several_threads(rank, world_size, num_children):
    """Threads fork while others of the process are in collectives and messages, perhaps in the middle of a lock.

    The process makes its first tensor before: that initialises statics of libc10, and a child that is forked in the
    middle of it waits for ever in its own first tensor, whatever the backend does.
    """
    dist.all_reduce(torch.ones(1))
    ended = threading.Event()
    answers = []

    def fork():
        for _ in range(num_children):
            answers.append(in_a_child(lambda: dist.all_reduce(torch.ones(1))))

    def message():
        got = torch.zeros(100)
        while True:
            sent = dist.isend(torch.ones(100), 1 - rank, tag=1)
            dist.irecv(got, 1 - rank, tag=1).get_future().wait()
            sent.wait()
            is_last = ended.is_set()
            dist.send(torch.tensor([float(is_last)]), 1 - rank, tag=2)
            dist.recv(got[:1], 1 - rank, tag=2)
            if is_last or got[0]:  # the other rank decides by the same two
                break

    threads = [threading.Thread(target=fork) for _ in range(2)] + [threading.Thread(target=message)]
    for thread in threads:
        thread.start()
    flag = torch.zeros(1)
    while flag.item() < world_size:  # both ranks' children have ended
        flag.fill_(float(not any(thread.is_alive() for thread in threads[:2])))
        dist.all_reduce(flag, async_op=True).get_future().wait()
        dist.all_reduce(torch.ones(100))
    ended.set()
    threads[2].join()
    return len(answers), {type(answer) for answer in answers}


def destroy_in_a_child(rank, world_size):
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

    def destroy():
        dist.destroy_process_group()
        return "destroyed"

    answers = in_a_child(destroy), in_a_child(begin_in_a_child)
    total = torch.full((70_000,), 1.0)
    dist.all_reduce(total)
    return answers, total.unique().tolist()


def end_children_every_way(rank, world_size):
    """A child that exits, with and without Python's clean-up, or is killed, is not a dead rank to the others."""
    dist.barrier()
    ends = []
    for how in ("interpreter", "exit", "kill"):
        pid = os.fork()
        if pid == 0:
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "exit":
                os._exit(3)
            ctypes.pythonapi.Py_Exit(0)  # as sys.exit() where nobody catches it
        work = dist.all_reduce(torch.ones(50_000), async_op=True)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        work.wait()
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 2.0], how
    return ends


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


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=layout_name)
def test_a_child_that_another_thread_forked_raises_and_never_hangs(spawn_ranks, hosts):
    with spawn_ranks(fork_while_another_thread_is_inside, 2, hosts=hosts, group_timeout_s=60) as ranks:
        ranks.wait_until_reached("the children have ended", ranks=[0])
        ranks.release("the children have ended", ranks=[1])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    total, answers = outcomes[0].value
    assert total == [2.0] * 3
    assert answers.pop("destroy") == 3.0
    for name, error in answers.items():
        assert isinstance(error, GroupUnusable), (name, error)
        assert "forked from rank 0" in str(error), name


def test_children_of_several_threads_under_load(run_ranks):
    num_children = 200 if os.environ.get("PHALANX_TEST_LONG") == "1" else 5
    for answer in run_ranks(fork_from_several_threads, 2, num_children):
        assert answer == (2 * num_children, {GroupUnusable})


def test_a_forked_child_may_destroy_its_copy_and_begin_anew(run_ranks):
    assert run_ranks(destroy_in_a_child, 2) == [(("destroyed", 3.0), [2.0])] * 2


def test_the_end_of_a_child_disturbs_nobody(run_ranks):
    assert run_ranks(end_children_every_way, 2) == [[0, 3, -signal.SIGKILL]] * 2


@pytest.mark.parametrize("world_size", [1])
def test_a_world_of_one_can_fork_too(run_ranks, world_size):
    assert run_ranks(load_with_workers, world_size) == [2 * 8 * 15.5]
