"""An error of an operation carries its facts: what the launcher and other hosts read, nobody takes a sentence apart."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupUnusable, PhalanxError, RankFailed, _core
from phalanx._errors import KINDS, Failure
from phalanx._errors.facts import Peer
from phalanx.backend.failures.wording import error_of
from phalanx.testing import await_release, reached

IN_PYTHON = {"rank_lost", "not_met", "refused"}  # the core has no such failure
HOSTS = pytest.mark.parametrize("hosts", [[], [1, 2]], ids=["one host", "two hosts"])


def caught(kind, call):
    with pytest.raises(kind) as error:
        call()
    return error.value


def fail_in_every_way(rank, world_size):
    """Return what each way to fail raises, each in a group of its own; in the last, rank 2 goes for good."""
    groups = {name: dist.new_group() for name in ("calls", "sizes", "late", "aborted")}
    found = {
        "calls": caught(CollectiveMismatch, lambda: dist.all_reduce(torch.ones(4 + (rank == 2)), group=groups["calls"]))
    }
    found["after"] = caught(GroupUnusable, lambda: dist.barrier(groups["calls"]))
    sent = [[1, 3, 1], [2, 2, 1], [1, 1, 1]][rank]
    received = [[1, 2, 1], [2, 2, 1], [1, 1, 1]][rank]
    found["sizes"] = caught(
        CollectiveMismatch,
        lambda: dist.all_to_all_single(
            torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, group=groups["sizes"]
        ),
    )
    groups["late"].set_timeout(timedelta(seconds=0.5))
    if rank != 1:
        found["late"] = caught(CollectiveTimeout, lambda: dist.all_reduce(torch.ones(4), group=groups["late"]))
    dist.barrier()
    if rank == 1:
        found["late"] = caught(CollectiveTimeout, lambda: dist.all_reduce(torch.ones(4), group=groups["late"]))
    if rank == 0:
        groups["aborted"].abort()
    else:
        found["aborted"] = caught(GroupAborted, lambda: dist.barrier(groups["aborted"]))
    dist.barrier()
    reached("up")
    if rank == 2:
        await_release("never")
    found["dead"] = caught(RankFailed, dist.barrier)
    return found


def check_all_alike(error, rank):
    """Demand what holds for every error of an operation."""
    failure = error.failure
    assert isinstance(failure, Failure)
    assert type(error) is KINDS[failure.kind]
    assert (failure.rank, failure.op, failure.seq, failure.ranks) == (rank, error.op, error.seq, error.ranks)
    assert error.is_victim == failure.is_victim
    assert Failure.from_facts(json.loads(json.dumps(failure.to_facts()))) == failure
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failure, again.is_victim) == (str(error), failure, error.is_victim)
    assert str(error) == str(error_of(failure))
    assert failure.op in str(error)


@HOSTS
def test_an_error_carries_its_facts(spawn_ranks, hosts):
    with spawn_ranks(fail_in_every_way, 3, hosts=hosts, group_timeout_s=30) as ranks:
        ranks.wait_until_reached("up")
        pids = ranks.pids
        ranks.kill(2)
        outcomes = ranks.join(20)
    name = ["host-0", "host-1", "host-1"] if hosts else [""] * 3
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank]
        found = outcomes[rank].value
        for error in found.values():
            check_all_alike(error, rank)
            assert "test_failures.py:" in error.failure.site or error.failure.kind == "unusable"
        calls = found["calls"].failure.calls
        assert [call.rank for call in calls] == [0, 1, 2]
        assert {call.count for call in calls if call.op} == {4, 5}
        assert all(call.host == name[call.rank] for call in calls)
        assert not found["calls"].is_victim or hosts
        assert found["after"].failure.cause.kind == "calls_differ"
        sizes = found["sizes"].failure.sizes
        assert (sizes.one.rank, sizes.count, sizes.other.rank, sizes.other_count) == (0, 3, 1, 2)
        dead = found["dead"].failure
        assert dead.culprits == (Peer(rank=2, pid=pids[2], host=name[2]),)
        assert found["dead"].is_victim
        if dead.kind == "rank_ended":  # rank 0 of another host knows no more than that the connection ended
            assert found["dead"].signal in (9, None)
    late = outcomes[0].value["late"].failure
    assert [(stand.rank, stand.pid, stand.host) for stand in late.standings] == [(1, pids[1], name[1])]
    assert late.ranks == (1,)
    assert "came too late: rank " in str(outcomes[1].value["late"])
    aborted = outcomes[1].value["aborted"].failure
    assert aborted.by.rank == 0
    assert aborted.is_victim


def test_every_failure_of_the_core_has_an_exception_and_words():
    assert set(_core.FAILURE_KINDS) == set(KINDS) - IN_PYTHON


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("by", [None, Peer(rank=1)], ids=["own", "followed"])
def test_a_failure_without_facts_has_words(kind, by):
    """Another host may send any: what is missing is left out, nothing raises."""
    for op in ("", "join", "all_reduce"):
        text = str(error_of(Failure(kind=kind, rank=3, op=op, by=by)))
        assert text.startswith("rank 3")
        assert "None" not in text


@pytest.mark.parametrize(
    "facts",
    [
        {},
        [],
        {"kind": "rank_lost"},
        {"kind": "no such", "rank": 0},
        {"kind": "rank_lost", "rank": True},
        {"kind": "rank_lost", "rank": 0, "culprits": [{"rank": "1"}]},
        {"kind": "rank_lost", "rank": 0, "culprits": {}},
        {"kind": "unusable", "rank": 0, "cause": {"kind": "rank_lost"}},
    ],
    ids=str,
)
def test_what_is_no_failure_is_an_error(facts):
    with pytest.raises(ValueError, match=r"."):
        Failure.from_facts(facts)


def test_errors_without_a_failure_know_whether_they_are_a_victims():
    assert RankFailed("a peer has gone").is_victim
    assert not PhalanxError("no place to listen").is_victim
    assert PhalanxError("no place to listen").failure is None
