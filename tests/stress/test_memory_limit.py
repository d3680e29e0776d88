"""A job in a cgroup whose limit is too small for its snapshots is killed once, and not again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

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


@contextlib.contextmanager
def limited_cgroup():
    """Make a cgroup of version 2 or 1 with a limit, or skip; yield its folder."""
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    controllers = v2 / "cgroup.subtree_control"
    has_v2 = controllers.exists() and "memory" in controllers.read_text().split()
    folder = (v2 if has_v2 else v1) / f"phalanx-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.max" if has_v2 else "memory.limit_in_bytes")
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        folder.rmdir()


def test_a_job_that_its_cgroup_kills_goes_on_without_snapshots(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "3", "train.py"]
    with limited_cgroup() as folder:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no more snapshots in memory are taken") == 1
    assert "restart 1 of 3" in done.stderr
    assert "restart 2 of 3" not in done.stderr
    lines = [line.split("] ", 1)[1].split() for line in done.stdout.splitlines()]
    assert {tuple(line[1:]) for line in lines if line[0] == "loaded"} == {
        ("0", "0", "None", "None"), ("0", "1", "None", "None"), ("1", "0", "3", "memory"), ("1", "1", "3", "memory"),
    }  # fmt: skip
    held = {line[1]: int(line[3]) for line in lines if line[0] == "held"}
    assert held["0"] >= 64
    assert "1" in held
