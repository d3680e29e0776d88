"""A failure on one host ends the group on all: who it was and where is told there within two seconds."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, CollectiveTimeout, GroupUnusable, PhalanxError, RankFailed
from phalanx.backend.hosts import channels, mailbox
from phalanx.testing import await_release, reached
from tests.backend.test_forks import call_in_a_child, destroy_in_a_child, end_children_every_way, load_with_workers
from tests.backend.test_groups import init_again_and_again, make_and_destroy_subgroups
from tests.backend.test_mismatches import (
    DIFFERENCES,
    MISMATCHES,
    disagree,
    disagree_about_split_sizes,
    disagree_in_a_group,
)
from tests.backend.test_uneven_lists import disagree_about_sizes
from tests.faults._watch import telling, wait_until_asleep
from tests.faults.test_dead_peers import OPERATIONS as WAITS
from tests.faults.test_dead_peers import end_while_peers_wait, stay_away
from tests.faults.test_stalls import (
    MEET_S,
    come_late_to_a_mismatch,
    exit_at_once_on_a_mismatch,
    wait_for_a_stopped_rank,
    wait_for_rank_one,
)
from tests.faults.test_stalls import OPERATIONS as TIMED
from tests.hosts._layouts import layout_name

NAMED_WITHIN_S = 2.0


def host_of(rank, hosts):
    return next(f"host-{h}" for h in range(len(hosts)) if rank < sum(hosts[: h + 1]))


def check_names(outcome, victim, hosts, since_s):
    """Demand that `outcome` is a rank that told of the victim, its process and its host, in time."""
    error = outcome.error
    assert isinstance(error, RankFailed), outcome
    assert error.ranks == (victim.rank,), outcome
    assert error.pid == victim.pid
    assert f"rank {victim.rank} (pid {victim.pid}) on host {host_of(victim.rank, hosts)}" in str(error)
    assert str(error).startswith(f"rank {outcome.rank}: ")
    assert outcome.when_s - since_s < NAMED_WITHIN_S


# ---------------------------------------------------------------- ranks that die


@pytest.mark.parametrize(
    ("hosts", "victim"),
    [([1, 1], 0), ([1, 1], 1), ([2, 2], 0), ([2, 2], 3), ([2, 1], 1), ([2, 1], 2), ([1, 2, 1], 0), ([1, 1, 1], 1)],
    ids=str,
)
def test_a_killed_rank_is_named_on_every_host(spawn_ranks, hosts, victim):
    num = sum(hosts)
    options = {"hosts": hosts, "init_method": "tcp", "group_timeout_s": 30}  # rank 0 serves the store
    with spawn_ranks(stay_away, num, "all_reduce", victim, **options) as ranks:
        ranks.wait_until_reached("up")
        for rank in set(range(num)) - {victim}:
            wait_until_asleep(ranks.pids[rank])
        killed_at = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.join(20)
    for outcome in outcomes:
        if outcome.rank != victim:
            check_names(outcome, outcomes[victim], hosts, killed_at)
            assert "test_dead_peers.py:" in str(outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "victim"), [*((name, 1) for name in WAITS), ("large all_gather", 0), ("recv", 0), ("async wait", 0)]
)
def test_every_wait_ends_when_a_rank_is_killed(spawn_ranks, operation, victim):
    options = {"hosts": [1, 1], "init_method": "tcp", "group_timeout_s": 30}
    with spawn_ranks(stay_away, 2, operation, victim, **options) as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[1 - victim])
        killed_at = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.join(20)
    check_names(outcomes[1 - victim], outcomes[victim], [1, 1], killed_at)
    assert outcomes[1 - victim].error.op == WAITS[operation][0]


def leave_a_child(rank, world_size, fifo):
    """Rank 1 has a child, such as a worker of a data loader, which outlives it."""
    if rank == 1:
        held = os.open(fifo, os.O_RDONLY)  # here, because nobody could open it once the test has closed its end
        is_alone, alone = os.pipe()
        if os.fork() == 0:
            os.setsid()  # the harness kills the group of a rank that ends
            os.write(alone, b"!")
            os.read(held, 1)  # until the test closes it
            os._exit(0)
        os.read(is_alone, 1)
    dist.barrier()
    reached("up")
    if rank == 1:
        threading.Event().wait()
    try:
        dist.barrier()
    finally:
        reached("raised")


def test_a_killed_rank_is_named_though_a_child_of_it_lives_on(spawn_ranks, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
    with spawn_ranks(leave_a_child, 2, str(fifo), hosts=[1, 1], group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[0])
        killed_at = time.monotonic()
        ranks.kill(1)
        ranks.wait_until_reached("raised", ranks=[0], timeout_s=10)
        os.close(held)
        survivor, victim = ranks.join(20)
    check_names(survivor, victim, [1, 1], killed_at)


@pytest.mark.parametrize("how", ["exit 7", "exit 0", "raise"])
def test_a_rank_that_exits_is_named_on_every_host(spawn_ranks, how):
    with spawn_ranks(end_while_peers_wait, 3, how, 1, hosts=[2, 1], group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        ended_at = time.monotonic()
        ranks.release("end", ranks=[1])
        outcomes = ranks.join(20)
    for rank in (0, 2):
        check_names(outcomes[rank], outcomes[1], [2, 1], ended_at)


@pytest.mark.parametrize(("hosts", "victim"), [([2, 1], 1), ([2, 1], 2), ([1, 1, 1], 0)], ids=str)
def test_a_rank_that_destroys_the_group_early_has_left_it(spawn_ranks, hosts, victim):
    with spawn_ranks(end_while_peers_wait, 3, "destroy", victim, hosts=hosts, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        left_at = time.monotonic()
        ranks.release("end", ranks=[victim])
        ranks.wait_until_reached("gone", ranks=[victim])
        ranks.release("peers are done", ranks=[victim])
        outcomes = ranks.join(20)
    assert outcomes[victim].ok
    for rank in {0, 1, 2} - {victim}:
        check_names(outcomes[rank], outcomes[victim], hosts, left_at)
        assert "left the group (destroy_process_group)" in str(outcomes[rank].error)


# ---------------------------------------------------------------- interruptions


# ---------------------------------------------------------------- calls that differ


@pytest.mark.parametrize("hosts", [[1, 1, 1], [2, 1], [1, 2]], ids=layout_name)
@pytest.mark.parametrize("kind", ["count", "operation", "blocking and not"])
def test_a_mismatch_is_an_error_on_every_rank_with_a_table(run_ranks, hosts, kind):
    # What each called, of those who say it; ranks that wait inside their host do not.
    wants = [MISMATCHES[kind][2]] * 2 + [MISMATCHES[kind][3]]
    for text, _, _, seq, took_s, _ in run_ranks(disagree, 3, kind, hosts=hosts):
        rows = [row for row in text.splitlines() if row.startswith("  rank ")]
        assert [row.split(":")[0] for row in rows] == ["  rank 0", "  rank 1", "  rank 2"], text
        for rank, row in enumerate(rows):
            assert wants[rank] in row or "waits, or has not called yet" in row, text
            assert row.endswith(f"(host {host_of(rank, hosts)})")
        assert all(any(want in row for row in rows) for want in wants), text
        assert "same collectives in the same order" in text
        assert seq > 2
        assert took_s < NAMED_WITHIN_S


@pytest.mark.parametrize("kind", sorted(set(MISMATCHES) - {"count", "operation", "blocking and not"}))
def test_every_kind_of_mismatch_between_hosts_is_found(run_ranks, kind):
    for text, *_ in run_ranks(disagree, 2, kind, hosts=[1, 1]):
        assert MISMATCHES[kind][2] in text
        assert DIFFERENCES.get(kind, "called all_reduce with different sizes") in text
        assert MISMATCHES[kind][3] in text


# What a host's ranks, or those of a rail, do alike although their callers asked for something else.
ALIKE = {
    "dtype of an average": (
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int8), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG),
        "all_reduce(int8, count=4, op=AVG)",
        "all_reduce(int64, count=4, op=AVG)",
    ),
    "destination": (
        lambda: dist.reduce(torch.ones(4), 0),
        lambda: dist.reduce(torch.ones(4), 1),
        "dst=0",
        "dst=1",
    ),
}


def disagree_alike(rank, world_size, kind, odd_ranks):
    usual, odd, _, _ = ALIKE[kind]
    with pytest.raises(CollectiveMismatch) as error:
        odd() if rank in odd_ranks else usual()
        dist.barrier()  # a rank of another host may have been done
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "hosts", "odd_ranks"),
    [
        ("dtype of an average", [1, 1], [1]),
        ("dtype of an average", [2, 2], [1, 3]),
        ("destination", [2, 1], [1]),
        ("destination", [2, 2], [1, 3]),
    ],
)
def test_a_mismatch_is_found_where_the_steps_are_alike(run_ranks, kind, hosts, odd_ranks):
    for text in run_ranks(disagree_alike, sum(hosts), kind, odd_ranks, hosts=hosts):
        assert ALIKE[kind][2] in text
        assert ALIKE[kind][3] in text


def test_different_split_sizes_are_named(run_ranks):
    for text in run_ranks(disagree_about_split_sizes, 2, hosts=[1, 1]):
        assert "on host host-0 sends 3 elements to rank 1, which expects 2" in text


@pytest.mark.parametrize(("hosts", "op"), [([1, 1], "all_gather"), ([1, 2], "reduce_scatter")])
def test_sizes_that_contradict_each_other_are_named(run_ranks, hosts, op):
    wants = ("sizes=[2, 3", "sizes=[3, 2")
    for text in run_ranks(disagree_about_sizes, sum(hosts), op, hosts=hosts):
        assert all(f"{op}(float32, {want}" in text for want in wants), text


def test_a_mismatch_in_a_group_ends_only_it(run_ranks):
    results = run_ranks(disagree_in_a_group, 3, hosts=[2, 1])
    for text, total in results:
        assert total == [3.0] * 4
        assert text is None or ("src=1" in text and "src=2" in text)
    assert [text is None for text, _ in results] == [True, False, False]


def test_a_mismatch_is_the_same_for_a_rank_that_comes_late(spawn_ranks):
    with spawn_ranks(come_late_to_a_mismatch, 3, hosts=[1, 1, 1], group_timeout_s=30) as ranks:
        ranks.release("come", ranks=[2])
        ranks.wait_until_reached("raised")
        ranks.release("all have raised")
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    for outcome in outcomes:
        error, took_s = outcome.value
        assert "broadcast(float32, count=4, src=0)" in str(error)
        assert took_s < NAMED_WITHIN_S


def test_a_mismatch_is_one_on_every_rank_though_ranks_exit_because_of_it(run_ranks):
    options = {"hosts": [2, 2], "init_method": "tcp", "group_timeout_s": 30}
    outcomes = run_ranks(exit_at_once_on_a_mismatch, 4, timeout_s=20, expect_failures=True, **options)
    for outcome in outcomes:
        assert isinstance(outcome.error, CollectiveMismatch), outcome


# ---------------------------------------------------------------- ranks that do not come


def reduce_twice_beside_a_stopped_rank(rank, world_size):
    dist.all_reduce(torch.ones(4000))
    reached("up")
    await_release("call")
    with telling("raised", CollectiveTimeout):
        dist.all_reduce(torch.ones(4000))


@pytest.mark.parametrize(
    ("hosts", "reporting"), [([1, 1, 1], [0, 1]), ([2, 1], [0, 1]), ([1, 2], [0])], ids=["1+1+1", "2+1", "1+2"]
)
def test_a_stopped_rank_is_reported_with_its_host(spawn_ranks, capfd, hosts, reporting):
    options = {"hosts": hosts, "group_timeout_s": 2.5, "env": {"PHALANX_STALL_S": "0.5"}}
    with spawn_ranks(wait_for_a_stopped_rank, 3, **options) as ranks:
        ranks.wait_until_reached("up")
        ranks.stop(2)
        ranks.wait_until_reached("raised", ranks=[0, 1])
        ranks.resume(2)
        ranks.release("go on", ranks=[2])
        absent = rf"rank 2 \(pid {ranks.pids[2]}\) on host {host_of(2, hosts)}"
        ranks.join(20)
    printed = capfd.readouterr().err
    for rank in reporting:
        where = rf"phalanx: rank {rank}: all_reduce #1 of group 'default' at \S*test_stalls.py:\d+"
        num_reports = len(re.findall(rf"{where} has waited \S+ s for {absent} \(timeout 2.5 s\)", printed))
        assert num_reports > 1 if rank == 0 else num_reports == 1, printed  # again by the lowest that waits
    assert re.search(rf"^  {absent} has not called #1, or only just$", printed, re.MULTILINE), printed


def test_a_stall_on_a_host_is_reported_by_the_call_and_not_by_its_steps(spawn_ranks, capfd):
    options = {"hosts": [2, 2], "group_timeout_s": 2.5, "env": {"PHALANX_STALL_S": "0.5"}}
    with spawn_ranks(reduce_twice_beside_a_stopped_rank, 4, **options) as ranks:
        ranks.wait_until_reached("up")
        ranks.stop(1)
        ranks.release("call", ranks=[0, 2, 3])
        ranks.wait_until_reached("raised", ranks=[0, 2, 3])
        ranks.resume(1)
        ranks.release("call", ranks=[1])
        errors = [str(outcome.error) for outcome in ranks.join(20)]
    printed = capfd.readouterr().err
    missing = rf"rank 1 \(pid {ranks.pids[1]}\) on host host-0"
    for rank in (0, 2, 3):
        where = rf"^phalanx: rank {rank}: all_reduce #2 of group 'default' at \S*test_failures.py:\d+"
        assert re.search(rf"{where} has waited \S+ s for {missing} \(timeout 2.5 s\)$", printed, re.MULTILINE), printed
    assert "reduce_scatter" not in printed + "".join(errors)
    assert any("all_reduce #2" in error and "timed out after 2.5 s" in error for error in errors), errors


def receive_from_a_neighbour(rank, world_size):
    if rank == 0:
        dist.recv(torch.empty(4), src=1)
        return
    await_release("send")
    if rank == 1:
        dist.send(torch.ones(4), dst=0)


def test_a_stalled_message_on_a_host_is_reported_with_its_host(spawn_ranks, capfd):
    with spawn_ranks(receive_from_a_neighbour, 3, hosts=[2, 1], env={"PHALANX_STALL_S": "0.2"}) as ranks:
        printed, deadline = "", time.monotonic() + 10
        while "has waited" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)  # the report comes without an event
            printed += capfd.readouterr().err
        ranks.release("send", ranks=[1, 2])
        assert all(outcome.ok for outcome in ranks.join(20))
    where = r"phalanx: rank 0: recv of group 'default' at \S*test_failures.py:\d+"
    assert re.search(rf"{where} has waited \S+ s for rank 1 \(pid {ranks.pids[1]}\) on host host-0", printed), printed


@pytest.mark.parametrize("operation", sorted(set(TIMED) - {"new_group"}))
def test_every_wait_ends_by_the_timeout_and_names_who_is_missing(spawn_ranks, operation):
    with spawn_ranks(wait_for_rank_one, 2, operation, hosts=[1, 1], group_timeout_s=MEET_S) as ranks:
        ((error, took_s),) = ranks.wait_until_reached("raised", ranks=[0])
        ranks.release("peers are done", ranks=[1])
        outcomes = ranks.join(20)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert isinstance(error, CollectiveTimeout)
    if operation != "recv from any":
        assert error.ranks == (1,)
        assert f"rank 1 (pid {outcomes[1].pid}) on host host-1" in str(error)
    assert took_s < 15  # the machine may be busy; endless is what must not be


# ---------------------------------------------------------------- hosts that do not reach each other


def meet_behind_a_firewall(rank, world_size, folder):
    """Rank 1 listens where nobody gets through."""
    if rank == 1:
        listen = mailbox.Mailbox.__init__

        def listen_elsewhere(self, address):
            listen(self, address)
            with socket.create_server((address, 0)) as closed:
                self.name = (address, closed.getsockname()[1], "")

        mailbox.Mailbox.__init__ = listen_elsewhere
    with pytest.raises(PhalanxError) as told:
        dist.init_process_group(
            "phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
    return str(told.value)


def test_hosts_that_do_not_reach_each_other_are_named_on_every_rank(run_ranks, tmp_path):
    for rank, text in enumerate(run_ranks(meet_behind_a_firewall, 3, str(tmp_path), hosts=[1, 2], init=False)):
        first, second, *rest = text.splitlines()
        assert first == f"rank {rank}: init_process_group: hosts can't reach each other:"
        assert second.startswith("rank 0 (pid ")
        assert "does not reach rank 1 (pid " in second
        assert second.endswith(": Connection refused")
        advice = "Run phalanx doctor on them: it tests names, ports and interfaces."
        assert rest == [f"{advice} (phalanx explain unreachable)"]


# ---------------------------------------------------------------- forks, and what is left behind


@pytest.mark.parametrize(
    ("check", "want"),
    [
        (load_with_workers, [2 * 2 * 8 * (15.5 + 50)] * 2),
        (destroy_in_a_child, [(("destroyed", 3.0), [2.0])] * 2),
        (end_children_every_way, [[0, 3, -signal.SIGKILL]] * 2),
    ],
)
def test_children_live_beside_a_group(run_ranks, check, want):
    assert run_ranks(check, 2, hosts=[1, 1]) == want


def test_a_forked_child_that_calls_gets_a_clear_error(run_ranks):
    for rank, (answers, total) in enumerate(run_ranks(call_in_a_child, 2, hosts=[1, 1])):
        assert total == [2.0] * 3
        for name, error in answers.items():
            assert isinstance(error, GroupUnusable), (name, error)
            assert f"forked from rank {rank}" in str(error)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]], ids=layout_name)
def test_destroyed_groups_give_everything_back(run_ranks, tmp_path, hosts):
    num = sum(hosts)
    for before, after in run_ranks(init_again_and_again, num, str(tmp_path), 8, hosts=hosts, init=False):
        assert after == before
    for before, after in run_ranks(make_and_destroy_subgroups, num, hosts=hosts):
        assert after == before


class AnyChannel:
    """As far as a fork asks: which connections it has made."""

    def __init__(self, link):
        self.inodes = {os.readlink(f"/proc/self/fd/{link.fileno()}")}


def test_a_forked_child_lets_go_of_connections_and_keeps_what_took_their_numbers(tmp_path):
    (tmp_path / "text").write_text("kept")
    links = socket.socketpair()
    opened = [AnyChannel(link) for link in links]
    channels._channels.update(opened)
    number = links[1].detach()
    with links[0], open(tmp_path / "text") as file:
        os.dup2(file.fileno(), number)  # as if the engine had closed it of its own accord
        child = os.fork()
        if child == 0:
            is_null = os.path.samestat(os.fstat(links[0].fileno()), os.stat(os.devnull))
            os._exit(0 if is_null and os.pread(number, 4, 0) == b"kept" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.readlink(f"/proc/self/fd/{links[0].fileno()}") in opened[0].inodes
    os.close(number)
