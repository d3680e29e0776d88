"""A rank that does not come: the report of the stall, and the end of every wait at the group's timeout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, CollectiveTimeout, GroupUnusable, RankFailed
from phalanx.testing import await_release, reached
from tests.faults._watch import telling, wait_until_asleep

TIMEOUT_S = 0.5
MEET_S = 60  # a busy machine may start one rank much later
LATE_BY_S = 1.0  # after the deadline, a waiting rank has to have raised by then


def wait_for_future(work):
    with pytest.raises(RuntimeError, match="CollectiveTimeout: rank 0"):
        work.get_future().wait()
    raise work.exception()


OPERATIONS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "large reduce_scatter": lambda: dist.reduce_scatter(torch.ones(1 << 18), list(torch.ones(2, 1 << 18))),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S)),
    "recv": lambda: dist.recv(torch.empty(4), src=1),
    "recv from any": lambda: dist.recv(torch.empty(4)),
    "large send": lambda: dist.send(torch.ones(1 << 20), dst=1),
    "irecv wait": lambda: dist.irecv(torch.empty(4), src=1).wait(),
    "async wait": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "future": lambda: wait_for_future(dist.all_reduce(torch.ones(4), async_op=True)),
    "object": lambda: dist.broadcast_object_list([None], src=1),
    "new_group": lambda: dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S)),
}


def wait_for_rank_one(rank, world_size, operation):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    reached("up")
    if rank == 1:
        return await_release("peers are done")
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        OPERATIONS[operation]()
    reached("raised", (caught.value, time.monotonic() - start))
    return None


def wait_for_a_stopped_rank(rank, world_size):
    reached("up")
    if rank == 2:
        await_release("go on")
    with telling("raised", CollectiveTimeout):
        dist.all_reduce(torch.ones(4))


def wait_for_rank_one_in_vain_or_not(rank, world_size, operation):
    dist.barrier()
    if rank == 1:
        await_release("come")
        return dist.send(torch.ones(4), dst=0) if operation == "recv" else dist.all_reduce(torch.ones(4))
    reached("waits")
    return OPERATIONS[operation]()


def stand_elsewhere(rank, world_size):
    reached("up")
    if rank == 0:
        dist.barrier()
    elif rank == 1:
        dist.recv(torch.empty(4), src=2)
    else:
        threading.Event().wait()


def come_late_to_a_mismatch(rank, world_size):
    if rank == 2:
        await_release("come")
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        if rank == 0:
            dist.broadcast(torch.ones(4), src=0)
        else:
            dist.all_reduce(torch.ones(4))
    took_s = time.monotonic() - start
    reached("raised")
    await_release("all have raised")
    with pytest.raises(GroupUnusable, match="destroy_process_group"):
        dist.barrier()
    return caught.value, took_s


def exit_at_once_on_a_mismatch(rank, world_size):
    if rank == 0:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def compute_beside_a_stall(rank, world_size):
    reached("up")
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        await_release("go on")
        work.wait()
    else:
        await_release("go on")
        dist.all_reduce(torch.ones(4))


END_BESIDE_A_STALL = """
import sys, time
import torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("phalanx", init_method=sys.argv[1], rank=rank, world_size=2)
groups = [dist.new_group() for _ in range(8)]
if rank == 1:
    sys.stdin.read()
    sys.exit()
works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
until = time.monotonic() + 0.5
while time.monotonic() < until:  # with the interpreter's lock, which the reports want
    pass
"""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_wait_ends_by_the_timeout_and_names_who_is_missing(spawn_ranks, operation):
    with spawn_ranks(wait_for_rank_one, 2, operation, group_timeout_s=MEET_S) as ranks:
        ranks.wait_until_reached("up")
        [(error, took_s)] = ranks.wait_until_reached("raised", ranks=[0])
        ranks.release("peers are done", ranks=[1])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert error.missing == (1,)
    assert "rank 0: " in str(error)
    assert "rank 1" in str(error)
    assert TIMEOUT_S - 0.05 <= took_s < TIMEOUT_S + LATE_BY_S


@pytest.mark.parametrize("operation", ["all_reduce", "recv", "async wait"])
def test_time_in_which_all_ranks_are_stopped_is_nobodys_delay(spawn_ranks, capfd, operation):
    timeout_s = 4.0
    with spawn_ranks(
        wait_for_rank_one_in_vain_or_not, 2, operation, group_timeout_s=timeout_s, env={"PHALANX_STALL_S": "3.5"}
    ) as ranks:
        ranks.wait_until_reached("waits", ranks=[0])
        wait_until_asleep(ranks.pids[0])
        ranks.stop(0)
        ranks.stop(1)
        time.sleep(timeout_s + 0.5)  # the time itself is what counts
        ranks.resume(0)
        ranks.resume(1)
        ranks.release("come", ranks=[1])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert "phalanx:" not in capfd.readouterr().err


def test_a_stopped_rank_is_reported_and_then_ends_the_wait(spawn_ranks, capfd):
    timeout_s = 1.5
    with spawn_ranks(wait_for_a_stopped_rank, 3, group_timeout_s=timeout_s, env={"PHALANX_STALL_S": "0.4"}) as ranks:
        ranks.wait_until_reached("up")
        ranks.stop(2)
        stopped_at = time.monotonic()
        pid = ranks.pids[2]
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.resume(2)
        ranks.release("go on", ranks=[2])
        outcomes = ranks.join(20)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, CollectiveTimeout), outcome
        assert outcome.error.missing == (2,)
        assert outcome.error.op == "all_reduce"
        assert f"rank 2 (pid {pid}) has not called #1" in str(outcome.error)
        assert outcome.when_s - stopped_at < timeout_s + LATE_BY_S
    # The third comes late to a group that has ended, and is told so at once.
    assert isinstance(outcomes[2].error, (RankFailed, CollectiveTimeout)), outcomes[2]
    printed = capfd.readouterr().err
    for rank in (0, 1):
        place = re.search(
            rf"phalanx: rank {rank}: all_reduce #1 of group .* at .*test_stalls.py:\d+ has waited", printed
        )
        assert place, printed
    assert "s for rank 2 (timeout 1.5 s)" in printed
    assert f"rank 2 (pid {pid}) has not called #1; it has made no collective here yet" in printed


def test_a_stall_report_tells_where_each_missing_rank_stands(spawn_ranks, capfd):
    with spawn_ranks(stand_elsewhere, 3, group_timeout_s=30, env={"PHALANX_STALL_S": "0.5"}) as ranks:
        ranks.wait_until_reached("up")
        for rank in (0, 1):
            wait_until_asleep(ranks.pids[rank])
        printed, deadline = "", time.monotonic() + 10
        while "phalanx: rank 0: barrier" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        pids = ranks.pids
    assert "s for ranks 1, 2 (timeout 30.0 s)" in printed
    assert re.search(rf"rank 1 \(pid {pids[1]}\) waits in recv of group .* at .*test_stalls.py:\d+", printed), printed
    assert f"rank 2 (pid {pids[2]}) has not called #1" in printed


def test_a_stall_is_reported_though_nobody_waits_for_the_operation_yet(spawn_ranks, capfd):
    with spawn_ranks(compute_beside_a_stall, 2, group_timeout_s=30, env={"PHALANX_STALL_S": "0.2"}) as ranks:
        ranks.wait_until_reached("up")
        printed, deadline = "", time.monotonic() + 10
        while "has waited" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        pids = ranks.pids
        ranks.release("go on")
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    where = r"phalanx: rank 0: all_reduce #1 of group 'default' at \S*test_stalls.py:\d+"
    assert re.search(rf"^{where} has waited \S+ s for rank 1 \(timeout 30.0 s\)$", printed, re.MULTILINE), printed
    assert f"  rank 1 (pid {pids[1]}) has not called #1; it has made no collective here yet\n" in printed


def test_a_script_ends_in_order_while_stalls_are_reported(forked, tmp_path):
    """A native thread that asked for the interpreter's lock when that is gone would end the process with an abort."""
    command = ["-c", END_BESIDE_A_STALL, f"file://{tmp_path}/store"]
    env = {**os.environ, "PHALANX_STALL_S": "0.1"}
    waits, goes_on = os.pipe()
    with (
        os.fdopen(waits) as stdin,
        os.fdopen(goes_on, "w") as peers_stdin,
        forked.start(*command, "1", stdin=stdin.fileno(), env=env) as peer,
    ):
        ended = subprocess.run(
            [sys.executable, *command, "0"], env=env, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        peers_stdin.close()
        peer.wait(60)
    assert ended.returncode == 0, ended.stderr
    assert "all_reduce #1 of group" in ended.stderr


def test_a_mismatch_does_not_wait_for_a_late_rank_which_gets_the_same_error(spawn_ranks):
    with spawn_ranks(come_late_to_a_mismatch, 3, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.release("come", ranks=[2])
        ranks.wait_until_reached("raised", ranks=[2])
        ranks.release("all have raised")
        outcomes = ranks.join(20)
    for outcome in outcomes:
        error, took_s = outcome.value
        assert took_s < LATE_BY_S, outcome
        assert f"rank {outcome.rank}: " in str(error)
        table = str(error)
        assert re.search(r"rank 0: broadcast\(float32, count=4, src=0\) at .*test_stalls.py:\d+", table), table
        assert re.search(r"rank 1: all_reduce\(float32, count=4, op=SUM\) at .*test_stalls.py:\d+", table), table
    assert "rank 2: has not called yet" in str(outcomes[0].value[0])


def test_a_mismatch_is_one_on_every_rank_though_ranks_exit_because_of_it(run_ranks):
    outcomes = run_ranks(exit_at_once_on_a_mismatch, 4, group_timeout_s=30, timeout_s=20, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatch), outcome
