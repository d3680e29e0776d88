"""Nothing of a job outlives those who watch over it, whichever of them are killed together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import conftest
from tests.launch.jobs import LIMIT_S, PHALANX_RUN, write_script

# Each rank tells the pids of itself, of a child, of one in a session of its own, and of a daemon.
WITH_CHILDREN = """
import subprocess
pids = [os.getpid()]
for own_session in (False, True):
    pids.append(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=own_session).pid)
ours, theirs = os.pipe()
if os.fork() == 0:
    os.setsid()
    if daemon := os.fork():
        os.write(theirs, b"%d" % daemon)
        os._exit(0)
    os.execvp("sleep", ["sleep", "1000"])
os.wait()
pids.append(int(os.read(ours, 20)))
print("pids", os.getppid(), *pids, flush=True)
signal.pause()
"""


# The same, and a rank that is sent SIGUSR1 ends well.
LEAVING = WITH_CHILDREN.replace(
    "signal.pause()", "signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\nsignal.pause()"
)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def job_with_children(folder, *flags, source=WITH_CHILDREN):
    """Start a job; yield it with the pids of its supervisor, reaper and forker, and of all that its ranks have."""
    command = [*PHALANX_RUN, "--nproc-per-node", "2", *flags, write_script(folder, source)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "cwd": folder}
    with subprocess.Popen(command, **options) as job:
        try:
            lines = [job.stdout.readline().split() for _ in range(2)]
            forker = int(lines[0][3])
            watchers = {"supervisor": job.pid, "reaper": parent_of(forker), "forker": forker}
            yield job, watchers, [int(pid) for line in lines for pid in line[4:]]
        finally:
            job.kill()


def ends(pid, limit_s=LIMIT_S):
    """Return whether the process is gone, within the limit."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        ended = select.select([pidfd], [], [], limit_s)[0]
        os.close(pidfd)
        return bool(ended)
    return True


@pytest.mark.parametrize(
    ("victims", "flags"),
    [
        (("supervisor", "forker"), ()),
        (("supervisor", "forker"), ("--no-preload",)),
        (("supervisor", "reaper"), ("--no-preload",)),
        (("reaper", "forker"), ("--no-preload",)),
        (("reaper",), ("--no-preload",)),
    ],
)
def test_those_who_watch_a_job_leave_nothing_when_they_are_killed_together(tmp_path, victims, flags):
    with job_with_children(tmp_path, *flags) as (job, watchers, pids):
        assert len(pids) == 8
        assert parent_of(watchers["reaper"]) == job.pid
        for victim in victims:
            os.kill(watchers[victim], signal.SIGKILL)
        assert [pid for pid in (*watchers.values(), *pids) if not ends(pid)] == []
        assert job.wait(LIMIT_S) in (-signal.SIGKILL, 128 + signal.SIGKILL)


SLOW_FORKER = """
import os, signal
from phalanx.launch.processes import reaper as reaper
supervisor, (told, tell) = os.getpid(), os.pipe()
if os.fork() == 0:
    reaper.fork_forker(supervisor, tell)
    child = os.posix_spawnp("sleep", ["sleep", "1000"], os.environ, setsid=True)
    print(os.getppid(), os.getpid(), child, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("flags", [(), ("--no-preload",)])
def test_what_a_rank_has_started_ends_with_it_while_other_ranks_live(tmp_path, flags):
    with job_with_children(tmp_path, *flags, source=LEAVING) as (job, _, pids):
        os.kill(pids[4], signal.SIGUSR1)
        assert all(ends(pid) for pid in pids[4:])
        assert not any(ends(pid, 0) for pid in pids[:4])
        job.terminate()
        assert job.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert all(ends(pid) for pid in pids)


def test_a_reaper_lets_the_forker_end_its_ranks_for_a_while_before_it_does_so_itself():
    """Killed at once, the forker could not do it when the reaper is killed next."""
    command = [sys.executable, "-c", SLOW_FORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        reaper, forker, child = map(int, supervisor.stdout.readline().split())
        supervisor.kill()
        assert not ends(forker, limit_s=0.5)
        assert [pid for pid in (reaper, forker, child) if not ends(pid)] == []


def test_killing_by_the_name_of_the_script_leaves_nothing(tmp_path):
    with job_with_children(tmp_path, "--no-preload") as (job, watchers, pids):
        found = []  # as pkill -f finds them
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path / "train.py").encode() in cmdline.read_bytes():
                    found.append(int(cmdline.parent.name))
        assert {watchers["supervisor"], watchers["forker"]} < set(found)
        assert Path(f"/proc/{watchers['reaper']}/comm").read_text() == "rank-reaper\n"
        for pid in found:
            with contextlib.suppress(ProcessLookupError):  # it has died with its parent
                os.kill(pid, signal.SIGKILL)
        assert [pid for pid in (*watchers.values(), *pids) if not ends(pid)] == []
        assert job.wait(LIMIT_S) == -signal.SIGKILL


# ---------------------------------------------------------------- phalanx.spawn

SPAWNS = f"""
import os, signal, phalanx

def wait(rank):
{textwrap.indent(WITH_CHILDREN, "    ")}

if __name__ == "__main__":
    phalanx.spawn(wait, nprocs=2)
"""

RETURNS = """
import os, sys, phalanx

def leave(rank):
    return [os.posix_spawnp("sleep", ["sleep", time], os.environ, setsid=True) for time in ("0", "1000")][1]

if __name__ == "__main__":
    for _ in range(2):
        print(*phalanx.spawn(leave, nprocs=2), flush=True)
        sys.stdin.readline()
"""


@contextlib.contextmanager
def script_that_spawns(folder, source):
    (folder / "train.py").write_text(source)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "error", "train.py"]
    with subprocess.Popen(command, cwd=folder, start_new_session=True, **options) as script:
        try:
            yield script
        finally:
            script.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["process group", "script and server", "server"])
def test_nothing_that_spawned_ranks_have_started_outlives_the_script(tmp_path, victims):
    with script_that_spawns(tmp_path, SPAWNS) as script:
        lines = [script.stdout.readline().split() for _ in range(2)]
        server, pids = int(lines[0][1]), [int(pid) for line in lines for pid in line[2:]]
        reaper = parent_of(server)
        assert len(pids) == 8
        assert parent_of(reaper) == script.pid
        if "server" in victims:
            os.kill(server, signal.SIGKILL)
        if "script" in victims:
            script.kill()
        if "group" in victims:
            os.killpg(script.pid, signal.SIGKILL)
        assert [pid for pid in (server, *pids, *[reaper] * (victims != "server")) if not ends(pid)] == []


def test_a_daemon_of_a_spawned_rank_outlives_its_rank_and_not_the_script(tmp_path):
    with script_that_spawns(tmp_path, RETURNS) as script:
        first = [int(pid) for pid in script.stdout.readline().split()]
        script.stdin.write("\n")
        script.stdin.flush()
        second = [int(pid) for pid in script.stdout.readline().split()]
        assert {parent_of(pid) for pid in first} == {parent_of(pid) for pid in second}
        assert script.communicate(timeout=LIMIT_S) == ("", "")
        assert script.returncode == 0
        assert [pid for pid in (*first, *second) if not ends(pid)] == []


def leave_a_daemon(rank, world_size):
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def test_what_a_rank_of_a_test_leaves_behind_is_found(run_ranks):
    before = conftest._holdings()["process"]
    [daemon] = run_ranks(leave_a_daemon, 1, backend=None)
    deadline = time.monotonic() + LIMIT_S
    while not (left := conftest._holdings()["process"] - before) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel's list of children may pass over one while another ends
    os.kill(daemon, signal.SIGKILL)
    assert left == {f"{daemon} sleep 1000 "}
