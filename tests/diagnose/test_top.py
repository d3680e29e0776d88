"""``phalanx top`` as its user and a script meet it: on terminals, in pipes, and with mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.watch import JobView
from phalanx.record.box import open_box
from tests.diagnose.puppets import Puppets
from tests.launch.jobs import Terminal

pytestmark = pytest.mark.usefixtures("warm_jobs")

TOP = [sys.executable, "-m", "phalanx", "top"]
ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
COLORS = re.compile(r"\x1b\[[\d;]*3\dm")
LEAVES_THE_SCREEN = "\x1b[?1049l"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Puppets]:
    with Puppets(tmp_path_factory.mktemp("job")) as puppets:
        puppets.wait_for_ranks()
        yield puppets


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """``terminal(*arguments, NAME=value)`` runs ``phalanx top`` on a terminal of 80 x 24."""
    opened = []

    def open_terminal(*arguments, size=(24, 80), **environ):
        for name, value in {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environ}.items():
            monkeypatch.setenv(name, value)
        opened.append(Terminal([*TOP, *map(str, arguments)], tmp_path, *size))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def run_top(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *map(str, arguments)], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )


def pictures(screen: Terminal) -> list[list[str]]:
    """Return the lines of each picture that has been shown on the other screen."""
    shown = screen.shown.partition("\x1b[?1049h")[2].partition(LEAVES_THE_SCREEN)[0]
    return [ESCAPES.sub("", picture).split("\r\n") for picture in re.split(r"\x1b\[H", shown) if "q quits" in picture]


def test_a_script_gets_a_document_with_all_fields(job):
    done = run_top(job.pid, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told.keys() == {"format_version", "phalanx", "time", "host", "jobs"}
    (seen,) = told["jobs"]
    assert list(seen) == list(JobView.__dataclass_fields__)
    assert (seen["name"], seen["launcher"], seen["launcher_pid"], seen["world_size"]) == (
        "puppet.py",
        "phalanx run",
        job.pid,
        2,
    )
    assert [list(rank) for rank in seen["ranks"]] == [list(RankView.__dataclass_fields__)] * 2
    assert all(rank["state"] == "asleep" and rank["pss_bytes"] > 1 << 20 for rank in seen["ranks"])


def test_without_a_terminal_there_is_one_picture_of_80_columns(job):
    done = run_top(job.pid)
    assert (done.returncode, done.stderr) == (0, "")
    head, titles, *rows = done.stdout.splitlines()
    assert head.startswith(f"puppet.py  phalanx run, pid {job.pid}  2 ranks  since ")
    assert titles.split()[:2] == ["rank", "state"]
    assert [row.split()[:2] for row in rows] == [["0", "asleep"], ["1", "asleep"]]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_a_terminal_that_tells_no_size_shows_the_picture_too(job, terminal):
    screen = terminal(job.pid, size=(0, 0))  # as serial lines do
    screen.read_until("q quits")
    screen.type("q")
    assert screen.finish() == 0
    assert pictures(screen)[0][0].startswith("puppet.py  phalanx run")


def test_a_picture_changes_until_q_is_pressed(job, terminal):
    screen = terminal(job.pid, "--interval", "0.2")
    screen.read_until("q quits", count=3)
    screen.type("q")
    assert screen.finish() == 0
    seen = pictures(screen)
    assert len(seen) >= 3
    for lines in seen:
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("puppet.py  phalanx run")
    assert screen.shown.rstrip().endswith(LEAVES_THE_SCREEN)
    assert COLORS.search(screen.shown)


def test_ctrl_c_ends_it_and_gives_the_terminal_back(job, terminal):
    screen = terminal(job.pid)
    screen.read_until("q quits")
    screen.type("\x03")
    assert screen.finish() == 130
    assert screen.shown.rstrip().endswith(LEAVES_THE_SCREEN)
    assert "Traceback" not in screen.shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_to_be_ended_gives_the_terminal_back_too(job, terminal, number):
    screen = terminal(job.pid)
    screen.read_until("q quits")
    screen.job.send_signal(signal.SIGTSTP)  # by which it would stand on the shell's screen
    screen.job.send_signal(number)
    assert screen.finish() == 128 + number
    assert screen.shown.rstrip().endswith(LEAVES_THE_SCREEN)


def test_stopped_and_let_go_on_it_takes_keys_again(job, terminal):
    screen = terminal(job.pid, "--interval", "60")
    screen.read_until("q quits", count=2)
    screen.job.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, screen.job.pid, os.WSTOPPED | os.WNOWAIT)
    with open(f"/proc/{screen.job.pid}/fd/0", "rb", buffering=0) as keys:  # as the shell would do it
        modes = termios.tcgetattr(keys)
        modes[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(keys, termios.TCSANOW, modes)
    screen.job.send_signal(signal.SIGCONT)
    screen.read_until("q quits", count=3)
    screen.type("q")
    assert screen.finish() == 0


def test_a_terminal_that_changes_its_size_gets_another_picture_at_once(job, terminal):
    screen = terminal(job.pid, "--interval", "60")
    screen.read_until("q quits", count=2)  # the second comes soon, whatever the interval: rates are differences
    screen.resize(12, 50)
    os.kill(screen.job.pid, signal.SIGWINCH)
    screen.read_until("q quits", count=3)
    screen.type("q")
    assert screen.finish() == 0
    assert len(pictures(screen)[-1]) <= 12
    assert max(map(len, pictures(screen)[-1])) <= 50


def test_lines_for_which_there_is_no_room_can_be_scrolled_to(job, terminal):
    screen = terminal(job.pid, "--interval", "60")
    screen.read_until("q quits", count=2)
    screen.resize(3, 80)
    os.kill(screen.job.pid, signal.SIGWINCH)
    screen.read_until("2 more below: j, k")
    screen.type("j")
    screen.read_until("1 more below: j, k")
    screen.type("\x1b[Bq")
    assert screen.finish() == 0
    assert pictures(screen)[-1][1].split()[:2] == ["1", "asleep"]


def test_without_colors_there_are_none(job, terminal):
    screen = terminal(job.pid, NO_COLOR="1")
    screen.read_until("q quits")
    screen.type("q")
    assert screen.finish() == 0
    assert not COLORS.search(screen.shown)


def test_a_terminal_that_can_not_move_its_cursor_gets_one_picture(job, terminal):
    screen = terminal(job.pid, TERM="dumb")
    assert screen.finish() == 0
    assert screen.shown.startswith("puppet.py  phalanx run")
    assert "\x1b" not in screen.shown


def test_once_prints_one_picture_on_a_terminal_too(job, terminal):
    screen = terminal(job.pid, "--once")
    assert screen.finish() == 0
    assert "\x1b[?1049h" not in screen.shown
    assert len(screen.shown.splitlines()) == 4


def test_where_only_ascii_can_be_printed_only_that_is(job):
    done = run_top(job.pid, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()


def test_when_its_job_ends_the_last_picture_stays(tmp_path, terminal):
    with Puppets(tmp_path) as job:
        job.wait_for_ranks()
        screen = terminal(job.pid, "--interval", "0.2")
        screen.read_until("q quits", count=2)
        job.end()
        assert screen.finish() == 0
    last = ESCAPES.sub("", screen.shown.rpartition(LEAVES_THE_SCREEN)[2])
    assert [line.split()[:2] for line in last.strip().splitlines()[-2:]] == [["0", "gone"], ["1", "gone"]]


@pytest.mark.parametrize("damage", [b"x" * 8, b"PHAXBOX1" + struct.pack("<I", 99)])
def test_a_box_that_can_not_be_read_is_named_and_the_rest_is_shown(tmp_path, damage):
    with Puppets(tmp_path) as job:
        (rank, _) = job.wait_for_ranks()
        fd, at = open_box(rank.pid)
        with open(f"/proc/self/fd/{fd}", "r+b") as file:
            file.seek(at)
            file.write(damage)
        os.close(fd)
        done = run_top(job.pid)
    assert done.returncode == 0
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["1", "asleep" if b"x" in damage else "waiting"] in rows  # another version: no box of the job is read
    if b"x" not in damage:
        assert f"the black box of pid {rank.pid} can't be read: it is of version 99" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interval", "0"], "--interval must be seconds from 0.1 to 3600, got '0'"),
        (["--interval", "soon"], "--interval must be seconds from 0.1 to 3600, got 'soon'"),
        (["--interval", "nan"], "--interval must be seconds from 0.1 to 3600, got 'nan'"),
        (["--inteval", "1"], "unknown flag --inteval, did you mean --interval? Right: phalanx top --interval 1"),
        (["one", "two"], "unexpected argument 'two'"),
    ],
)
def test_a_mistake_in_the_command_line_is_refused(arguments, said):
    done = run_top(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"phalanx top: {said}" in done.stderr


def test_a_job_that_is_not_there_is_named():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    done = run_top(process.pid, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"phalanx top: there is no process {process.pid}\n"
    done = run_top("nothing.py", "--once")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phalanx top: no job 'nothing.py' of this user is running on this host")
