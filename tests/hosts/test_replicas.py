"""A job whose hosts each have a part of the state goes on from memory when hosts are killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.namespaces import hosts

pytestmark = pytest.mark.usefixtures("needs_hosts")
LIMIT_S = 90
PORT = "29511"
EVERY = 5  # steps between snapshots

TRAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
import torch.distributed.tensor
import phalanx.checkpoint as ckpt
from phalanx.checkpoint.memory import memory

def say(**facts):
    print(json.dumps(facts), flush=True)

every, last = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("phalanx")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
weight = dist.tensor.distribute_tensor(torch.arange(1200.0), mesh, [dist.tensor.Shard(0)])
state = {"weight": weight, "step": 0}
found = ckpt.load("folder", state, missing="ignore")
say(loaded=found and [found.step, found.source], size=size)
while state["step"] < last:
    state["step"] += 1
    with torch.no_grad():
        total = weight.to_local().sum()
        dist.all_reduce(total)
        weight.to_local().mul_(0.99).add_(total / 1e6 + 0.1)
    if state["step"] % every == 0:
        assert ckpt.snapshot("folder", state, state["step"]) == ""
        if safe := memory()._slots.safe:
            say(step=state["step"], safe=safe[1])
    time.sleep(0.01)
say(digest=weight.full_tensor().double().sum().item().hex())
dist.destroy_process_group()
"""


def launch(jobs, made, folder, nodes, *flags, last=10**6):
    """Start the job's supervisor on each host."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    for host in made:
        command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--nnodes", nodes, "--rdzv-id", "job"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:{PORT}", "--max-restarts", "3"]
        command += ["--log-dir", str(folder / host.name), *flags, str(script), str(EVERY), str(last)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        jobs.append(host.start(command, **options))


def await_fact(job, name, limit_s=LIMIT_S):
    """Return the next facts with this name that a job's rank prints."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        line = job.stdout.readline()
        assert line, job.communicate(timeout=LIMIT_S)[1]
        if name in (facts := json.loads(line[line.index("{") :])):
            return facts
    raise AssertionError(f"no {name} within {limit_s} s")


@pytest.mark.parametrize("lost", [0, 1], ids=["where nodes meet", "another"])
def test_the_part_of_a_host_that_is_killed_comes_from_another(jobs, tmp_path, lost):
    with hosts(3) as made:
        launch(jobs, made, tmp_path, "1:3")
        safe = await_fact(jobs[2], "safe")["safe"]
        made[lost].kill()
        loaded = await_fact(jobs[2], "loaded")
        assert loaded["size"] == 2
        assert loaded["loaded"][0] >= safe
        assert loaded["loaded"][1] == "memory"
        again = await_fact(jobs[2], "safe")["safe"]
        made[1 - lost].kill()  # what was lost is kept twice again
        loaded = await_fact(jobs[2], "loaded")
        assert (loaded["size"], loaded["loaded"][1]) == (1, "memory")
        assert loaded["loaded"][0] >= again


def test_a_spare_that_takes_the_place_of_a_killed_host_changes_no_bit(jobs, tmp_path):
    with hosts(3) as made:
        (tmp_path / "undisturbed").mkdir()
        launch(jobs, made[:2], tmp_path / "undisturbed", "2", last=100)
        wanted = await_fact(jobs[0], "digest")["digest"]
        for job in jobs:
            job.communicate(timeout=LIMIT_S)
        launch(jobs, made[:2], tmp_path, "2", last=100)
        launch(jobs, made[2:], tmp_path, "2", last=100)
