"""phalanx attach in running jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from phalanx.diagnose.jobs import find_job
from tests.diagnose.asked import asked
from tests.launch.jobs import PHALANX_RUN, Terminal, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")

ATTACH = [sys.executable, "-m", "phalanx", "attach"]
TRAINS = """
    import datetime, torch, torch.distributed as dist
    dist.init_process_group("phalanx", timeout=datetime.timedelta(seconds=2))
    step, stop = 0, False
    print("up", flush=True)
    while not stop:
        step += 1
        x = torch.tensor([float(step > 10**9 or os.path.exists("stop"))])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        stop = bool(x)
        time.sleep(0.01)
    print("end", RANK, flush=True)
"""


@pytest.fixture
def job(tmp_path):
    """``job(source, *flags)`` starts a job of two ranks and returns it once both have printed ``up``."""
    started = []

    def start(source=TRAINS, *flags):
        command = [*PHALANX_RUN, "--nproc-per-node", "2", *flags, write_script(tmp_path, source)]
        output = open(tmp_path / "output.txt", "w")  # noqa: SIM115 its descriptor is the job's
        one = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        output.close()
        started.append(one)
        one.output = tmp_path / "output.txt"
        deadline = time.monotonic() + 60
        while one.output.read_text().count("up") < 2:
            assert time.monotonic() < deadline, one.output.read_text()
            assert one.poll() is None, one.output.read_text()
            time.sleep(0.05)
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


def attach(job, typed, rank=1):
    began = time.monotonic()
    words = [*ATTACH, str(rank), "--job", str(job.pid)]
    done = subprocess.run(words, input=typed, capture_output=True, text=True, timeout=60, check=False)
    done.seconds = time.monotonic() - began
    return done


def finish(job, folder):
    (folder / "stop").touch()
    assert job.wait(30) == 0, job.output.read_text()
    assert job.output.read_text().count("end") == 2


@pytest.mark.parametrize("flags", [(), ("--no-preload",)], ids=["forked", "started anew"])
def test_a_debugger_looks_into_a_rank_and_lets_it_go(job, tmp_path, flags):
    running = job(TRAINS, *flags)
    done = attach(running, "import __main__\np 'rank', __main__.RANK\nq\n")
    assert done.returncode == 0, done.stderr
    assert "('rank', 1)" in done.stdout
    assert re.search(r"rank 1 \(pid \d+\) is in the debugger", done.stderr)
    assert "rank 1 continues" in done.stderr
    assert "rank 0 continues" in attach(running, "c\n", rank=0).stderr
    finish(running, tmp_path)


def test_the_others_wait_without_timing_out(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_STALL_S", "1")
    running = job()
    done = attach(running, "import time\ntime.sleep(5)\nc\n")
    assert done.returncode == 0, done.stderr
    finish(running, tmp_path)
    assert re.search(r"rank 1 \(pid \d+\) is held by a debugger at ", running.output.read_text())


def test_lines_can_be_stepped_and_the_job_goes_on(job, tmp_path):
    running = job()
    done = attach(running, "until 13\nn\nn\np 'at', step > 0\nc\n")
    assert done.returncode == 0, done.stderr
    assert "('at', True)" in done.stdout
    finish(running, tmp_path)


def test_a_terminal_that_hangs_up_lets_the_rank_go(job, tmp_path):
    running = job()
    screen = Terminal([*ATTACH, "0", "--job", str(running.pid)], tmp_path)
    screen.read_until("(Pdb) ")
    screen.type("\x03")
    assert screen.finish() == 0
    assert "rank 0 continues" in screen.shown
    screen.close()
    finish(running, tmp_path)


@pytest.mark.parametrize(("redirection", "typed"), [("<&-", ""), ("0>/dev/null", ""), (">&-", "q\n"), ("<&- >&-", "")])
def test_a_stream_that_is_closed_lets_the_rank_go(job, tmp_path, redirection, typed):
    running = job()
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *ATTACH, "1", "--job", str(running.pid)]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60, check=False)
    held, goes_on = done.stderr.splitlines()
    assert (done.returncode, " is in the debugger; " in held, goes_on) == (0, True, "phalanx attach: rank 1 continues")
    finish(running, tmp_path)


def test_a_rank_in_native_code_is_said_to_be_there_within_seconds(job):
    running = job(
        """
        print("up", flush=True)
        sum(iter(int, 1))  # for ever, and without a look at signals
        """
    )
    done = attach(running, "c\n")
    assert done.returncode == 1
    assert "has not answered within 2 s: its main thread is in native code" in done.stderr
    assert done.seconds < 6  # with the start of the interpreter


def test_a_stopped_rank_is_said_to_be_stopped(job):
    running = job()
    found = find_job(str(running.pid))
    pid = found.ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    done = attach(running, "c\n")
    os.kill(pid, signal.SIGCONT)
    assert done.returncode == 1
    assert f"rank 1 (pid {pid}) is stopped; kill -CONT {pid} resumes it" in done.stderr


def test_the_signal_of_a_script_stays_its_own(job):
    running = job(
        """
        from phalanx.debugging.attached import SIGNAL
        signal.signal(SIGNAL, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(3600)
        """
    )
    done = attach(running, "c\n")
    assert done.returncode == 1
    assert "does not take SIGRTMIN+9" in done.stderr
    assert running.poll() is None


def test_a_rank_that_blocks_the_signal_is_said_to(job):
    running = job(
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        print("up", flush=True)
        time.sleep(3600)
        """
    )
    done = attach(running, "c\n")
    assert done.returncode == 1
    assert "blocks SIGRTMIN+9, which opens a debugger: its script has called pthread_sigmask" in done.stderr


def test_a_rank_that_is_killed_while_it_is_held_is_said_to_have_ended(job):
    done = attach(job(), "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert "rank 1 has ended" in done.stderr


@pytest.mark.parametrize("next_it", ["os._exit(9)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_begins_to_answer_and_ends_or_stops_is_not_waited_for(job, next_it):
    running = job(
        f"""
        import socket
        from phalanx.debugging import attached
        def answer(*_):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(attached._launch().lender_for(os.getpid()))
            {next_it}
        signal.signal(attached.SIGNAL, answer)
        print("up", flush=True)
        while True:
            time.sleep(1)
        """
    )
    done = attach(running, "c\n")
    assert done.returncode == 1
    assert "began to answer, and has ended or stopped" in done.stderr
    assert done.seconds < 6


def test_a_rank_that_is_not_there(job):
    done = attach(job(), "", rank=7)
    assert done.returncode == 1
    assert "has no rank 7; ranks 0 and 1 run here" in done.stderr


def test_a_job_that_is_not_there():
    with subprocess.Popen(["sleep", "60"]) as process:
        done = asked(".", "attach", "0", "--job", process.pid)
        process.kill()
    assert done.returncode == 1
    assert re.fullmatch(
        r"phalanx attach: process \d+ \(sleep\) is no rank of a job that phalanx run has started, and a debugger .*\n",
        done.stderr,
    )


def test_a_mistake_is_refused():
    done = asked(".", "attach", "one")
    assert done.returncode == 2
    assert "RANK must be a whole number" in done.stderr
