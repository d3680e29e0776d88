"""phalanx check on real scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import pytest

from phalanx.diagnose.check import check as command
from phalanx.diagnose.stacks import find_py_spy
from tests.diagnose.asked import asked

pytestmark = pytest.mark.usefixtures("warm_jobs")

CHECK = [sys.executable, "-m", "phalanx", "check"]
SCRIPT = """
    import sys, time, torch, torch.distributed as dist
    dist.init_process_group("{backend}")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10**6):
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        {body}
        optimizer.step()
        optimizer.zero_grad()
"""
AVERAGE = "for p in model.parameters(): dist.all_reduce(p.grad)"


@pytest.fixture
def check(tmp_path):
    """``check(body, *flags)`` checks `SCRIPT` and returns what was printed, as JSON if that is asked for."""

    def run(body=AVERAGE, *flags, nproc=2, script=SCRIPT, backend="phalanx"):
        source = textwrap.dedent(script)
        indented = textwrap.indent(textwrap.dedent(body).strip(), " " * 4).lstrip()
        (tmp_path / "train.py").write_text(source.replace("{body}", indented).replace("{backend}", backend))
        words = [*CHECK, "--nproc", str(nproc), *flags, "train.py"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)

    return run


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_ranks_that_agree(check, backend):
    done = check(backend=backend)
    assert done.returncode == 0, done.stderr
    assert "phalanx check: 2 ranks made the same 4 calls in 2 optimizer steps (train.py" in done.stdout
    assert "ranks 0 and 1: 4 calls\n" in done.stdout
    assert "1  all_reduce of 8 elements at train.py:10\n" in done.stdout


@pytest.mark.slow
def test_more_ranks_than_cores(check):
    done = check(nproc=6)
    assert done.returncode == 0, done.stderr
    assert "6 ranks made the same 4 calls" in done.stdout


def test_the_first_difference_is_named_with_both_lines(check):
    done = check(
        """
        if rank == 1 and step == 1: dist.broadcast(model.weight.data, 0)
        else: dist.all_reduce(model.weight.grad)
        """
    )
    assert done.returncode == 1
    assert "phalanx check: the ranks differ in collective #2" in done.stdout
    assert "  rank 0 called all_reduce of 8 elements at train.py:11\n" in done.stdout
    assert "  rank 1 called broadcast of 8 elements at train.py:10\n" in done.stdout


def test_different_sizes_are_a_difference(check):
    done = check("dist.all_reduce(torch.ones(3 + rank))")
    assert done.returncode == 1
    assert "rank 0 called all_reduce of 3 elements at train.py:10\n" in done.stdout
    assert "rank 1 called all_reduce of 4 elements at train.py:10\n" in done.stdout


def test_a_rank_that_makes_a_call_less(check):
    began = time.monotonic()
    done = check("if rank == 0 or step == 0: dist.all_reduce(model.weight.grad)")
    assert done.returncode == 1
    assert "  rank 0 called all_reduce of 8 elements at train.py:10\n" in done.stdout
    assert "  rank 1 called nothing after all_reduce of 8 elements at train.py:10\n" in done.stdout
    assert time.monotonic() - began < 60


def test_a_deadlock_is_named_with_its_circle(check):
    done = check(
        """
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.all_reduce(model.weight.grad, group=groups[rank])
        """
    )
    assert done.returncode == 1
    assert "phalanx check: deadlock: each of these ranks waits for the next" in done.stdout
    assert "rank 0 waits for rank 1 in all_reduce of 8 elements in group" in done.stdout
    assert "rank 1 waits for rank 0 in all_reduce of 8 elements in group" in done.stdout


def test_a_circle_of_messages_is_named(check):
    done = check("dist.recv(torch.ones(2), (rank + 1) % size)", nproc=3)
    assert done.returncode == 1
    assert "deadlock" in done.stdout
    assert "rank 1 waits for rank 2 in recv of 2 elements at train.py:10" in done.stdout


def test_a_rank_that_sleeps_is_stalled(check):
    done = check("if rank == 1: time.sleep(3600)\n" + AVERAGE, "--stall-after", "2")
    assert done.returncode == 1
    assert "phalanx check: stalled: rank 1 has not called all_reduce #1 of group 'default'; it " in done.stdout
    assert "in <module> at train.py:10" in done.stdout or not find_py_spy()
    assert "rank 0 waits in all_reduce" in done.stdout
    assert "rank 1 has not arrived" in done.stdout


@pytest.mark.slow
def test_whom_a_rank_that_loops_keeps_waiting_is_told_when_the_time_is_up(check):
    done = check("while rank == 1: pass\n" + AVERAGE, "--seconds", "20")
    assert done.returncode == 3
    assert "phalanx check: the time was up before every rank had taken its steps" in done.stdout
    assert "\n  when it was up: rank 1 has not called all_reduce #1 of group 'default'; it is running" in done.stdout


def test_a_script_that_fails_shows_its_error(check):
    done = check("raise RuntimeError('no such data')")
    assert done.returncode == 1
    assert "the script failed with exit code 1" in done.stdout
    assert "no such data" in done.stderr


def test_of_a_script_that_prints_much_only_the_end_is_read(check):
    done = check("print('x' * 10**6, flush=True)\nif step == 5: raise RuntimeError('the cause')", "--steps", "9")
    assert done.returncode == 1
    assert "RuntimeError: the cause" in done.stderr
    assert len(done.stderr) < 80_000


def test_without_a_collective_there_is_no_result(check):
    done = check("pass")
    assert done.returncode == 3
    assert "no rank made a collective on the CPU" in done.stdout


def test_json_has_all_calls(check):
    done = check(AVERAGE, "--json", "--steps", "1")
    facts = json.loads(done.stdout)
    assert facts["result"] == "same"
    assert [call["op"] for call in facts["calls"]["1"]] == ["all_reduce"] * 2


def test_calls_are_enough_where_nothing_steps(check):
    script = SCRIPT.replace("optimizer.step()", "pass")
    done = check(AVERAGE, "--calls", "6", script=script)
    assert done.returncode == 0
    assert "before it was stopped" in done.stdout
    assert "2 ranks made the same" in done.stdout


def test_nproc_may_stand_behind_the_script(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    words = [*CHECK, "train.py", "--nproc", "2", "--epochs", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "['--epochs', '3']" in done.stderr
    assert "failed with exit code 7" in done.stdout


@pytest.mark.parametrize("words", [["--steps", "0", "train.py"], ["--nnodes", "2", "train.py"], []])
def test_mistakes_are_refused(tmp_path, words):
    (tmp_path / "train.py").write_text("")
    done = asked(tmp_path, "check", *words)
    assert done.returncode == 2
    assert "phalanx check" in done.stderr


def test_a_terminal_keeps_the_head_of_the_calls_and_the_result_on_one_screen(monkeypatch):
    calls = ["ranks 0 and 1: 42 calls", *(f"  {number:>7}  all_reduce" for number in range(1, 43))]
    monkeypatch.setenv("LINES", "24")
    assert command._cropped(calls, 2) == calls
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = command._cropped(calls, 2)
    assert len(shown) + 2 < 24
    assert (shown[0], shown[-1]) == (calls[0], calls[-1])
    assert "  ... 26 more lines: add | less to see all" in shown
    assert command._cropped(calls[:10], 2) == calls[:10]
