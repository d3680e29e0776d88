"""phalanx.breakpoint, typed at as a person would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from phalanx.debugging.prompt import Prompt
from phalanx.diagnose.top.watch import Watch
from tests.diagnose.puppets import until
from tests.forked import TORCHRUN as FORKS_RANKS
from tests.launch.jobs import PHALANX_RUN, Terminal, run_job, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")

TORCHRUN = [sys.executable, *FORKS_RANKS]
SCRIPT = """
    import datetime, torch, torch.distributed as dist, phalanx
    dist.init_process_group("{backend}", timeout=datetime.timedelta(seconds={timeout_s}))
    x = torch.full((3,), float(RANK))
    if RANK {where}: phalanx.breakpoint({rank})
    y = x + 1
    dist.all_reduce(x)
    print("end %d %.1f" % (RANK, x[0]), flush=True)
    dist.destroy_process_group()
"""
BOTH_END = {"end 0 1.0", "end 1 1.0"}


@pytest.fixture
def terminal(tmp_path):
    """``terminal(launcher, *flags, **parts)`` runs `SCRIPT` on a terminal, with two ranks."""
    opened = []

    def open_terminal(launcher, *flags, script=SCRIPT, **parts):
        parts = {"backend": "phalanx", "timeout_s": 60, "rank": "", "where": ">= 0", **parts}
        path = write_script(tmp_path, script.format(**parts))
        opened.append(Terminal([*launcher, "--nproc-per-node", "2", *flags, path], tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def ends(screen):
    return set(re.findall(r"end \d \d\.\d", screen.shown))


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_one_rank_has_the_prompt_and_then_all_go_on(terminal, backend):
    screen = terminal(PHALANX_RUN, backend=backend, rank=1)
    screen.read_until("(Pdb) ")
    screen.type("p RANK * 10 + 7\n")
    screen.read_until("17")
    screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END
    assert screen.shown.count("(Pdb) ") == 2


def test_top_tells_who_is_in_the_debugger_and_who_waits_for_it(terminal):
    screen = terminal(PHALANX_RUN, rank=1)
    screen.read_until("(Pdb) ")
    with contextlib.closing(Watch(str(screen.job.pid), 1.0)) as watch:
        waiting, held = until(
            lambda: watch.look()[0].ranks,
            lambda ranks: [rank.state for rank in ranks] == ["waiting", "in the debugger"],
        )
    line = held.site
    assert re.fullmatch(r"train\.py:\d+", line)
    assert (waiting.what, waiting.site) == ("phalanx.breakpoint", f"train.py:{int(line.rpartition(':')[2]) - 1}")
    screen.type("c\n")
    assert screen.finish() == 0


def test_a_collective_can_be_stepped_over(terminal):
    screen = terminal(PHALANX_RUN)
    for number, command in enumerate(["n\n", "n\n", "p x[0].item() + 40\n", "c\n"], 1):
        screen.read_until("(Pdb) ", count=number)
        screen.type(command)
    assert screen.finish() == 0
    assert "41.0" in screen.shown
    assert ends(screen) == BOTH_END


@pytest.mark.slow
@pytest.mark.parametrize("where", [">= 0", "== 0"], ids=["at the breakpoint", "in a collective"])
def test_whoever_waits_does_not_time_out(terminal, where, monkeypatch):
    monkeypatch.setenv("PHALANX_STALL_S", "1")
    screen = terminal(PHALANX_RUN, timeout_s=2, where=where)
    screen.read_until("(Pdb) ")
    try:
        screen.job.wait(5)
    except subprocess.TimeoutExpired:
        screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END
    said = len(re.findall(r"rank 0 \(pid \d+\) is held by a debugger at train.py:\d", screen.shown.replace("\r\n", "")))
    assert said == (1 if where == "== 0" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--local-ranks-filter", "0"), ("--redirects", "3"), ("--log-dir", "logs", "--redirects", "1:3")],
    ids=["filtered", "redirected", "in the logs"],
)
def test_a_prompt_is_never_hidden(terminal, flags):
    screen = terminal(PHALANX_RUN, *flags, rank=1)
    screen.read_until("(Pdb) ")
    screen.type("c\n")
    assert screen.finish() == 0


@pytest.mark.parametrize("typed", ["q\n", "\x04"], ids=["quit", "Ctrl-D"])
def test_quitting_ends_the_job(terminal, typed):
    screen = terminal(PHALANX_RUN, rank=1)
    screen.read_until("(Pdb) ")
    screen.type(typed)
    assert screen.finish() == 1
    assert not ends(screen)
    assert "phalanx.breakpoint: rank 1 has quit the debugger, so the job ends" in screen.shown.replace("\r\n", "")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        pytest.param("1 / 0", "*** ZeroDivisionError", id="a mistake"),
        pytest.param(
            "phalanx.breakpoint()",
            "rank 0 is at a debugger's prompt already, so it does not stop here",
            id="another breakpoint",
        ),
    ],
)
def test_what_can_not_be_done_at_the_prompt_is_told_and_the_prompt_stays(terminal, typed, told):
    screen = terminal(PHALANX_RUN)
    screen.read_until("(Pdb) ")
    screen.type(f"{typed}\n")
    screen.read_until(told)
    screen.read_until("(Pdb) ", count=2)
    screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END


def test_stepping_over_the_breakpoint_of_another_rank_gives_it_the_prompt(terminal):
    script = SCRIPT.replace("y = x + 1", "phalanx.breakpoint(1 - {rank})")
    screen = terminal(PHALANX_RUN, rank=0, script=script)
    for number, command in enumerate(["n\n", "p RANK + 70\n", "c\n"], 1):
        screen.read_until("(Pdb) ", count=number)
        screen.type(command)
    screen.read_until("(Pdb) ", count=4)
    assert "71" in screen.shown
    screen.type("p RANK + 80\n")
    screen.read_until("80\r\n")
    screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END


STAGES = """
    import datetime, torch, torch.distributed as dist, phalanx
    dist.init_process_group("{backend}", timeout=datetime.timedelta(seconds={timeout_s}))
    x = torch.full((3,), float(RANK))
    phalanx.breakpoint(1)
    dist.all_reduce(x)
    print("end %d %.1f" % (RANK, x[0]), flush=True)
    phalanx.breakpoint(0)
    phalanx.breakpoint(1)
    dist.all_reduce(x)
    print("end %d %.1f" % (RANK, x[0]), flush=True)
    phalanx.breakpoint(1)
    print("end %d 0.0" % RANK, flush=True)
"""


@pytest.mark.parametrize(
    ("backend", "last"),
    [
        # Ranks stop on either backend under phalanx run, and Ctrl-D quits there too: once is enough under torchrun.
        pytest.param("phalanx", "q\n", id="quit"),
        pytest.param("gloo", "\x04", id="Ctrl-D", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_ranks_have_the_prompt_in_turn_and_quitting_ends_the_job(terminal, backend, last):
    screen = terminal(TORCHRUN, backend=backend, script=STAGES)
    screen.read_until("(Pdb) ")
    screen.type("p RANK * 10 + 7\n")
    screen.read_until("17")
    screen.type("c\n")
    for number, command in enumerate(["n\n", "p RANK + 70\n", "c\n"], 3):  # steps over the other's breakpoint
        screen.read_until("(Pdb) ", count=number)
        screen.type(command)
    screen.read_until("(Pdb) ", count=6)
    assert "71" in screen.shown
    assert ends(screen) == BOTH_END
    screen.type("p RANK + 80\n")
    screen.read_until("80\r\n")
    screen.type("c\n")
    screen.read_until("(Pdb) ", count=8)
    screen.type(last)
    assert screen.finish() == 1
    assert ends(screen) == BOTH_END | {"end 0 2.0", "end 1 2.0"}
    assert "phalanx.breakpoint: rank 1 has quit the debugger, so the job ends" in screen.shown.replace("\r\n", "")


THREADS = """
    import threading
    threads = [threading.Thread(target=lambda: phalanx.breakpoint({rank})) for _ in range({count})]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
WORKER = """
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 2
        def __getitem__(self, i):
            if i == 1: phalanx.breakpoint({rank})
            return i
    list(torch.utils.data.DataLoader(Data(), num_workers=1))
"""


def stops_in(source, **parts):
    """Return `SCRIPT` with a stop in `source`."""
    source = source.format(**{"rank": "", "count": 1, **parts})
    stop = "if True:" + source.replace("\n    ", "\n        ").rstrip() + "\n"
    return SCRIPT.replace("if RANK {where}: phalanx.breakpoint({rank})\n", stop.replace("{", "{{").replace("}", "}}"))


@pytest.mark.parametrize("source", [THREADS, WORKER], ids=["thread", "worker"])
def test_quitting_in_a_thread_or_a_worker_ends_the_job(terminal, source):
    screen = terminal(PHALANX_RUN, script=stops_in(source, rank=1))
    screen.read_until("(Pdb) ")
    screen.type("q\n")
    assert screen.finish() == 1
    assert not ends(screen)
    assert "phalanx.breakpoint: rank 1 has quit the debugger, so the job ends" in screen.shown.replace("\r\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "count"), [(THREADS, 2), (WORKER, 1)], ids=["two threads", "worker"])
def test_whoever_waits_for_a_thread_or_a_worker_does_not_time_out(terminal, source, count):
    script = stops_in(source, count=count).replace("if True:", "if RANK == 0:")
    screen = terminal(PHALANX_RUN, timeout_s=1, script=script)
    for number in range(1, count + 1):
        screen.read_until("(Pdb) ", count=number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            screen.job.wait(2.5)
        screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END


def test_a_job_in_the_background_says_that_nobody_is_at_the_terminal(terminal):
    background = ["bash", "-c", 'set -m; "$@" & wait $!', "bash", *PHALANX_RUN]
    screen = terminal(background)
    assert screen.finish() == 0
    said = screen.shown.replace("\r\n", "")
    assert re.search(r"debugger at train\.py:\d: its terminal is gone, so this rank continues", said)
    assert ends(screen) == BOTH_END


def test_the_death_of_the_rank_with_the_terminal_ends_the_others_wait(terminal):
    screen = terminal(PHALANX_RUN, rank=1)
    screen.read_until("(Pdb) ")
    screen.type("import os; print('pid', os.getpid())\n")
    screen.read_until("(Pdb) ", count=2)
    os.kill(int(re.findall(r"pid (\d+)", screen.shown)[-1]), signal.SIGKILL)
    assert screen.finish() == 128 + signal.SIGKILL
    assert "rank 1" in screen.shown


def test_the_others_hear_of_a_death_without_a_launcher(forked, tmp_path, monkeypatch):
    meets = f'"gloo", init_method="file://{tmp_path}/meeting", rank=RANK, world_size=2,'
    source = SCRIPT.format(backend="gloo", timeout_s=60, rank=1, where=">= 0").replace('"gloo",', meets)
    path = write_script(tmp_path, source)
    with forked.start(path, env={**os.environ, "RANK": "0"}) as other:
        monkeypatch.setenv("RANK", "1")
        screen = Terminal([sys.executable, path], tmp_path)
        screen.read_until("(Pdb) ")
        screen.job.kill()
        _, said = other.communicate(timeout=30)
        screen.close()
    assert other.returncode == 1
    assert "RankFailed: rank 0: phalanx.breakpoint at train.py:7: rank 1, which had the debugger, has ended" in said


def test_without_a_terminal_one_line_says_so_and_all_go_on(tmp_path):
    job = run_job(tmp_path, SCRIPT.format(backend="phalanx", timeout_s=60, rank="", where=">= 0"))
    assert job.returncode == 0, job.stderr
    line = "phalanx.breakpoint at train.py:7: rank 0 has no terminal for a debugger, so no rank stops"
    assert job.stderr.count(line) == 1
    assert job.stdout.count("end") == 2


def test_python_s_own_breakpoint_can_be_ours(terminal, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "phalanx.breakpoint")
    screen = terminal(PHALANX_RUN, script=SCRIPT.replace("phalanx.breakpoint", "breakpoint"))
    screen.read_until("(Pdb) ")
    screen.type("c\n")
    assert screen.finish() == 0
    assert ends(screen) == BOTH_END


def test_a_rank_that_is_not_there_is_refused(tmp_path):
    job = run_job(tmp_path, SCRIPT.format(backend="phalanx", timeout_s=60, rank=2, where=">= 0"))
    assert job.returncode == 1
    assert "ValueError: rank must lie in [0, 2), got 2" in job.stderr


def test_names_that_would_control_the_terminal_are_escaped():
    def stands():
        return sys._getframe()

    stands.__code__ = stands.__code__.replace(co_name="\x1b[31mred\x07", co_filename="/tmp/\x1b[1m.py")
    lines = SimpleNamespace(
        stdin=io.StringIO("where\nquit\n"), stdout=io.StringIO(), close=lambda: None, take=lambda: None
    )
    prompt = Prompt(lines, lambda: None, lambda: None)
    prompt.reset()
    prompt.interaction(stands(), None)
    assert r"/tmp/\x1b[1m.py" in lines.stdout.getvalue()
    assert r"\x1b[31mred\x07()" in lines.stdout.getvalue()
    assert not {"\x1b", "\x07"} & {*lines.stdout.getvalue()}
