"""The benchmark of `phalanx top` measures a job with and without it, and gives its verdict."""

from __future__ import annotations

import re

import pytest

from tests.bench._run import run_bench

pytestmark = pytest.mark.slow


def test_a_short_run_measures_both():
    done = run_bench("bench.top", "--pairs", "2", "--turn", "1.5")
    assert done.returncode == 0, done.stderr
    printed = re.search(r"([\d.]+) steps/s without top, ([\d.]+) beside it", done.stdout)
    assert all(1 < float(speed) < 100_000 for speed in printed.groups())
    assert 0 < float(re.search(r"top's own CPU time: ([\d.]+)% of a CPU", done.stdout)[1]) < 50
    assert re.search(r"^(reached|missed) +top costs the job -?[\d.]+% \+- [\d.]+%", done.stdout, re.MULTILINE)
