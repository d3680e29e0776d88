"""What the commands that look at jobs say of one whose launcher runs, and none of its ranks."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.host.ports import ReservedPort
from tests.diagnose.asked import asked

PHALANX = [sys.executable, "-m", "phalanx"]


@contextlib.contextmanager
def launcher_that_waits(folder: Path) -> Iterator[int]:
    """The pid of a launcher that waits for a second node."""
    (folder / "early.py").write_text("raise AssertionError('it never runs')")
    with contextlib.closing(ReservedPort()) as port:
        flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port.port}"]
    command = [*PHALANX, "run", *flags, "--nproc-per-node", "1", "--no-preload", "early.py"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        said = ""
        while "waiting for nodes: 1 of at least 2" not in said:
            said = process.stderr.readline()
            assert said, "it has ended"
        yield process.pid
        process.terminate()
        assert "phalanx run: SIGTERM: stopping; no rank had started\n" in process.stderr.read()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Iterator[tuple[Path, int]]:
    """The folder and the pid of a launcher that waits for a second node."""
    folder = tmp_path_factory.mktemp("alone")
    with launcher_that_waits(folder) as pid:
        yield folder, pid


@pytest.mark.parametrize("named", ["early.py", "./early.py", "logs/early", "runs/early", "the run", "the launcher"])
def test_why_says_what_the_launcher_waits_for(launcher, named):
    folder, pid = launcher
    job = {"the run": next(folder.glob("logs/early/*")), "the launcher": pid}.get(named, named)
    for flags in [], ["--brief"]:
        done = asked(folder, "why", job, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(
            f"no rank of early.py runs here yet (phalanx run, pid {pid}): waiting for nodes: 1 of at least 2 are here"
        )


def test_why_of_a_trainers_folder_tells_of_the_job_that_starts_and_not_of_the_last_one(launcher):
    folder, pid = launcher
    (folder / "earlier/logs").mkdir(parents=True)
    record = folder / "runs/early/metrics.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text('{"kind": "start", "origin": {"logs": "../../earlier/logs", "hosts": "here"}}\n')
    try:
        done = asked(folder, "why", "runs/early")
    finally:
        record.unlink()
    assert done.stdout.startswith(f"no rank of early.py runs here yet (phalanx run, pid {pid}): ")


def test_top_shows_the_launcher_and_no_rank(launcher):
    folder, pid = launcher
    done = asked(folder, "top", "early.py", "--once")
    assert done.returncode == 0
    assert done.stdout.startswith(f"early.py  phalanx run, pid {pid}  waiting for nodes: 1 of at least 2 are here")
    assert "rank" not in done.stdout


def left_s(line: str) -> int:
    return int(re.search(r"; (\d+) s are left", line)[1])


def test_the_time_that_a_launcher_waits_is_counted_on(launcher):
    folder, _ = launcher
    first = left_s(asked(folder, "why", "early.py").stdout)
    while (later := left_s(asked(folder, "why", "early.py").stdout)) == first:
        pass
    assert later < first


def test_of_a_job_that_lost_a_node_it_is_told_what_the_launcher_waits_for_and_no_rank_that_has_ended(tmp_path):
    (tmp_path / "late.py").write_text("import signal\nprint('started', flush=True)\nsignal.pause()\n")
    with contextlib.closing(ReservedPort()) as port:
        flags = ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port.port}"]
    flags += ["--nproc-per-node", "1", "--max-restarts", "1", "--no-preload"]
    command = [*PHALANX, "run", *flags, "late.py"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one,
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        try:
            for process in (one, other):
                assert "started" in process.stdout.readline()
            other.kill()
            while "waiting for nodes: 1 of at least 2" not in (said := one.stderr.readline()):
                assert said, "it has ended"
            wanted = "waiting for nodes: 1 of at least 2 are here"
            shown = " ".join(asked(tmp_path, "top", one.pid, "--once").stdout.split())
            assert shown.startswith(f"late.py phalanx run, pid {one.pid} "), shown
            assert re.search(rf"{wanted} \(\S+\); \d+ s are left$", shown), shown
            assert "gone" not in shown
            assert wanted in asked(tmp_path, "why", one.pid).stdout
        finally:
            one.terminate()
            other.kill()


def test_the_brief_answer_about_a_job_of_one_rank_is_what_that_does(tmp_path):
    (tmp_path / "alone.py").write_text("import signal\nprint('started', flush=True)\nsignal.pause()\n")
    command = [*PHALANX, "run", "--nproc-per-node", "1", "--no-preload", "alone.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert "started" in process.stdout.readline()
        done = asked(tmp_path, "why", "alone.py", "--brief")
        process.terminate()
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1), done
    assert "rank 0" in done.stdout or "pid" in done.stdout


@pytest.mark.parametrize(
    "command", [("stacks", "early.py"), ("trace", "early.py"), ("attach", "0", "--job", "early.py")]
)
def test_commands_that_need_a_rank_say_that_there_is_none_yet(launcher, command):
    folder, pid = launcher
    done = asked(folder, *command)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"phalanx {command[0]}: no rank of early.py runs here yet (phalanx run, pid {pid}): waiting"
    )


def test_a_run_that_ended_before_its_ranks_were_started_says_what_ended_it(tmp_path):
    with launcher_that_waits(tmp_path) as pid:
        assert pid
    (run,) = tmp_path.glob("logs/early/*")
    for named in "early.py", run:
        done = asked(tmp_path, "why", named)
        assert done.returncode == 2
        assert done.stderr.endswith("has ended before any rank was started: phalanx run got SIGTERM\n"), done.stderr
