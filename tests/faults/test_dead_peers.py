"""A rank that ends is named, with its process, its end and the operation, by every survivor within a second."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx import RankFailed, _core
from phalanx._env import LAUNCH_VARIABLE
from phalanx.testing import await_release, reached
from tests.faults._watch import NAMED_WITHIN_S, TELLS_ENDING, wait_until_asleep


def wait_for_future(work):
    """What torch's futures raise is a RuntimeError, in C++ and in Python; the work has the error itself."""
    with pytest.raises(RuntimeError, match="RankFailed: rank 0"):
        work.get_future().wait()
    raise work.exception()


# Name in messages, and how a rank waits in it for `victim`.
OPERATIONS = {
    "all_reduce": ("all_reduce", lambda victim: dist.all_reduce(torch.ones(4))),
    "large all_gather": (
        "all_gather",
        lambda victim: dist.all_gather(list(torch.empty(2, 1 << 18)), torch.ones(1 << 18)),
    ),
    "barrier": ("barrier", lambda victim: dist.barrier()),
    "recv": ("recv", lambda victim: dist.recv(torch.empty(4), src=victim)),
    "recv from any": ("recv", lambda victim: dist.recv(torch.empty(4))),
    "large send": ("send", lambda victim: dist.send(torch.ones(1 << 20), dst=victim)),
    "irecv wait": ("recv", lambda victim: dist.irecv(torch.empty(4), src=victim).wait()),
    "async wait": ("all_reduce", lambda victim: dist.all_reduce(torch.ones(4), async_op=True).wait()),
    "future": ("all_reduce", lambda victim: wait_for_future(dist.all_reduce(torch.ones(4), async_op=True))),
}


def stay_away(rank, world_size, operation, victim):
    """All but `victim` wait in the operation; it never comes."""
    reached("up")
    if rank == victim:
        threading.Event().wait()
    OPERATIONS[operation][1](victim)


def lose_a_peer_in_torchs_ddp(rank, world_size):
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if rank == 1:
        os._exit(7)
    loss.backward()


def end_while_peers_wait(rank, world_size, how, victim):
    reached("up")
    if rank != victim:
        dist.all_reduce(torch.ones(4))
        return
    await_release("end")
    if how == "exit 7":
        os._exit(7)
    if how == "exit 0":
        sys.exit(0)
    if how == "raise":
        raise ValueError("bad learning rate")
    dist.destroy_process_group()
    reached("gone")
    await_release("peers are done")


def die_in_the_middle(rank, world_size, victim):
    tensor = torch.ones(1 << 26)
    dist.barrier()
    if rank == victim:  # SIGALRM ends a process, at a moment when it is deep in the operation
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    while True:
        dist.all_reduce(tensor)


def receive_from_any_after_one_has_left(rank, world_size):
    if rank == 1:
        dist.send(torch.tensor([1.0]), dst=0)
        return None
    if rank == 2:
        await_release("rank 0 waits")
        dist.send(torch.tensor([2.0]), dst=0)
        return None
    received = torch.empty(1)
    values = []
    for _ in range(2):
        reached(f"waiting for message {len(values)}")
        dist.recv(received)
        values.append(received.item())
    with pytest.raises(RankFailed, match="has left the group"):  # now all have
        dist.recv(received)
    return values


def make_a_group_of_a_dead_rank(rank, world_size, victim, exit_code):
    """As under a launcher that notes no ends: torchrun, or a shell."""
    os.environ.pop(LAUNCH_VARIABLE, None)
    dist.barrier()
    if rank == victim:
        if exit_code == 0:
            dist.destroy_process_group()
        os._exit(exit_code)
    begin_s = time.monotonic()
    try:
        dist.new_group([0, 1, 2])
    finally:
        assert time.monotonic() - begin_s < NAMED_WITHIN_S


def check_names(outcome, victim, killed_by=None, exit_code=None):
    error = outcome.error
    assert isinstance(error, RankFailed), outcome
    assert error.ranks == (victim.rank,)
    assert error.pid == victim.pid
    assert f"rank {victim.rank} (pid {victim.pid})" in str(error)
    assert f"rank {outcome.rank}: " in str(error)
    known = ((killed_by, exit_code),) if TELLS_ENDING else ((killed_by, exit_code), (None, None))
    assert (error.signal, error.exit_code) in known, error


@pytest.mark.parametrize("operation", OPERATIONS)
def test_who_waits_for_a_killed_rank_names_it_within_a_second(spawn_ranks, operation):
    with spawn_ranks(stay_away, 2, operation, 1, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[0])
        killed_at = time.monotonic()
        ranks.kill(1)
        survivor, victim = ranks.join(20)
    check_names(survivor, victim, killed_by=signal.SIGKILL)
    assert survivor.error.op == OPERATIONS[operation][0]
    assert "test_dead_peers.py:" in str(survivor.error)
    assert survivor.when_s - killed_at < NAMED_WITHIN_S


def test_torchs_ddp_raises_in_backward_what_its_all_reduce_failed_with(run_ranks):
    survivor, victim = run_ranks(lose_a_peer_in_torchs_ddp, 2, expect_failures=True)
    assert type(survivor.error) is RuntimeError
    assert re.search(rf"RankFailed: rank 0: all_reduce .* rank 1 \(pid {victim.pid}\) exited with", str(survivor.error))


@pytest.mark.parametrize(("victim", "exit_code", "hosts"), [(0, 3, []), (2, 3, []), (2, 3, [1, 2]), (2, 0, [])])
def test_a_new_group_does_not_wait_for_a_rank_that_died_before_it_came(run_ranks, victim, exit_code, hosts):
    named = {"hosts": hosts, "timeout_s": 30, "expect_failures": True}
    outcomes = run_ranks(make_a_group_of_a_dead_rank, 3, victim, exit_code, **named)
    for outcome in outcomes:
        if outcome.rank != victim:
            check_names(outcome, outcomes[victim], exit_code=exit_code)
            how = " before it joined" if (exit_code, TELLS_ENDING) == (0, True) else ""
            assert re.search(rf"new_group: .*{how}\n", str(outcome.error))


@pytest.mark.parametrize("operation", ["all_reduce", "async wait"])
def test_all_survivors_name_the_true_culprit_though_its_victims_exit_too(spawn_ranks, operation):
    with spawn_ranks(stay_away, 4, operation, 2, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        for rank in (0, 1, 3):
            wait_until_asleep(ranks.pids[rank])
        killed_at = time.monotonic()
        ranks.kill(2)
        outcomes = ranks.join(20)
    for rank in (0, 1, 3):
        check_names(outcomes[rank], outcomes[2], killed_by=signal.SIGKILL)
        assert outcomes[rank].when_s - killed_at < NAMED_WITHIN_S


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (2, 0), (4, 1)])
def test_a_rank_that_dies_in_the_middle_of_256_mib_is_named(run_ranks, world_size, victim):
    outcomes = run_ranks(die_in_the_middle, world_size, victim, group_timeout_s=30, timeout_s=30, expect_failures=True)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.exitcode == -signal.SIGALRM, outcome
            continue
        check_names(outcome, outcomes[victim], killed_by=signal.SIGALRM)
        assert outcome.error.op == "all_reduce"
        assert outcome.when_s - outcomes[victim].when_s < NAMED_WITHIN_S


@pytest.mark.parametrize(("how", "exit_code"), [("exit 7", 7), ("exit 0", 0), ("raise", 1)])
def test_a_rank_that_exits_is_named_with_its_exit_code(spawn_ranks, how, exit_code):
    with spawn_ranks(end_while_peers_wait, 3, how, 1, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        ended_at = time.monotonic()
        ranks.release("end", ranks=[1])
        outcomes = ranks.join(20)
    assert outcomes[1].exitcode == exit_code
    for rank in (0, 2):
        check_names(outcomes[rank], outcomes[1], exit_code=exit_code)
        assert outcomes[rank].when_s - ended_at < NAMED_WITHIN_S


def test_a_rank_that_destroys_the_group_early_has_left_it(spawn_ranks):
    with spawn_ranks(end_while_peers_wait, 3, "destroy", 1, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        left_at = time.monotonic()
        ranks.release("end", ranks=[1])
        ranks.wait_until_reached("gone", ranks=[1])
        ranks.release("peers are done", ranks=[1])
        outcomes = ranks.join(20)
    assert outcomes[1].ok
    for rank in (0, 2):
        check_names(outcomes[rank], outcomes[1])
        assert "has left the group" in str(outcomes[rank].error)
        assert outcomes[rank].when_s - left_at < NAMED_WITHIN_S


def test_a_receive_from_any_goes_on_while_somebody_is_left_to_send(spawn_ranks):
    with spawn_ranks(receive_from_any_after_one_has_left, 3, group_timeout_s=20) as ranks:
        ranks.wait_until_reached("waiting for message 1", ranks=[0])
        wait_until_asleep(ranks.pids[0])
        ranks.release("rank 0 waits", ranks=[2])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert outcomes[0].value == [1.0, 2.0]


SCRIPT = """
import sys, torch.distributed as dist
dist.init_process_group("phalanx", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
if dist.get_rank() == 1:
    raise ValueError("bad learning rate")
dist.barrier()
"""


@pytest.mark.slow
def test_a_script_that_raises_is_named_with_its_exit_code_though_the_interpreter_tidies_up(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), f"file://{tmp_path}/rendezvous"]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        printed = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[1].returncode == 1, printed[1]
    assert "RankFailed" in printed[0], printed[0]
    assert f"rank 1 (pid {ranks[1].pid})" in printed[0]
    if TELLS_ENDING:
        assert "exited with code 1" in printed[0]


def die_with_much_memory():
    """Kill a process that holds 256 MiB; return how it ended, if that could be seen before its memory was freed."""
    ready, mark = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = b"x" * (1 << 28)
        os.write(mark, str(_core.identity()[1]).encode())
        signal.pause()
        os._exit(len(held) % 2)
    start_time = int(os.read(ready, 32))
    pidfd = os.pidfd_open(pid)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    try:
        watch = _core.PeerWatch.of(pid, start_time, _core.identity()[2])
        assert not watch.dead
        os.kill(pid, signal.SIGKILL)
        while not watch.dead:
            pass
        ending = watch.ending
        return None if ended.poll(0) else ending
    finally:
        os.waitpid(pid, 0)
        for fd in (ready, mark, pidfd):
            os.close(fd)


def test_a_death_and_its_cause_are_seen_before_the_kernel_has_freed_the_memory():
    """The kernel needs 30 ms or more for it; who waits for the CPU for so long sees nothing of it, and tries again."""
    seen = next(filter(None, (die_with_much_memory() for _ in range(50))))
    assert seen == ("rank_ended", -1, signal.SIGKILL)


def test_a_process_whose_first_thread_alone_has_ended_lives():
    code = (
        "import ctypes, os, threading, time\n"
        "from phalanx import _core\n"
        "threading.Thread(target=lambda: (print(*_core.identity(), flush=True), input()), daemon=True).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        try:
            pid, start_time, namespace = map(int, one.stdout.readline().split())
            first = Path(f"/proc/{pid}/task/{pid}/stat")
            while first.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.001)
            watch = _core.PeerWatch.of(pid, start_time, namespace)
            assert not any(watch.dead for _ in range(20))
        finally:
            one.kill()
            one.wait()
        assert watch.dead


@contextlib.contextmanager
def sleepers(num):
    """Start processes that do nothing; yield them with the facts by which a peer is known."""
    namespace = _core.identity()[2]
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(num)]
    try:
        stats = [Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split() for one in processes]
        yield [(one, (one.pid, int(stat[19]), namespace)) for one, stat in zip(processes, stats, strict=True)]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def test_a_process_that_has_the_number_of_a_dead_peer_is_not_taken_for_it():
    with sleepers(1) as [(_, (pid, start_time, namespace))]:
        assert not _core.PeerWatch.of(pid, start_time, namespace).dead
        stranger = _core.PeerWatch.of(pid, start_time - 1, namespace)
        assert stranger.dead
        assert stranger.ending == ("rank_ended", -1, 0), "how another process ended says nothing of the peer"


def test_of_a_peer_that_was_gone_before_it_could_be_watched_the_end_is_unknown():
    with sleepers(1) as [(process, facts)]:
        process.kill()
        process.wait()
        watch = _core.PeerWatch.of(*facts)
        assert watch.dead
        assert watch.ending == ("rank_ended", -1, 0)


def test_of_many_peers_those_that_live_are_not_taken_for_dead_and_each_death_is_seen_at_once():
    """Most looks at one of many peers do not read /proc."""
    with sleepers(9) as known:
        watches = [_core.PeerWatch.of(*facts) for _, facts in known]
        for (process, _), watch in zip(known, watches, strict=True):
            assert not any(watch.dead for _ in range(20))
            process.kill()
            process.wait()
            assert all(watch.dead for _ in range(20))
            assert watch.ending[2] in ((signal.SIGKILL,) if TELLS_ENDING else (signal.SIGKILL, 0))


def wait_for_the_last(rank, world_size):
    if rank == world_size - 1:
        os._exit(3)
    with pytest.raises(RankFailed) as caught:
        dist.all_reduce(torch.ones(4))
    return caught.value.pid


def test_each_of_many_ranks_names_the_process_that_ended(run_ranks):
    *others, ended = run_ranks(wait_for_the_last, 12, expect_failures=True)
    assert ended.exit_code == 3
    assert len({one.value for one in others}) == 1
    assert others[0].value is not None
