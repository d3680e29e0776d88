"""The small examples, started as their docstrings say, with settings that make them short."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.warm_jobs import own_folder

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
LIMIT_S = 300
COMMAND = re.compile(r"phalanx run --nproc-per-node (\d) examples/(\w+\.py)")


@pytest.fixture(scope="module", autouse=True)
def keeps_a_process_warm():
    """All examples start from one process that has imported torch."""
    with own_folder():
        yield


def start(folder, name, *args, num_ranks=2):
    """Run an example and return what it printed, without the launcher's prefixes; plain Python for no ranks."""
    launcher = ["-m", "phalanx", "run", "--warm", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *args]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    # torch 2.13 calls all_gather_into_tensor deprecated, later ones do not.
    assert "Warning" not in done.stderr.replace("FutureWarning", ""), done.stderr
    return re.sub(r"^\[rank \d\] ", "", done.stdout, flags=re.MULTILINE)


def numbers(pattern, printed):
    return [float(number) for number in re.findall(pattern, printed)]


def test_point_to_point(tmp_path):
    printed = start(tmp_path, "point_to_point.py", num_ranks=3).splitlines()
    relayed = sorted(line for line in printed if "relay" in line)  # a rank may print before the one that sent to it
    assert relayed == [f"rank {r}: relay: one more makes {r + 1}" for r in range(3)]
    assert "rank 0: swap: got [1.0, 1.0], and computed 100 meanwhile" in printed
    assert "rank 1: swap: got [0.0, 0.0], and computed 100 meanwhile" in printed
    assert "rank 0: shift: got 2 from my left neighbour" in printed
    assert "rank 0: collect: {1: 1, 2: 4}" in printed
    assert printed[-1] == "rank 1: post: [{'lr': 0.1}, 'adam'], then [2.0, 1.0]"


def test_point_to_point_alone_says_how_to_start_it(tmp_path):
    with pytest.raises(AssertionError, match=r"phalanx run --nproc-per-node 2 examples/point_to_point\.py"):
        start(tmp_path, "point_to_point.py", num_ranks=0)


def test_collectives(tmp_path):
    printed = dict(re.split(r"  +", line, maxsplit=1) for line in start(tmp_path, "collectives.py").splitlines())
    assert re.split(r"  +", printed["before"]) == ["[1, 10]", "[2, 20]"]
    for name, results in {
        "broadcast": "[1, 10]   [1, 10]",
        "reduce (on rank 0)": "[3, 30]   -",
        "all_reduce SUM": "[3.0, 20.0]   [3.0, 20.0]",
        "all_reduce AVG": "[1.5, 10.0]   [1.5, 10.0]",
        "all_reduce MAX": "[2.0, 10.0]   [2.0, 10.0]",
        "all_reduce PRODUCT": "[2.0, 100.0]   [2.0, 100.0]",
        "gather (to rank 0)": "[[1, 10], [2, 20]]   -",
        "all_gather": "[[1, 10], [2, 20]]   [[1, 10], [2, 20]]",
        "all_gather_into_tensor": "[1, 10, 2, 20]   [1, 10, 2, 20]",
        "scatter (from rank 0)": "[0, 100]   [1, 101]",
        "reduce_scatter": "[1]   [21]",
        "reduce_scatter_tensor": "[1]   [21]",
        "all_to_all": "[[0], [1]]   [[10], [11]]",
        "all_to_all_single": "[0, 1]   [10, 11]",
        "broadcast_object_list": "{'lr': 0.1}   {'lr': 0.1}",
        "scatter_object_list": "for 0   for 1",
        "gather_object": "['from 0', 'from 1']   -",
        "all_gather_object": "['from 0', 'from 1']   ['from 0', 'from 1']",
        "all_reduce async": "[3.0, 20.0, 100.0]   [3.0, 20.0, 100.0]",
        "barrier": "passed   passed",
    }.items():
        assert re.sub("  +", "   ", printed[name]) == results, name


def test_collectives_in_a_world_of_one(tmp_path):
    printed = start(tmp_path, "collectives.py", num_ranks=0)
    assert re.search(r"^all_reduce SUM +\[1.0, 10.0\]$", printed, re.MULTILINE)


def test_groups(tmp_path):
    printed = [line.strip() for line in start(tmp_path, "groups.py", num_ranks=4).splitlines()]
    assert "rank 3: number 1 of [1, 3], whose sum is 4; heard 'hello from 1'" in printed
    assert "rank 3: in [2, 3], one of 2 groups; its sum is 5" in printed
    assert "rank 3: row 1 with sum 5, column 1 with sum 4" in printed
    assert len(printed) == 3 * (1 + 4)


def test_ring_all_reduce(tmp_path):
    printed = start(tmp_path, "ring_all_reduce.py", "--sizes", "1", "7", "5000", "--repeats", "3", num_ranks=3)
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert sorted(said) == [f"rank {r}: {[r + 1] * 3} -> [6, 6, 6]" for r in range(3)]
    differences = numbers(r"(\d\.?\d*e[+-]\d+)", printed)
    assert len(differences) == 3
    assert max(differences) < 1e-6


def test_shared_data(tmp_path):
    printed = start(tmp_path, "shared_data.py", "--num-samples", "2000")
    assert printed.count("built the dataset") == 1
    for rank in range(2):
        assert f"rank {rank} has read 1000 samples" in printed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")
def test_partition(tmp_path):
    printed = start(tmp_path, "partition.py", "--epochs", "3")
    losses = numbers(r"loss (\d+\.\d+)", printed)
    assert losses == sorted(losses, reverse=True)
    assert sorted(numbers(r"trained on (\d+) images", printed)) == [718, 719]
    one, other = numbers(r"accuracy (\d+\.\d+)%", printed)
    assert one == other > 80


@pytest.mark.slow
def test_a_trainer_goes_on_to_the_same_losses_on_the_way_that_it_was_stopped(tmp_path):
    whole = start(tmp_path, "trainer_class.py", "--epochs", "3", "--snapshot", "whole.pt").splitlines()
    assert [line.split(",")[0] for line in whole[:3]] == ["epoch 1: 32 steps", "epoch 2: 64 steps", "epoch 3: 96 steps"]
    first = start(tmp_path, "trainer_class.py", "--epochs", "3", "--snapshot", "part.pt", "--stop-after", "40")
    assert first.splitlines()[0] == whole[0]
    assert "40 steps done" in first
    second = start(tmp_path, "trainer_class.py", "--epochs", "3", "--snapshot", "part.pt")
    assert second.splitlines()[:3] == ["resumed from part.pt after step 40", *whole[1:3]]


@pytest.mark.slow
def test_sync_batchnorm(tmp_path):
    plain, synced = numbers(r"(\d\.?\d*e[+-]\d+)", start(tmp_path, "sync_batchnorm.py", "--steps", "3"))
    assert synced < 1e-5 < 1e-2 < plain


def test_gradient_accumulation(tmp_path):
    printed = start(tmp_path, "gradient_accumulation.py", "--width", "64", "--micro-batches", "3", "--steps", "2")
    norms = numbers(r"norm (\d+\.\d+)", printed)
    assert len(norms) == 3
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


@pytest.mark.slow
def test_train_gpt(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 50)
    printed = start(
        tmp_path, "train_gpt.py", "--data", "text", "--steps", "60", "--tune-steps", "5", "--batch-size", "4"
    )
    assert "training on 2,100 letters" in printed
    assert re.search(r"fine-tuning on \d+ letters", printed)  # the Zen of Python
    losses = numbers(r"loss (\d+\.\d+)", printed)
    assert len(losses) == 10
    assert losses[4] < losses[0] / 2
    assert "after fine-tuning:" in printed


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    printed = start(tmp_path, "tensor_parallel.py", "--steps", "2")
    assert numbers(r"the same parameters, (\d+)% of them on each rank", printed) == [51, 51]


def test_pipeline(tmp_path):
    printed = start(tmp_path, "pipeline.py", "--steps", "2", num_ranks=3)
    said = re.findall(r"^(\S+): (\d) of (\d) stages on each rank, .*; the same parameters$", printed, re.MULTILINE)
    assert said == [("GPipe", "1", "3"), ("1F1B", "1", "3"), ("interleaved", "2", "6")]


@pytest.mark.slow
def test_fully_sharded(tmp_path):
    printed = start(tmp_path, "fully_sharded.py", "--steps", "2", num_ranks=4)
    assert re.findall(r"^(\w+): (\d+)% of the parameters on each rank", printed, re.MULTILINE) == [
        ("one_mesh", "25"),
        ("hybrid", "50"),
        ("with_tensor_parallel", "25"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")
def test_local_sgd(tmp_path):
    printed = start(tmp_path, "local_sgd.py", "--epochs", "2", "--margin", "0.2", num_ranks=4)
    factors = numbers(r"DDP's divided by +(\d+\.\d)", printed)
    assert factors[:2] == [1.0, 2.0]
    assert factors[3] == factors[4] > 14
    assert factors[5] > 28
    assert min(numbers(r"accuracy (\d+\.\d+)%", printed)) > 75


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_every_example_is_in_the_table_with_its_own_command(readme):
    scripts = {path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    shown = dict(reversed(found) for found in COMMAND.findall((EXAMPLES / readme).read_text()))
    assert set(shown) == scripts
    for name, num_ranks in shown.items():
        assert f"phalanx run --nproc-per-node {num_ranks} examples/{name}" in (EXAMPLES / name).read_text()
