"""The benchmark of steps runs every launcher and writes what it promises; what it measures is not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from bench.step import Sample, speedup, verdicts
from tests.bench._run import run_bench


def test_a_short_run_measures_every_launcher_with_one_rank_and_two(tmp_path):
    done = run_bench("bench.step", "--only", "digits CNN", "--rounds", 1, "--scale", 0.02, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "step.json").read_text())
    assert {name: len(variants) for name, variants in record["samples"].items()} == {
        "digits CNN, 1": 3,
        "digits CNN, 2": 3,
    }
    for variants in record["samples"].values():
        for (sample,) in variants.values():
            assert 0 < sample["step_s"] < 10
            assert 50 < sample["peak_mib"] < 10_000
    assert "torchrun, torch DDP on Gloo" in done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_other_libraries_for_malloc_take_turns_too_under_plain_python(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "libother_alloc.so"
    source.write_text("void phalanx_test_does_nothing(void) {}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    options = ("--only", "digits CNN", "--rounds", 1, "--scale", 0.02, "--ranks", 1, "--allocators", library)
    done = run_bench("bench.step", *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "step.json").read_text())
    assert list(record["samples"]["digits CNN, 1"]) == [
        "python, libother_alloc.so",
        "python",
        "torchrun",
        "phalanx run",
    ]
    assert not any("libother" in text for _, text in record["verdicts"])


def test_a_library_that_is_not_there_is_refused_by_name():
    done = run_bench("bench.step", "--allocators", "/no/library.so")
    assert done.returncode == 2
    assert "there is no file '/no/library.so'" in done.stderr


def test_an_unknown_model_is_refused_by_name():
    done = run_bench("bench.step", "--only", "digits CNN,MLP of 18 M")
    assert done.returncode == 2
    assert "got MLP of 18 M" in done.stderr


def test_a_speedup_is_the_median_over_rounds():
    samples = {"python": [Sample(s, 100) for s in (2, 9, 30)], "phalanx run": [Sample(s, 100) for s in (1, 3, 15)]}
    assert speedup(samples, "python") == 2


def test_targets_of_time_and_memory_are_judged():
    samples = {
        "python": [Sample(1.4, 100)], "torchrun": [Sample(1.2, 100)], "phalanx run": [Sample(1.0, 116)],
    }  # fmt: skip
    assert [reached for reached, _ in verdicts("large CNN", 1, samples)] == [True, False, False]
    assert [reached for reached, _ in verdicts("digits CNN", 1, samples)] == [True, True, False]
