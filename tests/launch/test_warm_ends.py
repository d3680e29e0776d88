"""How warm jobs end, and what they leave: nothing of theirs, and the warm process."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.launch.jobs import LIMIT_S, Terminal
from tests.launch.test_orphans import WITH_CHILDREN, ends, parent_of
from tests.launch.test_terminal import await_states
from tests.launch.warm_jobs import HELLO, servers, sockets

FOREVER = "import os, signal; print('up', flush=True)\nwhile True: signal.pause()"


def test_a_job_outlives_the_warm_process(warm):
    warm(HELLO)
    for end in (lambda pid: warm.phalanx("warm", "--stop"), lambda pid: os.kill(pid, signal.SIGKILL)):
        with warm.start("import sys; print('up', flush=True); print(sys.stdin.read())", stdin=subprocess.PIPE) as job:
            assert job.first_line == "[rank 0] up\n"
            (pid,) = servers()
            end(pid)
            assert ends(pid)
            assert job.communicate("typed", timeout=LIMIT_S)[0] == "[rank 0] typed\n"
            assert job.returncode == 0


def test_it_ends_when_nobody_has_needed_it_for_a_while(warm):
    warm(HELLO, "--warm-for", "1")
    pids = servers()
    assert [pid for pid in pids if not ends(pid)] == []
    assert sockets() == []


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_ranks(kept_warm, sig):
    kept_warm(HELLO)
    with kept_warm.start(FOREVER) as job:
        job.send_signal(sig)
        _, stderr = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + sig
    assert f"phalanx run: {sig.name}: ending 1 rank" in stderr
    assert len(servers()) == 1


@pytest.mark.parametrize("victim", ["client", "guard", "supervisor"])
def test_nothing_of_a_job_outlives_those_who_stand_for_it(kept_warm, victim):
    kept_warm(HELLO)
    with kept_warm.start("import os, signal\n" + WITH_CHILDREN) as job:
        words = [int(word) for word in job.first_line.split()[3:]]
        forker, pids = words[0], words[1:]
        reaper = parent_of(forker)
        supervisor = parent_of(reaper)
        guard = parent_of(supervisor)
        os.kill({"client": job.pid, "guard": guard, "supervisor": supervisor}[victim], signal.SIGKILL)
        assert job.wait(LIMIT_S) == -signal.SIGKILL
        assert [pid for pid in (guard, supervisor, reaper, forker, *pids) if not ends(pid)] == []
    assert len(servers()) == 1


@pytest.fixture
def terminal(kept_warm):
    opened = []

    def open_terminal(command):
        opened.append(Terminal(command, kept_warm.folder))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_ctrl_c_at_a_terminal_ends_the_job_and_not_the_warm_process(kept_warm, terminal):
    kept_warm(HELLO)
    screen = terminal(kept_warm.command(FOREVER))
    screen.read_until("up")
    screen.type("\x03")
    assert screen.finish() == 130
    assert "phalanx run: SIGINT: ending 1 rank; Ctrl-C again kills it\r\n" in screen.shown
    assert "Traceback" not in screen.shown
    assert len(servers()) == 1


def test_rank_0_reads_what_is_typed_and_follows_the_size(kept_warm, terminal):
    kept_warm(HELLO)
    screen = terminal(kept_warm.command("""
        import os, signal
        signal.signal(signal.SIGWINCH, lambda *_: print("columns", os.get_terminal_size().columns, flush=True))
        print("hello", input("name? "))
        signal.pause()
    """))  # fmt: skip
    screen.read_until("name? ")
    screen.type("Ada\n")
    screen.read_until("hello Ada\r\n")
    screen.resize(50, 120)
    screen.read_until(f"columns {120 - len('[rank 0] ')}")
    screen.type("\x03")
    assert screen.finish() in (0, 130)


def test_ctrl_z_stops_the_ranks_too_and_fg_lets_them_go_on(kept_warm):
    kept_warm(HELLO)
    source = "import os, signal\nprint('at', os.getpid(), flush=True)\nwhile True: signal.pause()"
    # In a process group of its own, as a shell starts it: a group without a parent outside is not stopped by SIGTSTP.
    with kept_warm.start(source, preexec_fn=os.setpgrp) as job:
        rank = int(job.first_line.split()[3])
        for sig, state in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
            job.send_signal(sig)
            assert await_states([job.pid, rank], state)
        job.terminate()
        assert job.wait(LIMIT_S) == 128 + signal.SIGTERM
