"""Two launchers on one machine: the one that comes last says who else has the cores, and what to set."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.host.cpus import Machine
from phalanx.launch.command import neighbors
from phalanx.launch.command.neighbors import RUN, SPAWN, TUNE, Claim, Presence, crowding

from .jobs import LIMIT_S, PHALANX_RUN, await_line

HOLD = """
import sys
from phalanx.launch.command.neighbors import Claim, Presence
with Presence(Claim(launcher="phalanx run", cpus=(0, 1), num_ranks=1, num_threads=2)):
    print("here", flush=True)
    sys.stdin.read()
"""


def claim(num_ranks, num_threads, cpus=range(2), *, launcher=RUN, job=""):
    return Claim(launcher=launcher, cpus=tuple(cpus), num_ranks=num_ranks, num_threads=num_threads, job=job)


@pytest.fixture
def one_core_for_each_cpu(monkeypatch):
    def machine(usable):
        return Machine(cores=tuple((cpu,) for cpu in usable), numa_nodes=(0,) * len(usable))

    monkeypatch.setattr(neighbors, "read_machine", machine)


@pytest.mark.parametrize(
    ("own", "others", "told"),
    [
        (claim(1, 2), {}, ""),
        (claim(1, 1), {7: claim(1, 1)}, ""),
        (claim(1, 2), {7: claim(1, 2, cpus=[2, 3])}, ""),
        (
            claim(1, 2),
            {7: claim(1, 2)},
            "another phalanx run (pid 7) uses these 2 cores: 4 threads in all; each needs OMP_NUM_THREADS=1 to be fast",
        ),
        (
            claim(2, 8, range(8)),
            {7: claim(2, 8, range(8), launcher=SPAWN)},
            "phalanx.spawn (pid 7) uses these 8 cores: 16 threads in all; each needs OMP_NUM_THREADS=2 to be fast",
        ),
        (
            claim(8, 8, range(8)),
            {7: claim(8, 8, range(8))},
            "another phalanx run (pid 7) uses these 8 cores: 16 threads in all; "
            "each needs OMP_NUM_THREADS=1 and --nproc-per-node 4 to be fast",
        ),
        (
            claim(2, 2, launcher=SPAWN),
            {7: claim(2, 2)},
            "phalanx run (pid 7) uses these 2 cores: 4 threads in all; "
            "each needs OMP_NUM_THREADS=1 and nprocs=1 to be fast",
        ),
        (
            claim(1, 2),
            {9: claim(1, 2), 7: claim(1, 2)},
            "another phalanx run (pid 7) and another phalanx run (pid 9) use these 2 cores: 6 threads in all; "
            "run one after another: there are fewer cores than jobs",
        ),
        (
            claim(1, 2),
            {7: claim(1, 2, launcher=TUNE)},
            "phalanx tune (pid 7) uses these 2 cores: 4 threads in all; "
            "run one after another: times measured now are not the script's own",
        ),
        (claim(2, 2, job="a"), {7: claim(2, 2, job="a")}, ""),
        (
            claim(2, 4, job="a"),
            {7: claim(2, 4, job="a")},
            "a node of this job (pid 7) uses these 2 cores: 8 threads in all; each needs OMP_NUM_THREADS=1 to be fast",
        ),
        (
            claim(2, 2, job="a"),
            {7: claim(2, 2, job="b")},
            "another phalanx run (pid 7) uses these 2 cores: 4 threads in all; "
            "each needs OMP_NUM_THREADS=1 and --nproc-per-node 1 to be fast",
        ),
    ],
)
@pytest.mark.usefixtures("one_core_for_each_cpu")
def test_who_has_the_cores_and_what_to_set_is_said_only_if_they_are_too_few(own, others, told):
    assert "; ".join(crowding(own, others)) == told


@contextlib.contextmanager
def process(command):
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        try:
            yield it
        finally:
            it.stdin.close()


def test_a_launcher_is_there_until_it_ends_even_if_it_is_killed():
    own = claim(1, 2)
    with process([sys.executable, "-c", HOLD]) as other:
        await_line(other.stdout, "here")
        with Presence(own) as presence:
            assert presence.others == {other.pid: own}
        other.kill()
        other.wait(LIMIT_S)
    with Presence(own) as presence:
        assert presence.others == {}
        folder = Path(os.environ["XDG_RUNTIME_DIR"], "phalanx")
        assert [path.name.split("-")[:2] for path in folder.glob("*launcher-*")] == [["launcher", str(os.getpid())]]
    assert not list(folder.glob("*launcher-*"))


def test_two_contexts_of_one_process_do_not_hide_it():
    look = "from phalanx.launch.command.neighbors import Claim, Presence\nprint(*Presence(Claim(**%r)).others)"
    own = {"launcher": RUN, "cpus": (0,), "num_ranks": 1, "num_threads": 1}
    with Presence(Claim(**own)), Presence(Claim(**own)) as second:
        assert second.others == {}
        found = subprocess.run(
            [sys.executable, "-c", look % own], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    assert found.stdout == f"{os.getpid()}\n"


def launch(num_ranks, *command):
    return [*PHALANX_RUN, "--nproc-per-node", str(num_ranks), "--no-python", *command]


def said_beside(other, command, **options):
    """Return what `command` says of `other`, which runs."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True, **options)
    return [line for line in done.stderr.splitlines() if str(other.pid) in line]


def test_a_second_launcher_names_the_first_and_what_a_rank_starts_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    num_ranks = len(os.sched_getaffinity(0))
    with process(launch(num_ranks, "cat")) as other:
        await_line(other.stderr, "logs in")
        (line,) = said_beside(other, launch(num_ranks, "true"))
        assert line.startswith(f"phalanx run: another phalanx run (pid {other.pid}) uses these ")
        for variable in ("LOCAL_RANK", "PHALANX_TRIAL"):
            assert said_beside(other, launch(num_ranks, "true"), env={**os.environ, variable: "{}"}) == []
    nested = launch(1, *launch(num_ranks, "true"))
    done = subprocess.run(nested, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "uses these" not in done.stderr


def test_launchers_with_threads_for_half_the_cores_say_nothing(tmp_path, monkeypatch):
    if len(os.sched_getaffinity(0)) < 2 or neighbors.read_machine().num_cores < 2:
        pytest.skip("two launchers need two cores")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with process(launch(1, "cat")) as other:
        await_line(other.stderr, "logs in")
        assert said_beside(other, launch(1, "true")) == []


def nothing(rank):
    pass


def test_spawn_names_another_launcher_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    num_ranks = len(os.sched_getaffinity(0))
    with process(launch(num_ranks, "cat")) as other:
        await_line(other.stderr, "logs in")
        phalanx.spawn(nothing)
        phalanx.spawn(nothing)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"phalanx.spawn: phalanx run (pid {other.pid}) uses these ")
