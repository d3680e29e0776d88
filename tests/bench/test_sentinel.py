"""The benchmark of the sentinel measures steps with and without it and gives its verdict."""

from __future__ import annotations

import re

from tests.bench._run import run_bench


def test_a_short_run_measures_both_ways():
    done = run_bench("bench.sentinel", "--rounds", "3", "--only", "MLP 784-1024-10")
    assert done.returncode == 0, done.stderr
    for optimizer in ("SGD", "AdamW"):
        found = re.search(rf"^(reached|missed): MLP 784-1024-10, {optimizer}: (.*)$", done.stdout, re.MULTILINE)
        alone, compared, ratio = map(float, re.findall(r"([\d.]+) (?:ms a step|ms compared|\+-)", found[2]))
        assert 0.1 < ratio < 10
        assert 0 < alone < 10_000
        assert 0 < compared < 10_000
