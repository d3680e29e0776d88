"""`phalanx.spawn` from tests, scripts, ``python -c`` and what stands for a notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.host.cpus import read_machine
from phalanx.host.proc_stat import children_of
from phalanx.launch.spawn import workers
from phalanx.launch.spawn.worker import channel_to_parent
from phalanx.testing import await_release, reached, run_ranks, spawn_ranks
from phalanx.wire.waiting import wait_until

LIMIT_S = 60


def total(rank, offset):
    dist.init_process_group("phalanx")
    tensor = torch.full((3,), float(rank + offset))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor


def describe(rank):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}, torch.get_num_threads()


def rank_one_raises(rank):
    dist.init_process_group("phalanx")
    if rank == 1:
        raise ValueError("bad learning rate")
    dist.barrier()


def rank_one_is_killed(rank, backend):
    dist.init_process_group(backend)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_one_raises_while_rank_zero_waits(rank, path):
    signal.signal(signal.SIGTERM, lambda *_: (open(path, "w").close(), os._exit(0)))
    dist.init_process_group("phalanx")
    dist.barrier()
    if rank == 1:
        raise KeyError("learning_rate")
    threading.Event().wait()


def exit_with(rank, code):
    sys.exit(code)


def load_data(rank, method):
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context=method)
    return sum(batch.sum().item() for batch in loader)


def leave_a_child_behind(rank):
    child = subprocess.Popen(["sleep", "60"])
    if rank == 1:
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return child.pid


def wait_for(rank, path):
    fd = os.open(path, os.O_RDONLY)  # a fifo: returns once the test opens it
    os.close(fd)
    return rank


class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_odd(rank):
    raise OddError("one", "two")


@dataclasses.dataclass
class Point:
    x: int


def move(rank, point):
    return Point(point.x + rank)


class Broken:
    def __reduce__(self):
        return int, ("no number",)


def return_broken(rank):
    return Broken()


def return_rank(rank):
    return rank


RETURN_RANK = return_rank


def die_while_sending(rank):
    os.write(channel_to_parent().fileno(), b"\x00\x00\x10\x00half")  # the head of a longer message
    os.kill(os.getpid(), signal.SIGKILL)


def die_of_signal(rank, number):
    os.kill(os.getpid(), number)


def wait_until_gone(pid):
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = select.select([pidfd], [], [], LIMIT_S)[0]
    os.close(pidfd)
    assert gone, f"process {pid} still lives"


@pytest.mark.parametrize("nprocs", [1, 2, 8])
def test_results_come_back_in_rank_order_and_ranks_meet_without_arguments(nprocs):
    results = phalanx.spawn(total, args=(1,), nprocs=nprocs)
    want = float(sum(range(1, nprocs + 1)))
    assert [result.tolist() for result in results] == [[want] * 3] * nprocs


@pytest.fixture
def lean_servers(monkeypatch):
    """Have servers that a test starts import what ranks need, and not what this process has imported besides."""
    monkeypatch.setattr(workers, "_PRELOAD_IF_LOADED", re.compile("phalanx[.].*"))


def test_each_rank_finds_torchruns_environment_and_its_share_of_the_cores(lean_servers, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, read_machine().num_cores // 2)
    for rank, (environ, num_threads) in enumerate(phalanx.spawn(describe, nprocs=2)):
        assert environ == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(threads),
        }
        assert num_threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [threads for _, threads in phalanx.spawn(describe, nprocs=2)] == [3, 3]


def test_values_of_the_callers_own_classes_go_there_and_back():
    assert phalanx.spawn(move, (Point(3),), nprocs=2) == [Point(3), Point(4)]


def test_a_lambda_runs_with_what_it_closes_over():
    factor = 10
    assert phalanx.spawn(lambda rank: rank * factor, nprocs=2) == [0, 10]


def test_the_first_true_failure_is_raised_with_its_remote_traceback():
    with pytest.raises(phalanx.RankError, match=r"rank 1 .* raised ValueError: bad learning rate") as caught:
        phalanx.spawn(rank_one_raises, nprocs=3)
    assert (caught.value.rank, type(caught.value.error)) == (1, ValueError)
    assert "in rank_one_raises" in str(caught.value)
    assert "".join(traceback.format_exception(caught.value)).count("ValueError: bad learning rate") == 1


def call_with_another_size(rank):
    dist.init_process_group("phalanx")
    dist.all_reduce(torch.ones(3 + rank))


def test_a_failure_shows_the_users_frames_alone_and_says_each_thing_once():
    with pytest.raises(phalanx.RankError) as caught:
        phalanx.spawn(call_with_another_size, nprocs=3)
    text = str(caught.value)
    assert len(text.splitlines()) <= 12, text
    assert "site-packages" not in text
    assert "in call_with_another_size" in text
    assert "frames of phalanx and torch folded" in text
    assert text.count("called all_reduce with different sizes") == 1
    assert "site-packages" in caught.value.traceback
    assert re.search(r"^  rank(s \d and \d| \d|s \d-\d): (ended because of it|the same error)", text, re.M)


def name_device_ids(rank):
    dist.init_process_group("phalanx")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[rank])


def test_a_usual_mistake_comes_with_its_hint():
    with pytest.raises(phalanx.RankError, match=r"\n  hint: on a CPU leave device_ids and output_device out"):
        phalanx.spawn(name_device_ids, nprocs=2)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_rank_that_is_killed_is_the_cause_and_not_its_victims(backend):
    with pytest.raises(phalanx.RankError, match=r"rank 1 .* was killed by SIGKILL") as caught:
        phalanx.spawn(rank_one_is_killed, (backend,), nprocs=3)
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)


def test_the_other_ranks_are_ended_and_may_clean_up(tmp_path):
    with pytest.raises(phalanx.RankError, match="KeyError") as caught:
        phalanx.spawn(rank_one_raises_while_rank_zero_waits, (str(tmp_path / "cleaned"),), nprocs=2)
    assert caught.value.rank == 1
    assert (tmp_path / "cleaned").exists()


def end_at_once(rank):
    if rank == 1:
        os._exit(0)
    return rank


def test_a_rank_that_hands_over_no_result_is_a_failure():
    with pytest.raises(phalanx.RankError, match=r"rank 1 .*ended without a result: by os\._exit\(0\)"):
        phalanx.spawn(end_at_once, nprocs=2)


def test_an_exit_code_is_a_failure_unless_it_is_zero():
    assert phalanx.spawn(exit_with, (0,), nprocs=2) == [None, None]
    with pytest.raises(phalanx.RankError) as caught:
        phalanx.spawn(exit_with, (3,), nprocs=1)
    assert caught.value.exitcode == 3


def test_what_cannot_travel_is_a_clear_error():
    with pytest.raises(TypeError, match=r"can't be sent to another process.*lock"):
        phalanx.spawn(total, (threading.Lock(),), nprocs=2)
    with pytest.raises(phalanx.RankError, match="lock"):
        phalanx.spawn(lambda rank: threading.Lock(), nprocs=1)
    with pytest.raises(phalanx.RankError, match="OddError: one and two"):
        phalanx.spawn(raise_odd, nprocs=1)
    for nprocs in (0, "2", 1.5):
        with pytest.raises(ValueError, match="nprocs must be a whole number of at least 1"):
            phalanx.spawn(total, nprocs=nprocs)
    with pytest.raises(TypeError, match=r"args must be a tuple, got 5; right: phalanx.spawn\(fn, args=\(5,\)\)"):
        phalanx.spawn(total, args=5)
    with pytest.raises(phalanx.RankError, match="its result can't be unpickled here"):
        phalanx.spawn(return_broken, nprocs=1)


def test_a_name_that_was_bound_again_does_not_change_what_runs(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "return_rank", lambda rank: "another")
    assert phalanx.spawn(RETURN_RANK, nprocs=2) == [0, 1]


def test_a_rank_that_dies_while_its_result_is_on_its_way_is_named():
    with pytest.raises(phalanx.RankError, match=r"rank 0 .* was killed by SIGKILL"):
        phalanx.spawn(die_while_sending, nprocs=1)
    with pytest.raises(phalanx.RankError, match=r"rank 0 .* was killed by signal 40"):
        phalanx.spawn(die_of_signal, (40,), nprocs=1)


@pytest.mark.slow
def test_ranks_that_nobody_joins_finish_before_the_interpreter_does(tmp_path):
    source = """
        import os, phalanx
        def work(rank):
            os.write(1, b"ran %d\\n" % rank)  # in one piece, which print() is not with PYTHONUNBUFFERED
            return b"x" * 1_000_000
        if __name__ == "__main__":
            phalanx.spawn(work, nprocs=2, join=False)
        """
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    done = run_python("train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["ran 0", "ran 1"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", None])
def test_data_loader_workers_run_inside_a_rank(method):
    assert phalanx.spawn(load_data, (method,), nprocs=2) == [28.0, 28.0]


def name_start_method(rank):
    return multiprocessing.get_start_method()


@pytest.mark.slow
def test_a_rank_starts_processes_as_its_parent_does():
    assert phalanx.spawn(name_start_method, nprocs=1) == [multiprocessing.get_start_method()]
    code = "import multiprocessing, phalanx; from tests.launch.test_spawn import name_start_method as fn\n"
    code += "if __name__ == '__main__': multiprocessing.set_start_method('spawn'); print(phalanx.spawn(fn, nprocs=1))"
    assert run_python("-c", code, cwd=Path(__file__).parents[2]).stdout == "['spawn']\n"


def test_daemonic_ranks_can_have_no_children():
    with pytest.raises(phalanx.RankError, match="daemonic processes are not allowed to have children"):
        phalanx.spawn(load_data, ("fork",), nprocs=1, daemon=True)


def test_without_join_a_context_comes_back_at_once(tmp_path):
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    context = phalanx.spawn(wait_for, (fifo,), nprocs=2, join=False)
    assert not context.join(timeout=0.1)
    assert len(set(context.pids())) == 2
    assert [process.pid for process in context.processes] == context.pids()
    with open(fifo, "w"):
        assert context.join()
    assert context.results == [0, 1]
    assert context.join()


def test_what_a_rank_has_started_ends_with_it(capfd):
    for pid in phalanx.spawn(lambda rank: leave_a_child_behind(0), nprocs=2):
        wait_until_gone(pid)
    with pytest.raises(phalanx.RankError, match="SIGKILL"):
        phalanx.spawn(leave_a_child_behind, nprocs=2)
    wait_until_gone(int(capfd.readouterr().out))


# ---------------------------------------------------------------- other places to call it from


def run_python(*args, **options):
    """Run Python; the ranks that it starts are forked from a warm process, since no test here asks how they start."""
    environ = {**os.environ, "PHALANX_WARM": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=LIMIT_S, env=environ, **options
    )


@pytest.fixture
def run_script(forked, tmp_path):
    """``run_script(source)`` runs a script as `run_python` would, but with torch imported."""

    def run(source):
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        environ = {**os.environ, "PHALANX_WARM": "1", "OMP_NUM_THREADS": "1"}
        return forked.run(tmp_path / "train.py", cwd=tmp_path, env=environ, timeout=LIMIT_S)

    return run


CELL = """
import torch, torch.distributed as dist, dataclasses, phalanx

@dataclasses.dataclass
class Result:
    value: float

offset = 1

def train(rank, scale):
    dist.init_process_group("phalanx")
    tensor = torch.tensor([float(rank + offset) * scale])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return Result(tensor.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["command", "stdin", "notebook"])
def test_functions_and_classes_of_a_cell_travel(how):
    source = CELL + "results = phalanx.spawn(train, (2,), nprocs=2)\nassert results == [Result(6.0)] * 2\nprint('good')"
    if how == "command":
        done = run_python("-c", source)
    elif how == "stdin":
        done = run_python("-", input=source)
    else:  # cells of an interactive shell
        cells = [CELL, source[len(CELL) :]]
        shell = (
            "import __main__, sys, linecache\n"
            f"for number, cell in enumerate({cells!r}):\n"
            "    exec(compile(cell, f'<ipython-input-{number}>', 'exec'), __main__.__dict__)\n"
        )
        done = run_python("-c", shell)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "good\n"


GUARDED = """
import os, phalanx

def work(rank, word):
    os.write(1, b"%s %d\\n" % (word.encode(), rank))
    return rank

if __name__ == "__main__":
    print("results", phalanx.spawn(work, ("hello",), nprocs=2))
"""


def test_a_script_with_a_guard_runs_and_prints_in_order(run_script):
    done = run_script(GUARDED)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["hello 0", "hello 1", "results [0, 1]"]
    assert done.stderr == ""


@pytest.mark.parametrize("call", ["phalanx.spawn(fn, nprocs=2)", "phalanx.testing.run_ranks(fn, 2)"])
def test_a_script_without_a_guard_is_told_the_right_call_once(run_script, call):
    done = run_script(f"import phalanx\nfn = print\n{call}\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("RuntimeError: ") == 1
    assert done.stderr.endswith(f' right:\n    if __name__ == "__main__":\n        {call}\n')


BELOW = """
import phalanx, phalanx.testing

def above(rank, given):
    pass

if __name__ == "__main__":
    class Config:
        pass
    def train(rank):
        pass
    {call}
"""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("phalanx.spawn(train, nprocs=1)", "train"),
        ("phalanx.testing.run_ranks(train, 1)", "train"),
        ("phalanx.spawn(above, args=(Config(),), nprocs=1)", "Config"),
    ],
)
def test_what_is_defined_below_the_guard_is_named_with_its_place(run_script, call, name):
    done = run_script(BELOW.format(call=call))
    last = done.stderr.rstrip().rpartition("RankError: ")[2]
    assert done.returncode == 1
    assert f" raised AttributeError: a rank imports the script, and {name} is not there then: define it at" in last
    assert ' at the top level of the script, above if __name__ == "__main__":' in last
    assert "__mp_main__" not in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("torch.multiprocessing.spawn(fn)", "  hint: guard the call that starts processes: if __name__ == "),
        (
            "phalanx.spawn(fn)",
            "  or call fn(phalanx.init().rank) alone: a launcher has started this script on each rank",
        ),
    ],
)
def test_a_rank_that_starts_processes_without_a_guard_is_told_so_last(tmp_path, call, said):
    (tmp_path / "train.py").write_text(f"import phalanx, torch\nfn = print\n{call}\n")
    done = run_python("-m", "phalanx", "run", "--nproc-per-node", "1", "train.py", cwd=tmp_path)
    screen = done.stderr.partition("phalanx run: rank 0 ")[2]
    assert done.returncode == 1
    assert f"\n{said}" in screen
    assert f"\n      {call}\n" in screen


FOREVER = """
import os, signal, sys, phalanx

def wait(rank):
    try:
        os.write(1, b"%d\\n" % os.getpid())  # one call, so that lines of two ranks stay whole
        while True:
            signal.pause()
    finally:
        os.write(1, b"cleaned up\\n")

if __name__ == "__main__":
    phalanx.spawn(wait, nprocs=2)
"""


@pytest.fixture
def waiting_script(forked, tmp_path):
    """A script whose two ranks wait, what it prints, and their pids."""
    (tmp_path / "train.py").write_text(FOREVER)
    told, tell = os.pipe()
    with os.fdopen(told) as stdout, contextlib.ExitStack() as stack:
        try:
            script = stack.enter_context(forked.start(tmp_path / "train.py", cwd=tmp_path, stdout=tell))
        finally:
            os.close(tell)
        yield script, stdout, [int(stdout.readline()) for _ in range(2)]


def test_ctrl_c_ends_every_rank_after_its_cleanup(waiting_script):
    script, stdout, pids = waiting_script
    os.kill(script.pid, signal.SIGINT)
    _, err = script.communicate(LIMIT_S)
    assert script.returncode == -signal.SIGINT
    assert stdout.read() == "cleaned up\n" * 2
    assert err.count("KeyboardInterrupt") == 1  # the script's own
    for pid in pids:
        wait_until_gone(pid)


def test_no_rank_outlives_a_killed_parent(waiting_script):
    script, _, pids = waiting_script
    os.kill(script.pid, signal.SIGKILL)
    assert script.wait(LIMIT_S) == -signal.SIGKILL
    for pid in pids:
        wait_until_gone(pid)


def test_torchs_own_pattern_of_a_loop_around_join_works(run_script):
    done = run_script("""
        import phalanx
        def work(rank): return rank
        if __name__ == "__main__":
            context = phalanx.spawn(work, nprocs=2, join=False)
            while not context.join():
                pass
            print(context.results)
        """)
    assert done.stdout == "[0, 1]\n"


def settings(rank, *_):
    names = ("OMP_NUM_THREADS", "MPLBACKEND", "HF_HOME")
    return dist.get_debug_level().name, torch.get_num_threads(), [os.environ.get(name) for name in names]


def set_settings(monkeypatch, level, threads, word):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("MPLBACKEND", word)
    monkeypatch.setenv("HF_HOME", word)


def test_what_torch_reads_when_it_is_imported_counts_at_each_start(lean_servers, monkeypatch):
    set_settings(monkeypatch, "DETAIL", "3", "one")
    assert phalanx.spawn(settings) == [("DETAIL", 3, ["3", "one", "one"])]
    set_settings(monkeypatch, "INFO", "2", "two")
    assert phalanx.spawn(settings) == [("INFO", 2, ["2", "two", "two"])]
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "3"}
    ((level, _, values),) = run_ranks(settings, 1, init=False, env=env)
    assert (level, values) == ("DETAIL", ["3", "two", "two"])


def wait_for_release(rank, *_):
    reached("waits", os.getppid())
    return await_release("end", timeout_s=LIMIT_S * 10)


def ranks_of_others(used):
    others = {server for reaper in workers.servers.known[0] for server in children_of(reaper)} - {used}
    return [rank for server in others for rank in children_of(server)]


def test_of_many_servers_those_are_kept_that_ranks_are_of(lean_servers, monkeypatch):
    monkeypatch.setattr(workers, "_MAX_SERVERS", 2)
    with spawn_ranks(wait_for_release, 1, init=False) as ranks:  # of the server that all tests use, the oldest one
        (server,) = ranks.wait_until_reached("waits", timeout_s=LIMIT_S)
        before, _ = workers.servers.known
        for number in range(2):
            assert run_ranks(divmod, 1, init=False, env={"TORCH_OF_TEST": str(number)}) == [(0, 0)]
            # A server is in use until it has reaped its ranks.
            assert wait_until(lambda: not ranks_of_others(server) or None, time.monotonic() + LIMIT_S)
        ranks.release("end", "went on")
        assert [outcome.value for outcome in ranks.join()] == ["went on"]
    kept, _ = workers.servers.known
    assert len(kept) == 2
    assert Path(f"/proc/{server}").exists()
    for ended in before - kept:
        wait_until_gone(ended)


def test_ranks_start_though_the_streams_of_the_parent_were_closed(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, phalanx\n"
        "def write(rank, folder):\n"
        "    open(f'{folder}/{rank}', 'w').write(str(sys.stdout))\n"
        "if __name__ == '__main__':\n"
        f"    phalanx.spawn(write, args=({str(tmp_path)!r},), nprocs=2)\n"
    )
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} script.py >&- 2>&-"], cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 0
    assert (tmp_path / "1").exists()
