"""The benchmark of data parallel training runs and writes what it promises; what it measures is not judged here."""

from __future__ import annotations

import json

from bench.ddp import CASES, EPOCHS, _ratio
from tests.bench._run import PNG, run_bench


def test_a_short_run_writes_json_a_plot_and_a_verdict_on_every_target(tmp_path):
    done = run_bench("bench.ddp", "--rounds", 1, "--only", "MNIST CNN", "--images", 300, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ddp.json").read_text())
    samples = record["steps"]["MNIST CNN"]
    assert {"no communication", "torch DDP on Gloo"} | CASES["MNIST CNN"].most.keys() <= samples.keys()
    epochs = [times for of_name in record["epochs"].values() for times in of_name.values()]
    assert all(len(times) == 1 and times[0] > 0 for times in [*samples.values(), *epochs])
    assert len(record["verdicts"]) == len(CASES["MNIST CNN"].most) + len(EPOCHS)
    assert record["memory_mib"]["sharded"] < record["memory_mib"]["plain"]
    assert (tmp_path / "ddp.png").read_bytes().startswith(PNG)
    assert "torch DDP on Gloo" in done.stdout


def test_an_unknown_case_is_refused_by_name():
    done = run_bench("bench.ddp", "--only", "MNIST CNN,MLP of 18 M")
    assert done.returncode == 2
    assert "got MLP of 18 M" in done.stderr


def test_a_ratio_is_the_median_over_rounds():
    assert _ratio({"a": [2.0, 9.0, 30.0], "b": [1.0, 3.0, 15.0]}, "a", "b") == 2.0
