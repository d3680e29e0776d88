"""Ctrl-C, abort and destroy end waits; a group that has ended says so; the same processes can begin again."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import GroupAborted, GroupUnusable, PhalanxError, RankFailed
from phalanx.testing import await_release, reached
from tests.faults._watch import NAMED_WITHIN_S, wait_until_asleep
from tests.hosts._layouts import layout_name

LAYOUTS = [(), (2, 1), (1, 2)]


def within_s(hosts):
    """Return within which time every rank must have been told."""
    return 2 * NAMED_WITHIN_S if hosts else NAMED_WITHIN_S


OPERATIONS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "behind an async one": lambda: (dist.barrier(async_op=True), dist.all_reduce(torch.ones(4))),
    "async wait": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.empty(4), src=2),
    "irecv wait": lambda: dist.irecv(torch.empty(4), src=2).wait(),
}


def wait_for_rank_two(rank, world_size, operation):
    reached("up")
    if rank == 2:
        await_release("peers are done")
        return
    try:
        OPERATIONS[operation]()
    except BaseException:
        reached("raised")
        raise


def survive_a_failure(rank, world_size):
    reached("up")
    if rank == 1:
        threading.Event().wait()
    with pytest.raises(RankFailed):
        dist.barrier()
    messages = []
    for operation in (dist.barrier, lambda: dist.send(torch.ones(1), dst=1), lambda: dist.barrier(async_op=True)):
        with pytest.raises(GroupUnusable) as caught:
            operation()
        messages.append(str(caught.value))
    return messages


def abort_from_another_thread(rank, world_size, operation):
    def abort():
        await_release("abort")
        dist.group.WORLD.abort()

    if rank == 0:
        threading.Thread(target=abort, daemon=True).start()  # its start is a wait, too
    reached("up")
    if rank == 2:
        await_release("peers are done")
    try:
        OPERATIONS[operation]()
    except PhalanxError:
        reached("raised")
        raise


def start_large():
    return dist.all_reduce(torch.ones(1 << 20), async_op=True)


UNFINISHED = {
    "isend": lambda: dist.isend(torch.ones(1 << 20), dst=1),
    "irecv": lambda: dist.irecv(torch.empty(4), src=1),
    "async": lambda: dist.all_reduce(torch.ones(4), async_op=True),
    "two large async": lambda: (start_large(), start_large())[1],
}


def destroy_with_an_unfinished_operation(rank, world_size, operation):
    if rank == 1:
        await_release("rank 0 is gone")
        return None
    work = UNFINISHED[operation]()
    begin = time.monotonic()
    dist.destroy_process_group()
    took_s = time.monotonic() - begin
    with pytest.raises(PhalanxError):
        work.wait()
    reached("gone")
    return took_s


def begin_again(rank, world_size, folder):
    """Fail, destroy, initialise again, three times in the same process, with different failures."""
    totals = []
    for round_, fail in enumerate([mismatch, time_out, abort]):
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{folder}/{round_}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        with pytest.raises(PhalanxError):
            fail(rank)
        dist.destroy_process_group()
    dist.init_process_group("phalanx", init_method=f"file://{folder}/last", rank=rank, world_size=world_size)
    for num_elems in (1, 1 << 18):
        tensor = torch.full((num_elems,), float(rank + 1))
        dist.all_reduce(tensor)
        totals.append(tensor[-1].item())
    return totals


def mismatch(rank):
    dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(4))


def time_out(rank):
    dist.monitored_barrier(timeout=timedelta(seconds=0.3)) if rank == 0 else dist.recv(torch.empty(4), src=0)


def abort(rank):
    dist.group.WORLD.abort()
    dist.barrier()


def go_on_without_the_dead(rank, world_size, folder):
    if rank == 1:
        reached("up")
        threading.Event().wait()
    reached("up")
    with pytest.raises(RankFailed):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("phalanx", init_method=f"file://{folder}/again", rank=rank // 2, world_size=2)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("hosts", LAYOUTS, ids=layout_name)
def test_ctrl_c_ends_a_wait_and_the_peers_are_told(spawn_ranks, hosts, operation):
    with spawn_ranks(wait_for_rank_two, 3, operation, hosts=hosts, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        for rank in (0, 1):
            wait_until_asleep(ranks.pids[rank])
        pressed_at = time.monotonic()
        ranks.kill(0, signal.SIGINT)
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.release("peers are done", ranks=[2])
        interrupted, peer, _ = ranks.join(20)
    assert isinstance(interrupted.error, KeyboardInterrupt), interrupted
    assert interrupted.when_s - pressed_at < within_s(hosts)
    if operation in ("recv", "irecv wait") and not hosts:  # rank 1 waits for rank 2 alone, but its group has ended
        assert isinstance(peer.error, GroupAborted), peer
    assert isinstance(peer.error, (GroupAborted, RankFailed)), peer
    assert peer.error.ranks == (0,)
    assert peer.when_s - pressed_at < within_s(hosts)


def test_a_group_that_failed_says_so_in_every_later_call(spawn_ranks):
    with spawn_ranks(survive_a_failure, 2, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[0])
        ranks.kill(1)
        survivor, victim = ranks.join(20)
    assert survivor.ok, survivor
    for message in survivor.value:
        assert "can no longer be used" in message
        assert f"rank 1 (pid {victim.pid})" in message
        assert "init_process_group()" in message


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("hosts", LAYOUTS, ids=layout_name)
def test_abort_from_another_thread_ends_the_waits_of_all_ranks(spawn_ranks, hosts, operation):
    options = {"hosts": hosts, "init_method": "tcp", "group_timeout_s": 30}  # the store goes with rank 0
    with spawn_ranks(abort_from_another_thread, 3, operation, **options) as ranks:
        ranks.wait_until_reached("up")
        for rank in (0, 1):
            wait_until_asleep(ranks.pids[rank])
        aborted_at = time.monotonic()
        ranks.release("abort", ranks=[0])
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.release("peers are done", ranks=[2])
        outcomes = ranks.join(20)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, GroupAborted), outcome
        assert outcome.error.ranks == (0,)
        assert outcome.when_s - aborted_at < within_s(hosts)


@pytest.mark.parametrize("operation", UNFINISHED)
@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=layout_name)
def test_destroy_returns_promptly_with_an_unfinished_operation(spawn_ranks, hosts, operation):
    with spawn_ranks(destroy_with_an_unfinished_operation, 2, operation, hosts=hosts, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("gone", ranks=[0])
        ranks.release("rank 0 is gone", ranks=[1])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert outcomes[0].value < 3


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=layout_name)
def test_the_same_processes_can_begin_again_after_errors(run_ranks, tmp_path, hosts):
    totals = run_ranks(begin_again, 2, str(tmp_path), hosts=hosts, init=False, timeout_s=30)
    assert totals == [[3.0, 3.0]] * 2


def test_survivors_can_begin_again_without_the_dead(spawn_ranks, tmp_path):
    with spawn_ranks(go_on_without_the_dead, 3, str(tmp_path), group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        ranks.kill(1)
        outcomes = ranks.join(20)
    assert [outcomes[0].value, outcomes[2].value] == [2.0, 2.0], outcomes
