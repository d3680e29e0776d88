"""Abort hooks run on each rank before it raises the failure of its group, and torch's code says which it was."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, CollectiveTimeout, GroupAborted, GroupUnusable, PhalanxError, RankFailed

CPU = torch.device("cpu")
BRIEF = timedelta(seconds=0.2)  # set once the ranks have met, which takes longer
HOSTS = pytest.mark.parametrize("hosts", [(), (1, 1)], ids=["one host", "two hosts"])


def code_of(group):
    return group.get_error().name


def raised_by(call, seen):
    """Return what had been seen when a call raised, and the class of its error."""
    with pytest.raises(PhalanxError) as caught:
        call()
    return list(seen), type(caught.value)


def hooked_group(seen):
    group = dist.new_group()
    group.register_abort_hook(2, lambda: seen.append("second"))
    group.register_abort_hook(1, lambda: seen.append("first"))
    return group


def time_out(rank, world_size):
    """Rank 0 waits in vain; rank 1 comes when that is over."""
    seen: list[str] = []
    group = hooked_group(seen)
    group.set_timeout(BRIEF)
    before = code_of(group)
    if rank == 0:
        found = raised_by(lambda: dist.barrier(group), seen)
        dist.barrier()
    else:
        dist.barrier()
        told = code_of(group)  # it has called nothing since
        found = raised_by(lambda: dist.barrier(group), seen)
        assert told == "REMOTE_ERROR"
    again = raised_by(lambda: dist.barrier(group), seen)
    return before, found, code_of(group), again


@HOSTS
def test_hooks_run_once_before_a_timeout_is_raised_on_any_rank(run_ranks, hosts):
    for rank, (before, found, code, again) in enumerate(run_ranks(time_out, 2, hosts=hosts)):
        assert (before, code) == ("SUCCESS", "REMOTE_ERROR" if rank else "TIMEOUT")
        assert found == (["first", "second"], CollectiveTimeout)
        assert again == (["first", "second"], GroupUnusable)


def abort_all(rank, world_size):
    seen: list[str] = []
    group = hooked_group(seen)
    if rank == 0:
        group.abort()
        mine = list(seen)
        dist.barrier()
        return mine, *raised_by(lambda: dist.barrier(group), seen), code_of(group)
    dist.barrier()
    return [], *raised_by(lambda: dist.barrier(group), seen), code_of(group)


@HOSTS
def test_hooks_run_before_abort_and_where_the_others_hear_of_it(run_ranks, hosts):
    first, second = run_ranks(abort_all, 2, hosts=hosts)
    assert first == (["first", "second"], ["first", "second"], GroupUnusable, "COMM_ERROR")
    assert second == ([], ["first", "second"], GroupAborted, "REMOTE_ERROR")


def mismatch(rank, world_size):
    seen: list[str] = []
    group = hooked_group(seen)
    found = raised_by(lambda: dist.all_reduce(torch.ones(2 + rank), group=group), seen)
    dist.barrier()
    return found, code_of(group)


@HOSTS
def test_hooks_run_where_ranks_call_different_things(run_ranks, hosts):
    for found, code in run_ranks(mismatch, 2, hosts=hosts):
        assert found == (["first", "second"], CollectiveMismatch)
        assert code in ("COMM_ERROR", "REMOTE_ERROR")


def lose_a_rank(rank, world_size):
    seen: list[str] = []
    group = hooked_group(seen)
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return *raised_by(lambda: dist.barrier(group), seen), code_of(group)


@HOSTS
def test_hooks_run_where_a_rank_has_died(run_ranks, hosts):
    survivor, dead = run_ranks(lose_a_rank, 2, hosts=hosts, expect_failures=True)
    assert survivor.value == (["first", "second"], RankFailed, "REMOTE_ERROR")
    assert dead.signal == signal.SIGKILL


def wait_for_a_work(rank, world_size):
    """The failure is met by whoever looks: here a work, and one that nobody waits for, by its future."""
    outcomes = []
    for look in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        seen: list[str] = []
        group = hooked_group(seen)
        group.set_timeout(BRIEF)
        if rank == 0:
            options = dist.BarrierOptions()
            options.asyncOp = True
            with pytest.raises(RuntimeError):
                look(group.barrier(options))
            outcomes.append(list(seen))
        dist.barrier()
    return outcomes


def test_hooks_run_before_a_work_or_its_future_raises(run_ranks):
    assert run_ranks(wait_for_a_work, 2) == [[["first", "second"]] * 2, []]


def misbehave(rank, world_size):
    """A hook that raises, one that would end the process, one that calls the group, one that was taken back."""
    seen: list[object] = []
    group = dist.new_group()

    def call_again():
        with pytest.raises(GroupUnusable):
            group.barrier()
        seen.append("called")

    def give_up():
        raise SystemExit(3)

    group.register_abort_hook(1, lambda: 1 / 0)
    group.register_abort_hook(2, give_up)
    group.register_abort_hook(3, call_again)
    group.register_abort_hook(4, lambda: seen.append("taken back"))
    group.register_abort_hook(5, lambda: seen.append("replaced"))
    group.register_abort_hook(5, lambda: seen.append("last"))
    group.unregister_abort_hook(4)
    group.unregister_abort_hook(99)
    with pytest.raises(TypeError, match="takes a function without arguments"):
        group.register_abort_hook(6, None)
    found = raised_by(lambda: dist.all_reduce(torch.ones(2 + rank), group=group), seen)
    dist.barrier()
    return found


def test_a_hook_that_fails_hides_neither_the_next_hook_nor_the_error(run_ranks, capfd):
    for found in run_ranks(misbehave, 2):
        assert found == (["called", "last"], CollectiveMismatch)
    said = capfd.readouterr().err
    assert said.count("phalanx: abort hook 1 of group") == said.count("raised ZeroDivisionError: division by zero") == 2
    assert said.count("raised SystemExit: 3") == 2


def leave(rank, world_size):
    """What the hooks of a group that is left hold goes with it; a later group of the same name has its own."""
    seen: list[str] = []
    for _ in range(2):
        group = hooked_group(seen)
        dist.barrier(group)
        dist.destroy_process_group(group)
    return seen


def test_a_group_that_is_left_runs_none(run_ranks):
    assert run_ranks(leave, 2) == [[], []]
