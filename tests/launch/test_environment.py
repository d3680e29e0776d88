"""What a rank finds in its environment beside torchrun's variables; what the user has set stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.host.cpus import Share
from phalanx.launch.command.plan import make_plan
from phalanx.launch.environment import thread_environment

CROWDED = Share(num_threads=2, is_crowded=True)


def test_pools_of_threads_have_the_size_of_the_share_unless_the_user_has_set_it():
    found = thread_environment({"MKL_NUM_THREADS": "3"}, Share(num_threads=2))
    assert found == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"}
    assert thread_environment({"OMP_NUM_THREADS": "5"}, Share(num_threads=2)) == {"OMP_NUM_THREADS": "5"}


def test_threads_of_crowded_ranks_sleep_while_they_wait():
    assert "OMP_WAIT_POLICY" not in thread_environment({}, Share(num_threads=2))
    assert thread_environment({}, CROWDED)["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_how_threads_wait_is_the_users_if_he_has_said_it(name):
    assert thread_environment({"OMP_NUM_THREADS": "2", name: "1"}, CROWDED) == {"OMP_NUM_THREADS": "2", name: "1"}


@pytest.mark.parametrize(
    ("environ", "forks"),
    [
        ({}, True), ({"OMP_PROC_BIND": "false"}, True), ({"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"}, True),
        ({"OMP_PROC_BIND": "true"}, False), ({"OMP_PLACES": "cores"}, False),
        ({"OMP_PLACES": "{0},{1}"}, True), ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"KMP_AFFINITY": "compact"}, False),
    ],
)  # fmt: skip
def test_ranks_are_not_forked_from_a_process_whose_threads_are_bound(tmp_path, environ, forks):
    (tmp_path / "train.py").touch()
    assert make_plan([str(tmp_path / "train.py")], environ).job.preload == forks


PRINTS = "import os; print('WAIT', os.environ.get('OMP_WAIT_POLICY'))"


@pytest.mark.parametrize(("num_threads", "policy", "flags"), [("512", "PASSIVE", []), ("1", "None", ["--no-preload"])])
def test_ranks_of_phalanx_run_are_told(tmp_path, monkeypatch, num_threads, policy, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", num_threads)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    (tmp_path / "prints.py").write_text(PRINTS)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", *flags, "prints.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"WAIT {policy}" in done.stdout


SPAWNS = """
import os, phalanx

def policies(rank):
    server = open(f"/proc/{os.getppid()}/environ").read().split("\\0")  # it has imported torch, which has read them
    return [os.environ.get("OMP_WAIT_POLICY"), "OMP_WAIT_POLICY=PASSIVE" in server]

if __name__ == "__main__":
    print("WAIT", *phalanx.spawn(policies, nprocs=1), "OMP_WAIT_POLICY" in os.environ)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_threads", "told"), [("512", "WAIT ['PASSIVE', True] False"), ("1", "WAIT [None, False] False")]
)
def test_the_server_that_ranks_are_spawned_from_is_told_too(tmp_path, monkeypatch, num_threads, told):
    monkeypatch.setenv("OMP_NUM_THREADS", num_threads)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = subprocess.run([sys.executable, tmp_path / "spawns.py"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{told}\n", done.stderr
