"""The benchmark of the stragglers' rule judges recorded times, as they were and with one rank slower."""

from __future__ import annotations

import random
import re

import pytest

from bench.stragglers import judge
from tests.bench._run import run_bench


def test_on_steady_cores_only_the_slower_rank_is_named():
    rng = random.Random(1)
    times = [(rng.gauss(1, 0.01), rng.gauss(1, 0.01)) for _ in range(500)]
    number, named, found, spread = judge(times, 50)
    assert (number, named, found) == (19, 0, 1)
    assert spread == pytest.approx(0.01 * (2 / 50) ** 0.5, rel=0.5)


def test_a_short_run_judges_its_stretches():
    done = run_bench("bench.stragglers", "--steps", "110", "--batch", "64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^   50 steps,    3 stretches: one named in .* in .*; the cores' difference", done.stdout, re.M)
    assert re.search(r"^  100 steps,    1 stretches: ", done.stdout, re.M)
