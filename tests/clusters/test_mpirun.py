"""docs/en/guides/clusters/mpi.md: real mpiruns over a hostfile; a remote shell of ours stands in for ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.clusters._machines import FOUR, script, sums

LIMIT_S = 100
MPI_BRIDGE = {"PHALANX_BRIDGE": "mpi"}
MASTER = {"MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}


def open_mpi(two, tmp_path, env):
    (tmp_path / "hosts").write_text("host-a slots=2\nhost-b slots=2\n")
    shell = ["--mca", "plm_rsh_agent", two.remote_shell()]
    passed = [part for name in env for part in ("-x", name)]
    return ["mpirun.openmpi", "--allow-run-as-root", *shell, "--hostfile", str(tmp_path / "hosts"), "-n", "4", *passed]


def mpich(two, tmp_path, env):
    (tmp_path / "hosts").write_text("host-a:2\nhost-b:2\n")
    shell = ["-launcher", "ssh", "-launcher-exec", two.remote_shell()]
    passed = [part for name, value in env.items() for part in ("-genv", name, value)]
    return ["mpiexec.mpich", *shell, "-f", str(tmp_path / "hosts"), "-n", "4", *passed]


def start(two, tmp_path, launcher, env):
    command = launcher(two, tmp_path, env)
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    job = two.start(0, [*command, sys.executable, script(tmp_path)], env)
    return job.communicate(timeout=LIMIT_S)[0], job.returncode


def _engine():
    """Return the name of mpi4py's MPI, or skip. In a process of its own: MPI leaves a daemon behind."""
    asked = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        pytest.skip(f"mpi4py can't be imported: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize("launcher", [open_mpi, mpich])
def test_hosts_of_a_hostfile_meet_at_the_master_that_is_named(two, tmp_path, launcher):
    said, code = start(two, tmp_path, launcher, MASTER)
    assert code == 0, said
    assert sums([said]) == FOUR


def test_mpi_tells_the_ranks_where_to_meet_and_carries_what_they_say(two, tmp_path):
    if "Open MPI" not in _engine():
        pytest.skip(f"mpi4py has {_engine()}")
    said, code = start(two, tmp_path, open_mpi, MPI_BRIDGE)
    assert code == 0, said
    assert sums([said]) == FOUR


def test_without_either_the_ranks_say_what_to_set(two, tmp_path):
    said, code = start(two, tmp_path, open_mpi, {})
    assert code != 0
    assert "Open MPI started 4 ranks on 2 hosts and does not say where rank 0 listens: set MASTER_ADDR" in said


def test_an_mpi4py_of_another_mpi_is_named(two, tmp_path):
    if "Open MPI" not in _engine():
        pytest.skip(f"mpi4py has {_engine()}")
    said, code = start(two, tmp_path, mpich, MPI_BRIDGE)
    assert code != 0
    assert "MPICH or Intel MPI started 4 ranks, and mpi4py's Open MPI" in said
    assert "sees a world of 1: they are two MPIs" in said
