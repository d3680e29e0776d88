"""Whether a peer lives is known without pidfd too, costs one descriptor a process, and is never guessed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.testing import await_release, reached
from tests.denial import deny
from tests.faults._denials import meeting_place, num_open
from tests.faults._watch import NAMED_WITHIN_S, wait_until_asleep

NUM_GROUPS = 12


def make_groups(rank, world_size):
    before = num_open()
    groups = [dist.new_group(list(range(world_size))) for _ in range(NUM_GROUPS)]
    after = num_open()
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    return after - before


def exhaust_descriptors():
    """Leave this process no descriptor; closing one of those returned gives one back."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, num_open() + 20), hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    return taken


def wait_without_descriptors(rank, world_size):
    """A rank that has none left looks at a peer that is late, and alive."""
    taken = exhaust_descriptors() if rank == 0 else []
    reached("up")
    if rank == 1:
        await_release("go on")
    total = torch.ones(4)
    dist.all_reduce(total)
    for fd in taken:  # telling the test of the result takes some
        os.close(fd)
    return total[0].item()


def close_what_is_watched(rank, world_size):
    """A script that closes descriptors which are not its own, and opens others in their places."""
    if rank == 0:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]":
                    os.dup2(os.open("/dev/null", os.O_RDONLY), int(fd))
    reached("up")
    if rank == 1:
        await_release("go on")
    total = torch.ones(4)
    dist.all_reduce(total)
    return total[0].item()


def join_without_descriptors(rank, world_size, victim, num_left):
    store = meeting_place(rank, world_size)
    taken = exhaust_descriptors() if rank == victim else []
    for fd in taken[:num_left]:
        os.close(fd)
    try:
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size)
    finally:
        for fd in taken[num_left:]:  # telling the test of the error takes some
            os.close(fd)


def wait_for_the_dead(rank, world_size, error, denied, folder):
    if rank == denied:
        deny("pidfd_open", error=error)
    dist.init_process_group("phalanx", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    dist.new_group()
    reached("up")
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(4))


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="before torch 2.14 each group has an inner Gloo, with connections")
def test_groups_of_the_same_ranks_cost_no_further_descriptors(run_ranks):
    assert run_ranks(make_groups, 3) == [0] * 3


@pytest.mark.parametrize("what", [wait_without_descriptors, close_what_is_watched])
def test_a_peer_that_is_late_is_not_taken_for_dead(spawn_ranks, what):
    with spawn_ranks(what, 2, init_method="tcp") as ranks:
        ranks.wait_until_reached("up")
        wait_until_asleep(ranks.pids[0])
        time.sleep(0.2)  # several looks at the peer
        ranks.release("go on", ranks=[1])
        outcomes = ranks.join(20)
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0], outcomes


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def test_a_killed_rank_is_named_within_a_second_where_pidfd_is_denied(spawn_ranks, tmp_path, error, capfd):
    with spawn_ranks(wait_for_the_dead, 3, error, 0, str(tmp_path), init=False) as ranks:
        ranks.wait_until_reached("up")
        for rank in (0, 2):
            wait_until_asleep(ranks.pids[rank])
        killed_at = time.monotonic()
        ranks.kill(1)
        outcomes = ranks.join(20)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, phalanx.RankFailed), outcomes[rank]
        assert outcomes[rank].error.ranks == (1,)
        assert outcomes[rank].error.pid == outcomes[1].pid
        assert outcomes[rank].when_s - killed_at < NAMED_WITHIN_S
    said = [line for line in capfd.readouterr().err.splitlines() if "pidfd_open" in line]
    assert len(said) == 1, said
    assert said[0].startswith("phalanx: rank 0: pidfd_open: ")
    assert "detected through /proc" in said[0]


@pytest.mark.parametrize("num_left", [0, 1, 2, 3, 5])
def test_a_rank_without_descriptors_says_so_on_all_ranks(run_ranks, num_left):
    outcomes = run_ranks(join_without_descriptors, 8, 3, num_left, init=False, timeout_s=30, expect_failures=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, phalanx.PhalanxError), outcome
        assert f"rank {outcome.rank}: init_process_group: " in str(outcome.error)
        assert "no file descriptor is left" in str(outcome.error)
        assert "ulimit -n" in str(outcome.error)
        assert outcome.error.ranks == (3,)
