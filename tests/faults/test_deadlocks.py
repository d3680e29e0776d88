"""Ranks that wait for each other's messages in a circle: reports and errors say so, and only if it is certain."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout, PhalanxError, RankFailed
from phalanx.testing import await_release, reached
from tests.faults._watch import wait_until_asleep

LARGE = 1 << 20  # elements: more than a pair's ring holds


def receive_from_the_next(rank, world_size):
    dist.recv(torch.empty(4), src=(rank + 1) % world_size)


def send_to_the_next(rank, world_size):
    dist.send(torch.ones(LARGE), dst=(rank + 1) % world_size)


def wait_in_a_circle(rank, world_size, wait):
    with pytest.raises(CollectiveTimeout) as caught:
        wait(rank, world_size)
    return caught.value


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("wait", [receive_from_the_next, send_to_the_next])
def test_a_circle_of_messages_is_called_a_deadlock(spawn_ranks, capfd, wait, world_size):
    env = {"PHALANX_STALL_S": "0.5"}
    with spawn_ranks(wait_in_a_circle, world_size, wait, group_timeout_s=1.5, env=env) as ranks:
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    op = "recv" if wait is receive_from_the_next else "send"
    for rank, outcome in enumerate(outcomes):
        circle = [(rank + i) % world_size for i in range(world_size)]
        assert [one.rank for one in outcome.value.failure.circle] == circle
        said = str(outcome.value)
        assert "This is a deadlock" in said
        assert "larger timeout" not in said
        for one in circle:
            line = rf"^  rank {one} waits for rank {(one + 1) % world_size} in {op} of group 'default' at \S+\.py:\d+$"
            assert re.search(line, said, re.MULTILINE), said
    printed = capfd.readouterr().err
    assert re.search(r"^phalanx: rank \d: .* has waited .*\nThis is a deadlock", printed, re.MULTILINE), printed


def wait_for_one_that_computes(rank, world_size):
    if rank == 2:
        return await_release("peers are done")
    with pytest.raises(CollectiveTimeout) as caught:
        receive_from_the_next(rank, world_size)
    reached("raised")
    return caught.value


def test_a_chain_that_ends_at_a_computing_rank_is_no_deadlock(spawn_ranks):
    with spawn_ranks(wait_for_one_that_computes, 3, group_timeout_s=1) as ranks:
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.release("peers are done", ranks=[2])
        outcomes = ranks.join(20)
    for outcome in outcomes[:2]:
        assert outcome.value.failure.circle == ()
        assert "is a deadlock" not in str(outcome.value)
        assert "larger timeout" in str(outcome.value)


def wait_beside_a_circle(rank, world_size):
    """Ranks 1 and 2 wait for each other, and rank 0 for rank 1."""
    with pytest.raises(CollectiveTimeout) as caught:
        dist.recv(torch.empty(4), src={0: 1, 1: 2, 2: 1}[rank])
    return caught.value


def test_who_waits_for_a_rank_of_a_circle_is_not_part_of_it(run_ranks):
    beside, *within = run_ranks(wait_beside_a_circle, 3, group_timeout_s=1)
    assert beside.failure.circle == ()
    assert "is a deadlock" not in str(beside)
    assert [[one.rank for one in error.failure.circle] for error in within] == [[1, 2], [2, 1]]


def leave_out_a_new_group(rank, world_size):
    if rank == 1:
        await_release("the others wait")
        with pytest.raises(CollectiveTimeout) as caught:
            dist.barrier()
        return caught.value
    with pytest.raises(RankFailed):
        dist.new_group()
    return None


def test_a_rank_that_has_left_out_a_new_group_is_told_that_every_rank_calls_it(spawn_ranks, capfd):
    with spawn_ranks(leave_out_a_new_group, 3, group_timeout_s=2, env={"PHALANX_STALL_S": "0.2"}) as ranks:
        printed, deadline = "", time.monotonic() + 50
        while not all(f"rank {rank}: new_group" in printed for rank in (0, 2)) and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        ranks.release("the others wait", ranks=[1])
        outcomes = ranks.join(20)
    said = str(outcomes[1].value)
    assert "waits in new_group at" in said, outcomes
    assert "Call new_group on every rank of the world, in the same order, also on ranks that are not in" in said
    assert "larger timeout" not in said


def answer_a_question(rank, world_size):
    """Rank 0 asks and waits for the answer; rank 1 is stopped while it waits for the question."""
    reached("up")
    if rank == 0:
        await_release("ask")
        dist.send(torch.ones(4), dst=1)
    dist.recv(torch.empty(4), src=1 - rank)
    if rank == 1:
        dist.send(torch.ones(4), dst=0)


def exchange_with_isend(rank, world_size):
    """Rank 1 is stopped while it waits for rank 0, and has not sent all that rank 0 waits for."""
    reached("up")
    if rank == 1:
        work = dist.isend(torch.ones(LARGE), dst=0)
    else:
        await_release("ask")
    dist.recv(torch.empty(4 if rank else LARGE), src=1 - rank)
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        work.wait()


@pytest.mark.parametrize("exchange", [answer_a_question, exchange_with_isend])
def test_a_stopped_rank_that_would_go_on_is_no_deadlock(spawn_ranks, capfd, exchange):
    with spawn_ranks(exchange, 2, group_timeout_s=30, env={"PHALANX_STALL_S": "0.3"}) as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[1])
        time.sleep(0.2)  # it has said where it waits
        ranks.stop(1)
        ranks.release("ask", ranks=[0])
        printed, deadline = "", time.monotonic() + 10
        while "phalanx: rank 0: recv" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        ranks.resume(1)
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert "phalanx: rank 0: recv" in printed
    assert "rank 1" in printed
    assert "is a deadlock" not in printed


def make_a_group_alone(rank, world_size):
    reached("up")
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"new_group at \S+: rank 1 did not come .*Call new_group on"):
            dist.new_group([0, 1], timeout=timedelta(seconds=1.4))
    else:
        with pytest.raises(PhalanxError):
            dist.all_reduce(torch.ones(4))


def test_a_rank_that_makes_a_group_alone_says_so_and_so_do_the_others(spawn_ranks, capfd):
    with spawn_ranks(make_a_group_alone, 2, group_timeout_s=2, env={"PHALANX_STALL_S": "0.6"}) as ranks:
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    printed = capfd.readouterr().err
    head = r"^phalanx: rank 0: new_group at \S+test_deadlocks\.py:\d+ has waited \S+ s for rank 1 \(timeout \S+ s\)$"
    assert re.search(head, printed, re.MULTILINE), printed
    assert "  rank 1 has not joined\nCall new_group on every rank, in the same order, member or not.\n" in printed
    assert re.search(r"rank 0 \(pid \d+\) waits in new_group at \S+test_deadlocks\.py:\d+", printed), printed


def make_groups_in_another_order(rank, world_size):
    """Rank 1 has made a group that rank 0 has not, and torch names groups by their number."""
    if rank == 1:
        dist.new_group([1])
    reached("up")
    await_release("go")
    dist.new_group([0, 1], timeout=timedelta(seconds=60))


def test_ranks_that_wait_in_groups_of_different_names_are_told_so(spawn_ranks, capfd):
    with spawn_ranks(make_groups_in_another_order, 2, env={"PHALANX_STALL_S": "2"}) as ranks:
        ranks.wait_until_reached("up")
        ranks.release("go")
        # Rank 0, the first that waits, says it again if rank 1 has not told yet where it waits.
        waits = r"it waits in new_group at \S+test_deadlocks\.py:\d+, for group '\w+' and not '\w+'"
        row = rf"  rank 1 has not joined: {waits}\n"
        printed, deadline = "", time.monotonic() + 50
        while not (found := re.search(row, printed)) and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
    assert found, printed
    assert "wait in groups of different names, which never meet. Call new_group on every rank of the world" in printed


def make_groups_that_overlap(rank, world_size):
    """Rank 1 waits for rank 0 in one group, and rank 2 for rank 1 in the next: both will meet."""
    reached("up")
    if rank == 0:
        await_release("go")
    for ranks in ([0, 1], [1, 2]):
        dist.new_group(ranks, timeout=timedelta(seconds=60))


def test_ranks_that_will_meet_are_not_told_to_change_the_order(spawn_ranks, capfd):
    with spawn_ranks(make_groups_that_overlap, 3, env={"PHALANX_STALL_S": "1"}) as ranks:
        ranks.wait_until_reached("up")
        printed, deadline = "", time.monotonic() + 50
        while "rank 2: new_group" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        ranks.release("go", ranks=[0])
        assert all(outcome.ok for outcome in ranks.join(30))
    assert "rank 1 has not joined" in printed
    assert "different names" not in printed
