"""The harness itself, on Gloo, so that it stands without the backend it tests."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import unittest

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.failure.ending import Ending
from phalanx.failure.last_words import LastWords
from phalanx.failure.report import first_true_failure
from phalanx.testing import RankError, await_release, reached, run_ranks, spawn_ranks


def sum_of_ranks(rank, world_size, num_elems):
    tensor = torch.full((num_elems,), float(rank))
    dist.all_reduce(tensor)
    return tensor


def describe_process(rank, world_size):
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "initialised": dist.is_initialized(),
        "env": {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "GIVEN", "PATCHED")},
    }


def init_from_environment(rank, world_size):
    dist.init_process_group("gloo")
    return dist.get_rank()


def rank_one_raises(rank, world_size):
    if rank == 1:
        raise ValueError("bad learning rate")
    dist.barrier()


def rank_one_dies(rank, world_size, how):
    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


def rank_zero_hangs(rank, world_size):
    if rank == 0:
        threading.Event().wait()


def print_rank(rank, world_size):
    print(f"hello from {rank}\n", end="")  # in one piece, also unbuffered
    print(f"trouble on {rank}\n", end="", file=sys.stderr)


def step_through(rank, world_size):
    reached("up", os.getpid())
    return await_release("go")


def return_something_unpicklable(rank, world_size):
    return threading.Lock()


class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_odd(rank, world_size):
    raise OddError("one", "two")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(run_ranks, world_size):
    results = run_ranks(sum_of_ranks, world_size, 3, backend="gloo")
    want = float(sum(range(world_size)))
    assert [result.tolist() for result in results] == [[want] * 3] * world_size


@pytest.mark.parametrize("init_method", ["file", "tcp", "env"])
def test_every_rendezvous_brings_the_ranks_together(run_ranks, init_method):
    results = run_ranks(sum_of_ranks, 2, 1, backend="gloo", init_method=init_method)
    assert [result.item() for result in results] == [1.0, 1.0]


def test_a_group_of_two_starts_in_well_under_a_second(run_ranks):
    run_ranks(sum_of_ranks, 2, 1, backend="gloo")  # starts the server
    took = []
    for _ in range(5):
        start = time.perf_counter()
        run_ranks(sum_of_ranks, 2, 1, backend="gloo")
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5, took


def test_ranks_are_processes_with_this_environment(run_ranks, monkeypatch):
    monkeypatch.setenv("PATCHED", "here")
    first, second = run_ranks(describe_process, 2, backend=None, env={"GIVEN": "yes"})
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert first["threads"] == 1
    assert not first["initialised"]
    assert second["env"] == {"RANK": "1", "WORLD_SIZE": "2", "GIVEN": "yes", "PATCHED": "here"}


def test_a_function_can_initialise_by_itself(run_ranks):
    assert run_ranks(init_from_environment, 2, init=False) == [0, 1]


def test_the_rank_that_raises_is_named_and_not_its_victims(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 .*ValueError: bad learning rate") as caught:
        run_ranks(rank_one_raises, 2, backend="gloo")
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert "in rank_one_raises" in caught.value.traceback
    assert len(caught.value.outcomes) == 2


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("SIGKILL", -9), ("SIGSEGV", -11)])
def test_the_rank_that_dies_is_named_and_not_its_victims(run_ranks, how, code):
    with pytest.raises(RankError) as caught:
        run_ranks(rank_one_dies, 3, how, backend="gloo")
    assert (caught.value.rank, caught.value.exitcode) == (1, code)
    assert caught.value.outcomes[0].error is not None
    if how == "SIGSEGV":
        assert "rank_one_dies" in caught.value.traceback


def test_a_rank_that_hangs_is_killed_at_the_limit_and_shows_where(run_ranks):
    start = time.monotonic()
    with pytest.raises(RankError, match=r"\n  limit 0\.5 s passed; hung: ranks \[0\]") as caught:
        run_ranks(rank_zero_hangs, 2, backend=None, timeout_s=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.hung == [0]
    assert "rank_zero_hangs" in caught.value.traceback
    assert caught.value.outcomes[1].ok


def test_expected_failures_come_back_as_outcomes(run_ranks):
    first, second = run_ranks(rank_one_dies, 2, "SIGKILL", backend="gloo", expect_failures=True)
    assert isinstance(first.error, RuntimeError)
    assert first.exitcode == 1
    assert second.signal is signal.SIGKILL
    assert not second.ok


def test_what_a_rank_prints_reaches_the_capture_of_this_test(run_ranks, capfd):
    run_ranks(print_rank, 2, backend=None)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["hello from 0", "hello from 1"]
    assert sorted(err.splitlines()) == ["trouble on 0", "trouble on 1"]


def test_ranks_are_stepped_and_released_from_the_test():
    with spawn_ranks(step_through, 2, backend=None) as ranks:
        assert ranks.wait_until_reached("up") == ranks.pids
        ranks.release("go", "first", ranks=[0])
        ranks.release("go", "second", ranks=[1])
        assert [outcome.value for outcome in ranks.join(20)] == ["first", "second"]


def test_a_stopped_rank_hangs_until_resumed_or_killed():
    with spawn_ranks(step_through, 2, backend=None) as ranks:
        ranks.wait_until_reached("up")
        ranks.stop(0)
        ranks.release("go", ranks=[0])
        ranks.kill(1)
        first, second = ranks.join(1)
        assert first.hung
        assert second.signal is signal.SIGKILL
    with spawn_ranks(step_through, 1, backend=None) as ranks:
        ranks.wait_until_reached("up")
        ranks.stop(0)
        ranks.release("go")
        ranks.resume(0)
        assert ranks.join(20)[0].ok


def test_waiting_for_a_rank_that_ended_says_how_it_ended():
    with (
        pytest.raises(RankError, match=r"rank 0 .* killed by SIGKILL.* to reach 'never'"),
        spawn_ranks(step_through, 1, backend=None) as ranks,
    ):
        ranks.wait_until_reached("up")
        ranks.kill(0)
        ranks.wait_until_reached("never")


def test_leaving_the_block_kills_the_ranks():
    with spawn_ranks(step_through, 2, backend=None) as ranks:
        ranks.wait_until_reached("up")
        pids = ranks.pids
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_values_that_cannot_travel_are_an_error_and_not_a_hang(run_ranks):
    with pytest.raises(RankError, match=r"its result, of type lock, can't be sent back: cannot pickle .*return what"):
        run_ranks(return_something_unpicklable, 1, backend=None)
    with pytest.raises(RankError, match="OddError: one and two"):
        run_ranks(raise_odd, 1, backend=None)


def leave_the_test(rank, world_size, how):
    if rank == 1:
        if how == "importorskip":
            pytest.importorskip("no_such_module")
        if how == "SkipTest":
            raise unittest.SkipTest("needs rank 1")
        getattr(pytest, how)("needs rank 1")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "raised", "said"),
    [
        ("skip", pytest.skip.Exception, "^needs rank 1$"),
        ("importorskip", pytest.skip.Exception, "could not import 'no_such_module'"),
        ("xfail", pytest.xfail.Exception, "^needs rank 1$"),
        ("exit", pytest.exit.Exception, "^needs rank 1$"),
        ("SkipTest", unittest.SkipTest, "^needs rank 1$"),
    ],
)
def test_a_rank_skips_its_test_or_expects_its_failure(run_ranks, how, raised, said):
    with pytest.raises(raised, match=said) as caught:
        run_ranks(leave_the_test, 2, how, backend="gloo")
    assert type(caught.value) is raised
    assert caught.traceback.filter(caught)[-1].path.samefile(__file__)  # where pytest says that it was skipped


def skip_on_one_rank_and_fail_on_the_other(rank, world_size):
    if rank == 1:
        pytest.skip("needs a GPU")
    await_release("skipped")
    raise ValueError("bad learning rate")


def test_ranks_that_hang_after_the_failure_of_another_are_not_said_to_have_reached_the_limit():
    hung, failed = Ending(rank=0, pid=10, exitcode=-6, hung=True), Ending(rank=1, pid=11, exitcode=3)
    assert "\n  rank 1 failed; hung: ranks [0]" in str(first_true_failure([hung, failed], 4.0))


def test_the_headline_of_a_hang_names_the_last_call_on_its_stack():
    stack = (
        "Current thread 0x1 (most recent call first):",
        '  File "/h/a.py", line 3 in f',
        '  File "/h/a.py", line 9 in g',
    )
    hung = Ending(rank=1, pid=10, exitcode=-6, hung=True, last_words=LastWords(lines=stack))
    assert (
        str(first_true_failure([hung]))
        .splitlines()[0]
        .endswith("hung and was killed at the limit, at /h/a.py:3 [world_size 1]")
    )


def test_a_call_that_the_harness_makes_names_no_line(run_ranks):
    with pytest.raises(RankError, match=r"ValueError: init_process_group: unknown backend 'glo', did you mean gloo\?"):
        run_ranks(sum_of_ranks, 2, 1, backend="glo")


def test_a_failure_beside_a_skip_is_a_failure():
    with spawn_ranks(skip_on_one_rank_and_fail_on_the_other, 2, backend=None) as ranks:
        with pytest.raises(pytest.skip.Exception, match="needs a GPU"):
            ranks.wait_until_reached("never", ranks=[1])
        ranks.release("skipped", ranks=[0])
        first, second = ranks.join(30)
    assert isinstance(first.error, ValueError)
    assert isinstance(second.error, pytest.skip.Exception)
    error = first_true_failure([first, second])
    assert re.match(
        r"rank 0 .* raised ValueError: bad learning rate, at .*\n  rank 1: Skipped: needs a GPU\n", str(error)
    )


def fail_a_test(rank, world_size):
    pytest.fail("rank 0 has no data")


def test_what_pytest_raises_comes_back_as_itself(run_ranks):
    [outcome] = run_ranks(fail_a_test, 1, backend=None, expect_failures=True)
    assert type(outcome.error) is pytest.fail.Exception
    assert outcome.error.msg == "rank 0 has no data"


def scaled(rank, world_size, offset, *, factor, form=0):
    return offset + rank * factor + form


def test_keyword_arguments_reach_the_function(run_ranks):
    assert run_ranks(scaled, 2, 1, kwargs={"factor": 10, "form": 100}, backend=None) == [101, 111]
    with pytest.raises(
        RankError, match=r"scaled\(rank, world_size, \*args, \*\*kwargs\), here scaled\(0, 1, 5, fact=2\)"
    ):
        run_ranks(scaled, 1, 5, kwargs={"fact": 2}, backend=None)
    with pytest.raises(TypeError, match=r"no factor; .* right: run_ranks\(scaled, 2, kwargs=\{'factor': 10\}\)"):
        run_ranks(scaled, 2, factor=10)


def assert_nothing_said(rank, world_size):
    assert torch.ones(2).tolist() == [1, 2]


def fail_inside_torch(rank, world_size):
    torch.nn.Linear(3, 4)(torch.ones(2, 7))


def test_the_headline_has_the_failing_line_and_only_the_users_frames_follow(run_ranks):
    with pytest.raises(RankError) as caught:
        run_ranks(assert_nothing_said, 1, backend=None)
    assert re.match(
        r"rank 0 \(pid \d+\) raised AssertionError: assert torch.ones\(2\).tolist\(\) == \[1, 2\], "
        r"at \S*test_testing.py:\d+ \[world_size 1\]\n",
        str(caught.value),
    )
    with pytest.raises(RankError, match=r"7 and 3x4\), at \S*test_testing.py:\d+ \[world_size 1\]\n") as caught:
        run_ranks(fail_inside_torch, 1, backend=None)
    lines = str(caught.value).splitlines()
    assert lines[2:] == ["    torch.nn.Linear(3, 4)(torch.ones(2, 7))", lines[-1]]
    assert re.fullmatch(r"  \(\d+ frames of phalanx and torch folded\)", lines[-1])
    assert "linear.py" in caught.value.traceback


def fail_with_a_long_message(rank, world_size):
    raise ValueError("\n".join(f"line {number}" for number in range(100)))


def test_a_long_message_is_whole(run_ranks):
    with pytest.raises(RankError, match=r"\n  line 50\n(.*\n)+  line 99$"):
        run_ranks(fail_with_a_long_message, 1, backend=None)


def test_a_local_function_travels_by_value(run_ranks):
    offset = 5
    assert run_ranks(lambda rank, world_size: offset + rank, 2, backend=None) == [5, 6]


def test_a_killed_parent_takes_its_ranks_along(tmp_path):
    script = (
        "import test_testing as t\n"
        "with t.spawn_ranks(t.step_through, 2, backend=None) as ranks:\n"
        "    print(*ranks.wait_until_reached('up'), flush=True)\n"
        "    ranks.join(60)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    with parent:
        pidfds = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(pidfds) == 2
        parent.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 10)[0], "the rank outlived its parent"
        os.close(pidfd)


def takes_nothing():
    pass


def calls_wrongly(rank, *_):
    takes_nothing(rank)


def test_a_function_that_takes_other_arguments_is_told_with_what_it_is_called_with():
    takes = r"takes_nothing\(\) takes 0 positional arguments but {} were given; it is called as takes_nothing\({}\)"
    called = takes.format(2, r"rank, world_size, \*args") + r", here takes_nothing\(\d, 2\)"
    with pytest.raises(RankError, match=f"TypeError: {called}"):
        run_ranks(takes_nothing, 2, init=False)
    called = takes.format(3, r"rank, \*args") + r", here takes_nothing\(\d, 10, 'a+\.\.\.a+'\)"
    with pytest.raises(RankError, match=f"TypeError: {called}"):
        phalanx.spawn(takes_nothing, (10, "a" * 300), nprocs=2)


def test_a_wrong_call_within_the_function_is_its_own():
    with pytest.raises(RankError, match="takes_nothing") as caught:
        phalanx.spawn(calls_wrongly, nprocs=1)
    assert "takes_nothing(rank)" in str(caught.value)
    assert "it is called as" not in str(caught.value)
