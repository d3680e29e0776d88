"""A job in a cgroup whose limit is too small for its snapshots is killed once, and not again."""

from __future__ import annotations

import sys
import textwrap

from tests.limited import run_limited

LIMIT_BYTES = 1536 << 20
LIMIT_S = 120

# The first attempt takes more than the cgroup has; the second nothing but what it has loaded.
TRAIN = """
import os, time
import torch, torch.distributed as dist
import phalanx, phalanx.checkpoint as ckpt

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
phalanx.init()
rank = dist.get_rank()
state = {"x": torch.zeros(8 << 20), "step": 0}
found = ckpt.load("c", state)
print("loaded", attempt, rank, found and found.step, found and found.source, flush=True)
for step in range(state["step"] + 1, 4):
    state["step"] = step
    print("problem", attempt, rank, ckpt.snapshot("c", state, step), flush=True)
dist.barrier()
held = os.stat(os.environ["PHALANX_SNAPSHOTS"]).st_blocks * 512
print("held", attempt, rank, held >> 20, flush=True)
ballast = []
while attempt == 0:
    ballast.append(torch.ones(8 << 20))
dist.barrier()
"""


def test_a_job_that_its_cgroup_kills_goes_on_without_snapshots(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "3", "train.py"]
    done = run_limited(command, LIMIT_BYTES, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no more snapshots are taken in memory") == 1
    assert "restart 1 of 3" in done.stderr
    assert "restart 2 of 3" not in done.stderr
    lines = [line.split("] ", 1)[1].split() for line in done.stdout.splitlines()]
    assert {tuple(line[1:]) for line in lines if line[0] == "loaded"} == {
        ("0", "0", "None", "None"), ("0", "1", "None", "None"), ("1", "0", "3", "memory"), ("1", "1", "3", "memory"),
    }  # fmt: skip
    held = {line[1]: int(line[3]) for line in lines if line[0] == "held"}
    assert held["0"] >= 64
    assert "1" in held


def test_a_job_on_several_nodes_that_a_cgroup_kills_goes_on_without_snapshots(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    command = f"{sys.executable} -m phalanx run --nproc-per-node 1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "
    command += "localhost:29533 --max-restarts 3 train.py"
    done = run_limited(["sh", "-c", f"{command} & {command} && wait $!"], LIMIT_BYTES, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no more snapshots are taken in memory") >= 1  # the nodes share the cgroup here
    assert "restart 1 of 3" in done.stderr
    assert "restart 2 of 3" not in done.stderr
    lines = [line.split("] ", 1)[1].split(maxsplit=3) for line in done.stdout.splitlines()]
    found = {tuple(line[1:]) for line in lines if line[0] == "loaded"}
    assert {one for one in found if one[0] == "1"} == {("1", "0", "3 memory"), ("1", "1", "3 memory")}
