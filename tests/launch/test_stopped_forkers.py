"""The process that forks the ranks is stopped by somebody: it is let run where the ranks have to end or to start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from phalanx.host.proc_stat import children_of
from tests.launch.jobs import LIMIT_S, run_job, write_script
from tests.launch.test_nodes import nodes

__all__ = ["nodes"]  # a fixture

ELASTIC = ("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=60")
TRAIN = """
print("training", os.environ["WORLD_SIZE"], flush=True)
while os.environ["WORLD_SIZE"] == "2": time.sleep(0.02)
"""


def start_one(group, *flags):
    job = group.start(*ELASTIC, *flags, backend="c10d", nnodes="1:2")
    group.wait_for_rendezvous()
    return job


def forker_of(job):
    """Return the process that forks a launcher's ranks, as soon as it is there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for child in children_of(job.pid):
            with open(f"/proc/{child}/comm") as file:
                is_reaper = file.read() == "rank-reaper\n"
            if is_reaper and (forkers := children_of(child)):
                return forkers[0]
    raise AssertionError("no forker")


@pytest.mark.parametrize("while_it", ["imports torch", "starts a rank", "waits"])
def test_a_node_whose_forker_is_stopped_goes_on_at_once_when_another_is_lost(nodes, while_it):
    group = nodes(TRAIN)
    job = start_one(group, *([] if while_it == "imports torch" else ["--no-preload"]))
    forker = forker_of(job)
    other = start_one(group, "--no-preload")
    while while_it == "starts a rank" and not select.select([other.stdout], [], [], 0)[0]:
        os.kill(forker, signal.SIGSTOP)
    assert "training 2" in other.stdout.readline()
    if while_it == "waits":
        assert "training 2" in job.stdout.readline()
    os.kill(forker, signal.SIGSTOP)
    other.kill()
    (code, out, err), _ = group.finish()
    assert (code, out.count("training 1")) == (0, 1), err
    assert "has not ended" not in err


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_named(tmp_path):
    source = """
    if RANK:
        while not os.path.exists("ready"): time.sleep(0.02)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w").close()
    while True: time.sleep(1)
    """
    done = run_job(tmp_path, source, "--no-preload", "--shutdown-timeout", "6")
    assert done.returncode == 3
    assert done.stderr.count("has not ended within 5 s of SIGTERM; SIGKILL follows in 1 s\n") == 1
    assert "phalanx run: rank 0 (pid " in done.stderr


ENDED_EARLY = """
import os
from phalanx.launch.command.plan import make_plan
from phalanx.launch.environment import Attempt
from phalanx.launch.run.supervisor import Supervisor
from phalanx.record.run_folder import RunFolder

job = make_plan(["--nproc-per-node", "1", "train.py"], os.environ).job
with Supervisor(job, RunFolder("", job.command)) as supervisor:
    wait = supervisor.wait
    def told_to_stop(timeout_s=None):  # as by another node, while the forker imports torch
        supervisor.shutdown.stop()
        wait(0)
    supervisor.wait = told_to_stop
    print(supervisor.run_attempt(Attempt(world_size=1, num_local_ranks=1, master_port=1)))
    print(supervisor.events.deadline)
"""


def test_an_attempt_that_ends_before_its_ranks_start_leaves_no_deadline(tmp_path):
    write_script(tmp_path, "")
    done = subprocess.run(
        [sys.executable, "-c", ENDED_EARLY], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, "None\nNone\n"), done.stderr
