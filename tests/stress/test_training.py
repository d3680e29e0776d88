"""A training whose ranks are killed at random moments ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest

from phalanx.checkpoint.comparison import compare
from phalanx.checkpoint.disk.folder import steps

NUM_KILLS = 100 if os.environ.get("PHALANX_TEST_LONG") else 3
LIMIT_S = 120

SCRIPT = """
import sys
import torch
from torch import nn
import phalanx

phalanx.seed_everything(0)
inputs = torch.randn(800, 10)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, max_epochs=12, global_batch_size=8,
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1200), clip_norm=1.0, folder=sys.argv[1],
    log_every=1, snapshot_every=1)
trainer.fit(data)
"""


def run(folder, kill_after_step=None, delay_s=0.0, victim=0):
    """Run the job, maybe kill a rank so long after a step was logged; return when that was, and what was said."""
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += [str(folder.parent / "train.py"), str(folder)]
    killed_at = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        printed = []
        for line in job.stdout:
            printed.append(line)
            if kill_after_step is not None and killed_at is None and "processes of the ranks" in line:
                pid = int(re.findall(r"\d+", line.split(":")[1])[victim])
                wait_for_step(folder, kill_after_step)
                time.sleep(delay_s)
                os.kill(pid, signal.SIGKILL)
                killed_at = time.time()
        assert job.wait(LIMIT_S) == 0, "".join(printed)
    return killed_at, "".join(printed)


def wait_for_step(folder, step):
    deadline = time.monotonic() + LIMIT_S
    with (folder / "metrics.jsonl").open() as file:
        while time.monotonic() < deadline:
            line = file.readline()
            if f'"step": {step},' in line:
                return
            if not line:
                time.sleep(0.0005)
    raise AssertionError(f"step {step} was not logged")


def records_of(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_rank_killed_at_a_random_moment_costs_at_most_a_step(number, tmp_path_factory, whole):
    folder = tmp_path_factory.mktemp(f"killed{number}") / "run"
    (folder.parent / "train.py").write_text(SCRIPT)
    rng = random.Random(number)
    moment = {"kill_after_step": rng.randrange(1, 1000), "delay_s": rng.uniform(0, 0.02), "victim": rng.randrange(2)}
    killed_at, printed = run(folder, **moment)
    last = steps(folder / "checkpoints")[-1]
    assert compare((whole["folder"] / "checkpoints", 1200), (folder / "checkpoints", last)) == []
    starts = records_of(folder, "start")
    assert len(starts) == 2, printed
    trained = [record for record in records_of(folder, "step") if record["attempt"] == starts[0]["attempt"]]
    resumed = starts[1]["resumed_from"]
    if trained:
        assert resumed["source"] == "memory"
        assert trained[-1]["step"] - resumed["step"] <= 1
    again = [record["time"] for record in records_of(folder, "step") if record["attempt"] == starts[1]["attempt"]]
    whole["gaps_s"].append(again[0] - killed_at)
    if number == NUM_KILLS - 1:
        print(f"\nfrom kill to the next step: median {statistics.median(whole['gaps_s']):.2f} s")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run, and what the others took to go on."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (folder.parent / "train.py").write_text(SCRIPT)
    run(folder)
    return {"folder": folder, "gaps_s": []}
