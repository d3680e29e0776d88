"""Scripts that an mpirun starts: they share memory on one host, and MPI may be the engine between hosts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 90
MPIRUN = {
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4"],
    "MPICH": ["mpiexec.mpich", "-n", "4"],
}
PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.ones(3)
dist.all_reduce(tensor)
core = type(dist.group.WORLD._operations._core)
print(f"{dist.get_rank()} {core.__module__}.{core.__name__} {tensor[0].item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def start(mpi, *program, **variables):
    """Return what the ranks printed, as sorted lines, and their standard error."""
    launcher = MPIRUN[mpi]
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER_", "PHALANX_"))}
    environ |= {"OMP_NUM_THREADS": "1", **variables}
    command = [*launcher, sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ, cwd=ROOT)
    return sorted(line for line in done.stdout.splitlines() if line), done.stderr


@pytest.fixture
def _needs_mpi4py():
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")


@pytest.mark.parametrize("mpi", MPIRUN)
def test_a_plain_script_shares_memory_on_one_host(mpi):
    lines, errors = start(mpi, "-c", PLAIN)
    assert lines == [f"{rank} phalanx._core.Group 4.0" for rank in range(4)], errors


@pytest.mark.usefixtures("_needs_mpi4py")
def test_collectives_and_messages_cross_hosts_by_mpi():
    lines, errors = start("Open MPI", "-m", "tests.hosts._mpi_job", "compare", PHALANX_BRIDGE="mpi")
    assert lines == [f"{rank} done" for rank in range(4)], errors


@pytest.mark.usefixtures("_needs_mpi4py")
def test_an_error_on_one_rank_reaches_the_ranks_of_the_other_host_by_mpi():
    lines, errors = start("Open MPI", "-m", "tests.hosts._mpi_job", "fail", PHALANX_BRIDGE="mpi")
    assert [line for line in lines if "done" not in line] == [
        "0 GroupAborted True",
        "1 GroupAborted True",
        "2 GroupAborted True",
        "3 GroupUnusable True",
    ], errors


@pytest.mark.usefixtures("_needs_mpi4py")
def test_another_mpi_than_that_which_started_the_ranks_is_refused():
    if shutil.which(MPIRUN["Open MPI"][0]) is None:
        pytest.skip("mpi4py is of the MPI that starts the ranks where it is the only one")
    lines, errors = start("MPICH", "-m", "tests.hosts._mpi_job", "compare", PHALANX_BRIDGE="mpi")
    assert lines == []
    assert "mpi4py has loaded Open MPI" in errors
    assert "which did not start these ranks. Start them with its mpirun" in errors
