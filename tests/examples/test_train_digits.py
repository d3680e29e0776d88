"""The main example, started as a user would start it."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"
LIMIT_S = 120

NEEDS = ("sklearn", "matplotlib", "rich")
missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"the example needs {missing}")


def has_phalanx_backend():
    return importlib.util.find_spec("phalanx._core") is not None


BACKEND = "phalanx" if has_phalanx_backend() else "gloo"


def train(launcher, out, *args):
    """Run the example to its end and return what it printed, without prefixes."""
    command = [sys.executable, *launcher, str(SCRIPT), "--backend", BACKEND, "--out", str(out)]
    environ = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(out)}
    done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("[rank 0] ", "")


def launcher(num_ranks):
    return ["-m", "phalanx", "run", "--nproc-per-node", str(num_ranks)]


def last_accuracy(printed):
    return float(re.findall(r"test accuracy (\d+\.\d+)%", printed)[-1])


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


def test_two_ranks_reach_97_percent_and_leave_a_checkpoint_and_a_plot(tmp_path):
    printed = train(launcher(2), tmp_path)
    assert last_accuracy(printed) >= 97
    assert f"2 over {BACKEND}" in printed
    assert "360 images" in printed
    assert (tmp_path / "model.pt").stat().st_size > 10_000
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_it_runs_as_a_plain_script(tmp_path):
    printed = train([], tmp_path, "--epochs", "1")
    assert f"1 over {BACKEND}" in printed


def test_a_lone_idx_set_is_split_four_to_one(tmp_path):
    write_idx(tmp_path / "mnist", "t10k", 101)
    printed = train(launcher(2), tmp_path / "out", "--data", str(tmp_path / "mnist"), "--epochs=2")
    assert "21 images" in printed


def test_idx_training_and_test_sets_are_used_as_they_are(tmp_path):
    write_idx(tmp_path / "mnist", "train", 200)
    write_idx(tmp_path / "mnist", "t10k", 30)
    printed = train(launcher(1), tmp_path / "out", "--data", str(tmp_path / "mnist"), "--epochs=2")
    assert "30 images" in printed


def test_a_folder_without_idx_files_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--backend", BACKEND, "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr.splitlines()[-1]
