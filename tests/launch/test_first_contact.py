"""Ranks that can't meet: every one of them says why, at once if it is certain, and nobody waits in silence."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.rendezvous import patience, roll_call, server
from phalanx.rendezvous.asked import cpu_backend

from .jobs import run_job, write_script

LIMIT_S = 30


def await_words(*patterns):
    """Return once the ranks have said all of this, where ``capfd`` keeps what they say."""
    with open("/proc/self/fd/2") as file:
        while not all(re.search(pattern, os.pread(file.fileno(), 1 << 20, 0).decode()) for pattern in patterns):
            time.sleep(0.02)


def die_after(*patterns):
    await_words(*patterns)
    os.kill(os.getpid(), signal.SIGKILL)


def meet(rank, world_size, calls, by_hand):
    """Do what ``calls[rank]`` says: leave, or arguments of ``init_process_group``."""
    call = calls[rank]
    if by_hand:  # as if no launcher of ours had started the ranks
        del os.environ["PHALANX_LAUNCH"]
    patience._FIRST_S = call.pop("first_s", patience._FIRST_S)
    patience._FIRST_LAUNCHED_S = call.pop("first_launched_s", patience._FIRST_LAUNCHED_S)
    if "killed_after_s" in call:
        threading.Timer(call.pop("killed_after_s"), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if "killed_after" in call:
        threading.Thread(target=die_after, args=call.pop("killed_after"), daemon=True).start()
    os.environ.update(call.pop("env", {}))
    if "host" in call:
        roll_call.host_identity = partial(str, call.pop("host"))
    time.sleep(call.pop("after_s", 0))
    await_words(*call.pop("after", ()))
    if "arrives_after_s" in call:  # between serving the store and saying so in it
        arrive, pause_s = roll_call.RollCall._arrive, call.pop("arrives_after_s")
        roll_call.RollCall._arrive = lambda self: (time.sleep(pause_s), arrive(self))
    if "exit" in call:
        os._exit(call["exit"])
    if "raise" in call:
        raise call["raise"]
    if call.pop("session", False):
        return phalanx.init(**call).world_size
    dist.init_process_group(**{"backend": "phalanx", **call})
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def outcomes_of(run_ranks, *calls, by_hand=False, **options):
    outcomes = run_ranks(
        meet, len(calls), list(calls), by_hand, init=False, expect_failures=True, timeout_s=LIMIT_S, **options
    )
    assert not any(outcome.hung for outcome in outcomes), outcomes
    return outcomes


def errors_of(run_ranks, *calls, **options):
    """Return the error of each rank as text, empty for one that did not raise; each names its rank and the line."""
    outcomes = outcomes_of(run_ranks, *calls, **options)
    errors = ["" if outcome.exitcode == 0 else str(outcome.error or "") for outcome in outcomes]
    for error in filter(None, errors):
        assert "test_first_contact.py:" in error
    return errors


def numbers(rank, world_size, **more):
    return {"rank": rank, "world_size": world_size, **more}


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_world_of_another_size_than_the_launch_is_refused(run_ranks, backend):
    for error in errors_of(run_ranks, *(numbers(rank, 3, backend=backend) for rank in range(2))):
        assert "init_process_group at " in error
        assert "world_size is 3, and phalanx.spawn started 2 ranks: no other rank can join" in error
    fine, error = errors_of(run_ranks, numbers(0, 1, backend=backend), numbers(1, 1, backend=backend))
    assert fine == ""
    assert "rank must lie in [0, 1), as world_size is 1, got 1 (phalanx.spawn started 2 ranks)" in error


def test_world_sizes_that_differ_are_named_on_every_rank(run_ranks, tmp_path):
    url = f"file://{tmp_path}/meet"
    errors = errors_of(run_ranks, numbers(0, 2, init_method=url), numbers(1, 3, init_method=url), by_hand=True)
    for rank, error in enumerate(errors):
        assert error.startswith(f"rank {rank}: init_process_group at ")
        assert "different values of world_size: 2 on rank 0 (at " in error
        assert ", 3 on rank 1 (at " in error


def test_an_init_that_contradicts_the_environment_is_refused(run_ranks):
    for error in errors_of(run_ranks, *(numbers(rank, 3, session=True) for rank in range(2))):
        assert "phalanx.init at " in error
        assert "world_size is 3, and phalanx.spawn started 2 ranks" in error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by_hand", [False, True], ids=["launched", "by hand"])
def test_two_processes_of_the_same_rank_are_named(run_ranks, rank, by_hand):
    calls = [numbers(0, 3), numbers(1, 3), numbers(1, 3)] if rank else [numbers(0, 2), numbers(0, 2)]
    outcomes = outcomes_of(run_ranks, *calls, by_hand=by_hand)
    for outcome in outcomes:
        assert f"two processes claim rank {rank}: pid " in str(outcome.error)
        assert "port" not in str(outcome.error).lower()


@pytest.mark.parametrize("by_hand", [False, True], ids=["launched", "by hand"])
def test_a_second_rank_0_waits_until_the_first_has_said_who_it_is(run_ranks, by_hand):
    calls = [numbers(0, 2, arrives_after_s=0.3), numbers(0, 2, after_s=0.2)]
    for outcome in outcomes_of(run_ranks, *calls, by_hand=by_hand):
        assert "two processes claim rank 0: pid " in str(outcome.error)


def test_a_launch_without_rank_0_is_named(run_ranks):
    for error in errors_of(run_ranks, numbers(1, 2), numbers(1, 2)):
        assert "no process is rank 0, and all wait for it: that of rank 0 says rank=1 (at " in error


def test_a_rank_0_that_exits_while_all_others_wait_for_it_is_named(run_ranks, capfd):
    soon, all_wait = {"first_launched_s": 0.1}, [rf"rank {rank}: .* for rank 0 to listen" for rank in (1, 2)]
    _, *errors = errors_of(run_ranks, {"exit": 0, "after": all_wait}, {**soon}, {**soon})
    for error in errors:
        assert "rank 0 (pid " in error
        assert "exited with code 0 before all ranks had joined" in error


@pytest.mark.parametrize("other", ["gloo", "", "cpu:gloo,cuda:nccl"])
def test_backends_that_differ_are_named_on_every_rank(run_ranks, other):
    for error in errors_of(run_ranks, {}, {"backend": other or None}):
        assert "the ranks ask for different backends: 'phalanx' on rank 0 (at " in error
        assert f", {other or None!r} on rank 1 (at " in error


def test_backends_of_sessions_that_differ_are_named_on_every_rank(run_ranks):
    for error in errors_of(run_ranks, {"session": True}, {"session": True, "backend": "gloo"}):
        assert "phalanx.init at " in error
        assert "the ranks ask for different backends: 'phalanx' on rank 0 (at " in error
        assert ", 'gloo' on rank 1 (at " in error


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_script_without_a_launcher_is_told_how_to_start_it(forked, tmp_path, backend):
    script = write_script(
        tmp_path, f"import torch.distributed as dist\ndist.init_process_group({backend!r})", "hello.py"
    )
    given = {"RANK": "0"}  # which the script's first lines read
    environ = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "MASTER_ADDR")}
    done = forked.run(script, env=environ | given)
    assert (
        "WORLD_SIZE expected, but not set. A launcher sets it: phalanx run --nproc-per-node 2 hello.py" in done.stderr
    )
    assert done.stderr.count("Traceback") == 1


def test_a_port_of_another_program_is_named_on_rank_0_with_what_to_set(run_ranks):
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as stranger:  # hangs up at once
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        url = f"tcp://127.0.0.1:{stranger.server_address[1]}"
        (error,) = errors_of(run_ranks, numbers(0, 2, init_method=url), by_hand=True)
        stranger.shutdown()
    assert "is taken by another program. Set MASTER_PORT to a free one, the same on every rank" in error


def test_a_port_of_a_program_that_never_answers_ends_no_wait_late(run_ranks):
    """torch's own timeout does not end the wait for such a program's answer."""
    short = {"timeout": timedelta(seconds=1)}
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        point = f"127.0.0.1:{stranger.getsockname()[1]}"
        url = f"tcp://{point}"
        (first,) = errors_of(run_ranks, numbers(0, 2, init_method=url), by_hand=True)
        (second,) = errors_of(run_ranks, numbers(1, 2, init_method=url, **short), by_hand=True)
    assert "is taken by another program. Set MASTER_PORT to a free one, the same on every rank" in first
    assert f"timed out after 1 s waiting for the store at {point} to answer" in second
    assert "Check that MASTER_ADDR is rank 0's own host, and that nothing else listens on MASTER_PORT" in second


def test_what_a_rank_serves_itself_is_no_other_program_however_late_it_answers():
    with socket.create_server(("127.0.0.1", 0)) as served, socket.create_connection(served.getsockname()) as asks:
        assert server._listens(served.getsockname()[1])
        assert not server._listens(asks.getsockname()[1])


def test_backends_in_different_words_are_the_same():
    assert {cpu_backend(asked) for asked in ("", "gloo", "cpu:gloo,cuda:nccl")} == {"gloo"}
    assert {cpu_backend(asked) for asked in ("phalanx", "cpu:phalanx", "cuda:nccl,cpu:PHALANX")} == {"phalanx"}


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("call", [{"backend": "phalanx"}, {"backend": "gloo"}, {"session": True}], ids=str)
def test_a_rank_that_exits_before_it_joins_is_named_by_all_that_wait(run_ranks, leaver, call):
    calls = [{"exit": 0, "after_s": 0.3} if rank == leaver else dict(call) for rank in range(3)]
    outcomes = outcomes_of(run_ranks, *calls)
    for outcome in outcomes[:leaver] + outcomes[leaver + 1 :]:
        assert type(outcome.error) is phalanx.RankFailed
        assert outcome.error.ranks == (leaver,)
        assert f"rank {leaver} (pid {outcomes[leaver].pid}) exited with code 0 before all ranks had joined" in str(
            outcome.error
        )


def test_a_rank_that_raises_before_it_joins_is_named_with_its_exception(run_ranks):
    waits, _ = outcomes_of(run_ranks, {"session": True}, {"raise": KeyError("learning_rate"), "after_s": 0.3})
    assert "exited with code 1 (KeyError: 'learning_rate') before all ranks had joined" in str(waits.error)


@pytest.mark.parametrize("by_hand", [False, True], ids=["launched", "by hand"])
def test_a_rank_that_is_killed_within_init_is_named(run_ranks, by_hand):
    error, _, _ = errors_of(run_ranks, {}, {"killed_after_s": 0.5}, {"exit": 0, "after_s": 2.5}, by_hand=by_hand)
    assert "rank 1 (pid " in error
    assert ("was killed by SIGKILL" in error) == (not by_hand)


def test_a_file_that_cannot_be_used_is_named(run_ranks, tmp_path):
    for path, said in (
        (tmp_path / "none" / "meet", f"there is no folder {tmp_path}/none here"),
        (tmp_path, "that is a folder: name a file in it"),
        ("/proc/meet", "it can't be written to"),
    ):
        url = f"file://{path}"
        for error in errors_of(run_ranks, *(numbers(rank, 2, init_method=url) for rank in range(2))):
            assert f"{url}: {said}" in error


def die_within(rank, world_size, url):
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=world_size)
    dist.barrier()
    os._exit(3)


def test_a_file_of_an_earlier_run_does_no_harm(run_ranks, tmp_path):
    url = f"file://{tmp_path}/meet"
    run_ranks(die_within, 2, url, init=False, expect_failures=True, timeout_s=LIMIT_S)
    assert os.path.getsize(f"{tmp_path}/meet")
    outcomes = outcomes_of(run_ranks, *(numbers(rank, 2, init_method=url) for rank in range(2)))
    assert [outcome.value for outcome in outcomes] == [2, 2], outcomes


SERVES = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("killed", [0, 1])
def test_an_attempt_meets_in_a_store_that_outlives_the_one_before(run_ranks, killed, num_hosts):
    """As under torchrun, whose agent serves the store of every attempt."""
    attempts = [
        [{"killed_after_s": 1} if rank == killed else {"exit": 1, "after_s": 1.5} for rank in range(2)],
        [{"after_s": 1} if rank == killed else {} for rank in range(2)],
    ]
    agent = subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with agent:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.stdout.readline().strip()}
        for calls in attempts:
            for rank, call in enumerate(calls):
                call |= numbers(rank, 2, host=rank % num_hosts)
                call["env"] = {**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            outcomes = outcomes_of(run_ranks, *calls, by_hand=True)
        agent.communicate("\n")
    assert [outcome.value for outcome in outcomes] == [2, 2], outcomes


def test_a_name_that_does_not_resolve_is_named(run_ranks, capfd):
    env = {"MASTER_ADDR": "no-such-host.invalid"}
    url = "tcp://no-such-host.invalid:29500"
    for error in errors_of(run_ranks, *(numbers(rank, 2, init_method=url) for rank in range(2)), env=env):
        assert "the name 'no-such-host.invalid' does not resolve here (" in error
    late = {"init_method": url, "first_s": 0.2}  # the name of a pod may come late
    calls = [numbers(rank, 2, killed_after=[f"rank {rank}: init_process_group"], **late) for rank in range(2)]
    outcomes_of(run_ranks, *calls, env=env, by_hand=True)
    said = capfd.readouterr().err
    for rank in range(2):
        assert f"phalanx: rank {rank}: init_process_group at test_first_contact.py:" in said
    assert "for rank 0 at no-such-host.invalid:29500: the name 'no-such-host.invalid' does not resolve here" in said


def test_ranks_started_by_hand_say_whom_they_wait_for(run_ranks, capfd):
    soon = {"first_s": 0.2}
    first, last = {"after": ["rank 1: .* for rank 0 to listen"]}, {"after": ["rank 1: .* for rank 2 at"], **soon}
    began_s = time.monotonic()
    outcomes = outcomes_of(run_ranks, first, {**soon}, last, by_hand=True)
    most = 2 + math.log((time.monotonic() - began_s) / 0.2, 3)
    assert [outcome.value for outcome in outcomes] == [3, 3, 3], outcomes
    said = capfd.readouterr().err
    assert "phalanx: rank 1: init_process_group at test_first_contact.py:" in said
    assert " s for rank 0 to listen at 127.0.0.1:" in said
    assert "(connection refused). Start rank 0" in said
    assert " s for rank 2 at 127.0.0.1:" in said
    assert "WORLD_SIZE is 3. Every rank must call init_process_group" in said
    assert said.count("phalanx: rank 1") <= most  # ever more seldom


@pytest.mark.parametrize("on_many_hosts", [False, True])
def test_ranks_of_a_launcher_are_not_told_to_start_what_it_starts(run_ranks, capfd, on_many_hosts):
    soon = {"first_s": 0.1, "first_launched_s": 0.3}
    if on_many_hosts:  # as `phalanx run` tells the ranks of several nodes
        soon["env"] = {"PHALANX_LAUNCH": "", "PHALANX_EPOCH": '{"job": "one", "attempt": [0], "name": "a"}'}
    launcher = "phalanx run" if on_many_hosts else "phalanx.spawn"
    first, last = ({"after": [f"rank 1: .* for rank {which}"], **soon} for which in ("0 to listen", "2 at"))
    outcomes = outcomes_of(run_ranks, first, {**soon}, last)
    assert [outcome.value for outcome in outcomes] == [3, 3, 3], outcomes
    said = capfd.readouterr().err
    for whom in (r"rank 0 to listen at \S+ \(connection refused\)", r"rank 2 at \S+"):
        assert re.search(
            rf"rank 1: .* has waited \d s for {whom}\. {launcher} is starting all ranks; phalanx why shows", said
        ), said
    assert "Start rank 0" not in said
    assert "start those" not in said


def test_a_wait_ends_at_the_timeout_and_names_the_missing(run_ranks):
    short = {"timeout": timedelta(seconds=1)}
    first, other, _ = errors_of(run_ranks, short, {**short}, {"exit": 0, "after_s": 4}, by_hand=True)
    for error in (first, other):
        assert "timed out after 1 s: rank 2 did not come to 127.0.0.1:" in error


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (numbers(0, 0), 'world_size must be at least 1, got 0; right: init_process_group("phalanx") takes rank and'),
        ({"backend": "phalnx"}, "unknown backend 'phalnx', did you mean phalanx?"),
    ],
    ids=["world of nobody", "misspelt"],
)
def test_a_call_that_means_nothing_shows_the_right_one(run_ranks, call, said):
    (error,) = errors_of(run_ranks, call, by_hand=True)
    assert said in error


@pytest.mark.parametrize("backend", ["foo", "cpu:foo"])
def test_an_unknown_backend_is_refused_before_ranks_wait_for_each_other(run_ranks, backend):
    for error in errors_of(run_ranks, {"backend": backend}, {"backend": "gloo"})[:1]:
        assert f"unknown backend '{backend}'; torch knows no backend of that name: init_process_group(" in error
        assert '"gloo"' in error


def part(rank, world_size, ports):
    """Ranks 0 and 1 meet and part, then 0, 2 and 3, while 1 has ended; then 2 and 3 alone, elsewhere."""

    def together(ranks, **options):
        if rank not in ranks:
            return
        dist.init_process_group("phalanx", rank=ranks.index(rank), world_size=len(ranks), **options)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == len(ranks)
        dist.destroy_process_group()

    together([0, 1])
    if rank == 1:
        return
    if rank in (2, 3):
        time.sleep(0.7)
    together([0, 2, 3])
    together([2, 3], init_method=f"file://{ports}")
    together([0])


def test_ranks_that_part_and_meet_again_in_other_worlds_raise_no_alarm(run_ranks, tmp_path):
    run_ranks(part, 4, f"{tmp_path}/meet", init=False, timeout_s=LIMIT_S)


def test_phalanx_run_names_a_rank_that_left_before_it_joined(tmp_path):
    source = """
    import torch.distributed as dist
    if RANK == 1:
        sys.exit(0)
    dist.init_process_group("gloo")
    """
    done = run_job(tmp_path, source, "--warm", num_ranks=3)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("phalanx run: rank ") :]
    assert "raised RankFailed" in last
    assert "exited with code 0 before all ranks had joined" in last


def test_backend_mpi_on_a_torch_without_it_gets_advice(tmp_path):
    if dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    done = run_job(
        tmp_path, "import torch.distributed as dist\ndist.init_process_group('mpi')\n", "--warm", num_ranks=1
    )
    assert 'hint: this torch has no MPI; init_process_group("phalanx")' in done.stderr, sys.version


def test_a_spawn_that_means_nothing_shows_the_right_one():
    lock = threading.Lock()
    for fn, nprocs, said in (
        (print, 0, "nprocs must be a whole number of at least 1, got 0; right: phalanx.spawn(fn, args=(first, "),
        (print, -2, "got -2; right: "),
        ("train", 2, "fn must be a function, got 'train'; right: "),
        (lambda rank: lock, 2, "<lambda> or its arguments can't be sent to another process: "),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            phalanx.spawn(fn, nprocs=nprocs)
        assert said in str(caught.value)
        assert caught.value.__cause__ is None


def leave_before_a_group(rank, world_size):
    if rank == 2:
        os._exit(0)
    return dist.new_group([0, 2])


def test_a_later_group_waits_for_no_rank_that_has_exited(run_ranks):
    outcomes = run_ranks(leave_before_a_group, 3, expect_failures=True, timeout_s=LIMIT_S)
    assert type(outcomes[0].error) is phalanx.RankFailed
    assert "exited with code 0 before it joined" in str(outcomes[0].error)
