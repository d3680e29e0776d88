"""Kept ranks: what one call leaves is gone in the next, and a failure is told as by fresh ranks and harms no other."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from phalanx import RankError

pytestmark = pytest.mark.kept_ranks


def pid_after_all_reduce(rank, world_size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    return os.getpid(), torch.rand(1).item(), os.environ.get("LEFT")


def leave_traces(rank, world_size):
    torch.manual_seed(rank)
    os.environ["LEFT"] = "here"
    return os.getpid()


def raise_on_last(rank, world_size):
    if rank == world_size - 1:
        raise ValueError("from the last rank")


def raise_while_others_wait(rank, world_size):
    if rank == 1:
        raise ValueError("from rank 1")
    dist.barrier()


def die(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank, world_size):
    if rank == 1:
        time.sleep(600)


def skip(rank, world_size):
    pytest.skip("for a reason")


def patch(rank, world_size):
    dist.all_reduce = raise_on_last


def name_of(rank, world_size):
    return os.environ.get("GIVEN"), os.getcwd()


def test_calls_share_processes_and_find_them_as_fresh_ones(run_ranks, run_fresh_ranks):
    first = run_ranks(pid_after_all_reduce, 2)
    assert run_ranks(leave_traces, 2) == [pid for pid, *_ in first]
    assert run_ranks(pid_after_all_reduce, 2) == first
    fresh = run_fresh_ranks(pid_after_all_reduce, 2)
    assert [variable for *_, variable in fresh] == [variable for *_, variable in first]
    assert len({drawn for _, drawn, _ in (*first, *fresh)}) == 4  # each process has random numbers of its own


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (raise_on_last, r"(?s)^rank 1 \(pid \d+\) raised ValueError.*from the last rank"),
        (raise_while_others_wait, r"(?s)^rank 1 \(pid \d+\) raised ValueError.*from rank 1"),
        (die, r"^rank 1 \(pid \d+\) was killed by SIGKILL"),
    ],
    ids=["raises", "raises while the other waits", "dies"],
)
def test_a_failure_is_told_as_of_fresh_ranks_and_the_next_call_works(run_ranks, run_fresh_ranks, fn, says):
    (pid, *_), _ = run_ranks(pid_after_all_reduce, 2)
    with pytest.raises(RankError, match=says) as kept:
        run_ranks(fn, 2)
    with pytest.raises(RankError, match=says) as fresh:
        run_fresh_ranks(fn, 2)
    assert kept.value.rank == fresh.value.rank == 1
    assert fn is die or f"in {fn.__name__}" in str(kept.value)
    assert run_ranks(pid_after_all_reduce, 2)[0][0] != pid


def test_a_hang_ends_at_the_limit_and_shows_the_line(run_ranks):
    with pytest.raises(RankError, match=r"(?s)^rank 1 .*hang"):
        run_ranks(hang, 2, timeout_s=1)
    assert len(run_ranks(pid_after_all_reduce, 2)) == 2


def test_a_function_that_is_left_replaced_is_named(run_ranks):
    with pytest.raises(RankError, match=r"torch\.distributed\.all_reduce: left replaced by a test's own"):
        run_ranks(patch, 2)
    assert len(run_ranks(pid_after_all_reduce, 2)) == 2


def test_a_rank_can_skip_the_test(run_ranks):
    with pytest.raises(pytest.skip.Exception, match="for a reason"):
        run_ranks(skip, 2)
    assert len(run_ranks(pid_after_all_reduce, 2)) == 2


def test_what_needs_other_surroundings_gets_fresh_ranks(run_ranks, monkeypatch, tmp_path):
    assert run_ranks(name_of, 1, env={"GIVEN": "by the call"}) == [("by the call", os.getcwd())]
    monkeypatch.setenv("GIVEN", "by the test")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(name_of, 1) == [("by the test", str(tmp_path))]
