"""docs/en/guides/clusters/slurm.md on a real Slurm: a controller and two nodes, which are hosts in namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.clusters._machines import FOUR, REPOSITORY, machines, script, sums

LIMIT_S = 120
_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=host-a
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
NodeName=host-a,host-b CPUs={num_cpus}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """A cluster of two nodes, whose commands run on the first."""

    def __init__(self, made, folder):
        self._made, self._environ = made, {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, num_cpus=os.cpu_count()))
        (folder / "state").mkdir()
        self._start(0, "slurmctld", "-D")
        for number, host in enumerate(made.hosts):
            self._start(number, "slurmd", "-D", "-N", host.name)
        self._wait_for("sinfo", "-h", "-o", "%D %t", says="2 idle")

    def _start(self, number, *command):
        daemon = self._made.start(number, ["sh", "-c", f"exec {' '.join(command)} > /dev/null 2>&1"], self._environ)
        daemon.stdout.close()

    def run(self, *command, cwd=None):
        """Return what a command prints on the first node, errors too."""
        job = self._made.start(0, ["env", "-C", str(cwd or "/tmp"), *command], self._environ)
        said = job.communicate(timeout=LIMIT_S)[0]
        assert job.returncode == 0, said
        return said

    def _wait_for(self, *command, says):
        deadline = time.monotonic() + LIMIT_S
        while says not in (said := self._made.start(0, command, self._environ).communicate(timeout=LIMIT_S)[0]):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)

    def wait_for_job(self, number, says):
        self._wait_for("scontrol", "show", "job", number, says=says)


@contextlib.contextmanager
def munge(folder):
    """Run the daemon that signs what Slurm's say to each other."""
    (folder / "munge").mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [
        f"--{name}={folder}/munge/{name.removesuffix('-file')}"
        for name in ("key-file", "log-file", "pid-file", "seed-file", "socket")
    ]
    daemon = subprocess.Popen(["munged", "--foreground", "--force", *files], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        daemon.terminate()
        daemon.wait(10)


@pytest.fixture
def slurm(needs_hosts):
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (packages slurm-wlm, munge)")
    # Short: a socket's path has at most 108 bytes. For daemons of their own users, too.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        with munge(folder), machines(folder) as made:
            yield Slurm(made, folder)
    finally:
        shutil.rmtree(folder)


def test_srun_starts_ranks_or_launchers(slurm, tmp_path):
    path = script(tmp_path)
    assert sums([slurm.run("srun", "-N2", "-n4", sys.executable, path)]) == FOUR
    launcher = ["phalanx", "run", "--nproc-per-node", "2", path]
    assert sums([slurm.run("srun", "-N2", "--ntasks-per-node=1", *launcher, cwd=tmp_path)]) == FOUR


def test_a_batch_job_that_is_asked_to_make_room_is_queued_again_and_goes_on(slurm, tmp_path):
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    output = tmp_path / "output"
    batch = ["sbatch", "--parsable", "-o", str(output), "examples/clusters/slurm.sh"]
    job = slurm.run(*batch, cwd=tmp_path).strip()

    def wait_until_it_says(text):
        deadline = time.monotonic() + LIMIT_S
        while not output.exists() or text not in output.read_text():
            assert time.monotonic() < deadline, output.read_text() if output.exists() else "no output"
            time.sleep(0.2)

    wait_until_it_says("epoch 2,")
    slurm.run("scancel", "--signal=USR1", job)
    wait_until_it_says(f"job {job} is queued again")
    slurm.wait_for_job(job, "Restarts=1")
    slurm.run("scancel", job)  # Slurm would hold it back for two minutes: a new one does not wait
    slurm.run(*batch, cwd=tmp_path)
    wait_until_it_says("resuming after step")
