"""A failure on one host ends the group on all: who it was and where is told there within two seconds."""

from __future__ import annotations

import time

import pytest

from phalanx import RankFailed
from tests.faults._watch import wait_until_asleep
from tests.faults.test_dead_peers import OPERATIONS as WAITS
from tests.faults.test_dead_peers import stay_away

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
