"""The benchmark of the Trainer measures both loops and gives its verdict."""

from __future__ import annotations

import re

from tests.bench._run import run_bench


def test_a_short_run_measures_both_loops():
    done = run_bench("bench.trainer", "--steps", "60")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    by_hand, ours = map(float, re.search(r"by hand ([\d.]+) ms, Trainer ([\d.]+) ms a step", printed).groups())
    assert 0 < by_hand < 1000
    assert 0 < ours < 1000
    assert re.search(r"^(reached|missed): the Trainer adds -?[\d.]+ \+- [\d.]+ ms to a step", printed, re.MULTILINE)
