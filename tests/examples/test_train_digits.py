"""The main example, started as a user would start it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.checkpoint.comparison import compare

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"
LIMIT_S = 120

NEEDS = ("sklearn",)
missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"the example needs {missing}"),
    pytest.mark.usefixtures("warm_jobs"),
]


def command(launcher, out, *args):
    return [sys.executable, *launcher, str(SCRIPT), "--out", str(out), *args]


def train(launcher, out, *args):
    """Run the example to its end and return what it printed, without prefixes."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(launcher, out, *args), capture_output=True, text=True, timeout=LIMIT_S, env=environ, cwd=out.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("[rank 0] ", "")


def launcher(num_ranks):
    return ["-m", "phalanx", "run", "--nproc-per-node", str(num_ranks)]


def last_accuracy(printed):
    return float(re.findall(r"accuracy (\d\.\d+)", printed)[-1])


def write_idx(folder, part, num_images):
    """Write `num_images` images of 28x28, each a bar whose place tells its label."""
    folder.mkdir(exist_ok=True)
    labels = bytes(index % 10 for index in range(num_images))
    images = bytearray()
    for label in labels:
        image = bytearray(28 * 28)
        for row in range(28):
            image[row * 28 + 2 * label + 3] = image[row * 28 + 2 * label + 4] = 255
        images += image
    header = struct.pack(">4B3i", 0, 0, 8, 3, num_images, 28, 28)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">4Bi", 0, 0, 8, 1, num_images) + labels)


def test_two_ranks_reach_97_percent_and_leave_checkpoints_and_a_report(tmp_path):
    printed = train(launcher(2), tmp_path / "run")
    assert last_accuracy(printed) >= 0.97
    assert "global batch 64 = 2 ranks" in printed
    assert phalanx.checkpoint.verify(tmp_path / "run" / "checkpoints") == []
    assert "accuracy" in (tmp_path / "run" / "report.html").read_text()
    again = train(launcher(1), tmp_path / "run")
    assert "already finished at step 276; nothing to train" in again


@pytest.mark.slow
@pytest.mark.usefixtures("cold_jobs")
def test_a_rank_is_killed_and_the_training_goes_on_to_the_same_weights(tmp_path):
    train(launcher(2), tmp_path / "whole", "--epochs", "3")
    killed = tmp_path / "killed"
    start = command([*launcher(2), "--max-restarts", "1"], killed, "--epochs", "3")
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        printed, victim = [], 0
        for line in job.stdout:
            printed.append(line)
            if "epoch 1," in line and not victim:
                [named] = (line for line in printed if "processes of the ranks" in line)
                victim = int(named.split()[-1])
                os.kill(victim, signal.SIGKILL)  # as the README says
        errors = job.stderr.read()
    assert job.returncode == 0, errors
    assert f"rank 1 (pid {victim}) was killed by SIGKILL" in errors
    assert any("resuming after step" in line and "from memory" in line for line in printed)
    assert compare((tmp_path / "whole" / "checkpoints", 69), (killed / "checkpoints", 69)) == []
    steps = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [record["attempt"] for record in steps if record["kind"] == "start"] == [0, 1]


def test_it_runs_as_a_plain_script(forked, tmp_path):
    done = forked.run(SCRIPT, "--out", tmp_path / "run", "--epochs", "1", timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "global batch 64 = 1 rank x" in done.stdout


def test_a_lone_idx_set_is_split_four_to_one(tmp_path):
    write_idx(tmp_path / "mnist", "t10k", 101)
    printed = train(launcher(2), tmp_path / "out", "--data", str(tmp_path / "mnist"), "--epochs=2")
    assert "80 samples" in printed


def test_idx_training_and_test_sets_are_used_as_they_are(tmp_path):
    write_idx(tmp_path / "mnist", "train", 200)
    write_idx(tmp_path / "mnist", "t10k", 30)
    printed = train(launcher(1), tmp_path / "out", "--data", str(tmp_path / "mnist"), "--epochs=2")
    assert "200 samples" in printed


def test_a_folder_without_idx_files_is_named(forked, tmp_path):
    done = forked.run(SCRIPT, "--data", tmp_path, timeout=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr.splitlines()[-1]
