"""Stacks of any process, and the reason where there are none."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx._text import broken
from phalanx.diagnose import stacks
from phalanx.diagnose.jobs import Job, Rank
from phalanx.diagnose.stacks import Frame, Thread, find_py_spy, read_stacks
from phalanx.diagnose.why import why
from phalanx.diagnose.why.evidence import gather
from phalanx.diagnose.why.findings import conclude
from phalanx.diagnose.why.wording import answer, thread_lines
from phalanx.host.processes import off_limits, process_of
from phalanx.record.box import MEMORY_NAME
from tests.diagnose.asked import asked

PHALANX = [sys.executable, "-m", "phalanx"]
SCRIPT = """
import os, signal, sys
def sleep_there():
    print("there", flush=True)
    signal.pause()
MORE
sleep_there()
"""
needs_py_spy = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")


@contextlib.contextmanager
def sleeping(more: str = "", within: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that sleeps in ``sleep_there``."""
    command = [*within, sys.executable, "-c", SCRIPT.replace("MORE", more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        yield process
        process.kill()


ask = functools.partial(asked, ".")


@needs_py_spy
def test_the_stacks_of_any_process_of_python_are_printed():
    with sleeping() as process:
        printed = ask("stacks", process.pid)
        document = ask("stacks", process.pid, "--json")
        native = ask("stacks", process.pid, "--native", "--json")
    assert printed.returncode == 0
    assert printed.stdout.splitlines()[1].split() == ["sleep_there", "<string>:5"]
    (one,) = json.loads(document.stdout)
    assert [frame["function"] for frame in one["threads"][0]["frames"]] == ["sleep_there", "<module>"]
    owners = [frame["owner"] for frame in json.loads(native.stdout)[0]["threads"][0]["frames"]]
    assert owners[0] == "native"
    assert owners.count("") == 2


@needs_py_spy
def test_a_stopped_process_stays_stopped_and_is_read():
    with sleeping() as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert "has been stopped (SIGSTOP or Ctrl-Z) in sleep_there" in ask("why", process.pid).stdout
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None


def test_a_process_of_this_user_that_a_container_may_not_look_into_is_told_so():
    within = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of users can be made here")
    with sleeping() as process:
        asked = [*within, *PHALANX, "why", str(process.pid)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert f"process {process.pid} (python" in done.stdout
        assert ") may not be looked into: this container lacks permission; it " in done.stdout


@needs_py_spy
def test_a_process_in_a_container_is_read_from_outside():
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of pids can be made here")
    with sleeping(within=("unshare", "--pid", "--fork", "--kill-child")) as parent:
        (pid,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert f"process {pid} (python) is no rank of a job; it has been in sleep_there at <string>:5" in ask(
            "why", pid
        ).stdout.replace("asleep ", "")


HOLDS = "import os, pdb, sys; os.dup2(os.pipe()[0], 0); sys.stdin = os.fdopen(0); pdb.set_trace()\nprint()"


@needs_py_spy
def test_the_frames_of_a_debugger_are_counted_and_not_shown(tmp_path):
    (tmp_path / "held.py").write_text(HOLDS)
    with subprocess.Popen([sys.executable, "held.py"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b">", "its prompt"
        said = ""
        until_s = time.monotonic() + 60
        while "has been at a breakpoint" not in said and time.monotonic() < until_s:
            said = ask("why", process.pid).stdout
        process.kill()
    *_, more, own = said.splitlines()
    assert re.fullmatch(r"    \.\.\. \d+ more frames", more), said
    assert own.split() == ["<module>", "held.py:2"]


def test_what_runs_no_python_says_so():
    with subprocess.Popen(["sleep", "60"]) as process:
        done, why = ask("stacks", process.pid), ask("why", process.pid)
        process.kill()
    assert done.returncode == 1
    for said in (done.stdout, why.stdout):
        assert said.endswith("\n  it is no Python process of this user\n")


def test_of_a_process_that_may_not_be_looked_into_no_black_box_is_missed():
    assert "box" not in ask("why", 1).stdout
    traced = ask("trace", 1)
    assert traced.returncode == 1
    is_none = "is no rank of a job, and records nothing"
    if off_limits(1):
        is_none = "may not be looked into: this container lacks permission"
    assert re.fullmatch(rf"phalanx trace: process 1 \(.+\) {is_none}\n", traced.stderr)


def test_what_has_ended_and_what_never_was_are_named():
    with sleeping() as process:
        process.kill()
        process.wait()
        assert read_stacks([process.pid])[process.pid].problem == "it has ended"
    for command in ("why", "stacks"):
        done = ask(command, process.pid)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"phalanx {command}: there is no process {process.pid}\n"


@needs_py_spy
@pytest.mark.parametrize("num_failures", [3, 99])
def test_a_py_spy_that_fails_is_asked_again_and_what_it_says_is_told(tmp_path, monkeypatch, num_failures):
    fails = "echo 'Error: out of something' >&2; exit 1"
    program = tmp_path / "py-spy"
    tried = f"echo >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -le {num_failures} ]"
    program.write_text(f'#!/bin/sh\nif {tried}; then {fails}; fi\nexec {find_py_spy()} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(program))
    with sleeping() as first, sleeping() as second:
        seen = read_stacks([first.pid, second.pid], 60)
        if num_failures == 3:
            assert [one.threads[0].own_frames[0].function for one in seen.values()] == ["sleep_there"] * 2
            return
        ranks = tuple(Rank(number, one.pid, process_of(one.pid)) for number, one in enumerate((first, second)))
        evidence = gather(Job("train.py", "torchrun", os.getpid(), 2, ranks))
    said = answer(evidence, conclude(evidence))
    assert "as far as is known, no rank waits for another; " in said
    assert "the stacks of ranks 0 and 1 can't be read: py-spy could not read it: out of something" in said


def test_without_py_spy_the_answer_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: "")
    found = read_stacks([os.getppid()])[os.getppid()]
    assert found.threads == ()
    assert found.problem.startswith("py-spy is not installed: pip install py-spy")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_looked_into():
    reading, writing = os.pipe()
    with sleeping() as process:
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            os.write(writing, read_stacks([process.pid])[process.pid].problem.encode())
            os._exit(0)
        assert select.select([reading], [], [], 30)[0]
        assert os.read(reading, 1000) == b"it belongs to user 0: look as that user, or as root"
        os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("scope", "user", "words"),
    [
        (1, 1000, "kernel.yama.ptrace_scope is 1: sudo sysctl kernel.yama.ptrace_scope=0, or look as root"),
        (3, 0, "kernel.yama.ptrace_scope is 3, which forbids it to everybody until the host reboots"),
        (0, 1000, "this container lacks permission: start it with --cap-add SYS_PTRACE"),
    ],
)
def test_the_setting_that_forbids_it_is_named(monkeypatch, scope, user, words):
    monkeypatch.setattr(stacks, "ptrace_scope", lambda: scope)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(stacks, "_users_of", lambda pid: [user] * 3)
    assert stacks._denied(os.getpid()).startswith(words)


@needs_py_spy
def test_a_torn_black_box_is_named_and_the_stacks_are_there_anyway():
    torn = f"fd = os.memfd_create({MEMORY_NAME!r}); os.write(fd, b'PHAXBOX1' + b'x' * 9000)"
    with sleeping(torn) as process:
        done = ask("why", process.pid)
    assert "in sleep_there at <string>:5" in done.stdout.splitlines()[0]
    assert "its black box can't be read: it is of version" in done.stdout


def test_below_many_frames_of_a_library_the_line_of_the_script_is_shown():
    library = [Frame(f"step_{number}", "library.py", number, "library") for number in range(1, 31)]
    thread = Thread(7, "MainThread", False, False, (*library, Frame("main", "job.py", 3, ""), library[0]))
    assert list(thread_lines([thread], 7, 4)) == [
        "    step_1  library.py:1",
        "    step_2  library.py:2",
        "    step_3  library.py:3",
        "    ... 27 more frames",
        "    main    job.py:3",
        "    ... 1 more frame",
    ]
    assert len(list(thread_lines([thread], 7, 100))) == 32


def test_frames_of_the_operation_that_is_named_above_are_counted_alone():
    ours = [Frame(f"wait_{number}", "backend.py", number, "phalanx") for number in range(5)]
    thread = Thread(7, "MainThread", False, False, (*ours, Frame("main", "job.py", 3, "")))
    assert list(thread_lines([thread], 7, 4, without=("phalanx",))) == ["    ... 5 more frames", "    main  job.py:3"]
    nothing_else = Thread(7, "MainThread", False, False, tuple(ours))
    assert len(list(thread_lines([nothing_else], 7, 8, without=("phalanx",)))) == 5


def test_on_a_terminal_long_lines_break_between_words(monkeypatch):
    long = "  rank 1: has been in " + "load_image at a/folder/with-hyphens/data.py:88 " * 3 + "x" * 90
    assert broken([long]) == [long]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    shown = broken([long, "    main  job.py:3"])
    assert shown[-1] == "    main  job.py:3"
    assert " ".join(line.strip() for line in shown[:-1]) == long.strip()
    assert [len(line) > 80 for line in shown] == [False, False, False, True, False]
    assert all(line.startswith("    ") for line in shown[1:])


def test_a_thread_that_ends_and_has_no_frames_any_more_has_no_lines():
    assert list(thread_lines([Thread(7, "", False, False, ())], 7, 4)) == []


def test_on_a_terminal_the_answer_stays_on_the_screen(monkeypatch):
    lines = [f"line {number}" for number in range(100)]
    assert why.cropped(lines) == lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("LINES", "24")
    shown = why.cropped(lines)
    assert len(shown) == 22
    assert shown[-1] == "... 79 more lines: phalanx stacks shows all"
    monkeypatch.setenv("LINES", "1")
    assert why.cropped(lines) == ["line 0", "... 99 more lines: phalanx stacks shows all"]
