"""A TMPDIR too long for the path of a socket changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch.jobs import LIMIT_S, PHALANX_RUN

PROGRAM = """
import torch, torch.distributed as dist, phalanx

def total(rank):
    dist.init_process_group("phalanx")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    loader = phalanx.DataLoader(torch.arange(6), num_workers=1)
    num_batches = len([batch for batch in loader])
    dist.destroy_process_group()
    return int(tensor) + num_batches

if __name__ == "__main__":
    print(phalanx.spawn(total, nprocs=2))
"""
JOB = """
import torch, phalanx
with phalanx.init() as session:
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    loader = torch.utils.data.DataLoader(torch.arange(6), num_workers=1)
    print("total", int(tensor), sum(int(item) for item in loader))
"""


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("source", "command", "said"),
    [
        (PROGRAM, [sys.executable], "[5, 5]\n"),
        (JOB, [*PHALANX_RUN, "--nproc-per-node", "2"], "[rank 0] total 2 15\n"),
    ],
)
def test_ranks_and_their_workers_start_with_a_long_tmpdir(tmp_path, long_tmpdir, source, command, said):
    script = tmp_path / "script.py"
    script.write_text(source)
    done = subprocess.run([*command, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
