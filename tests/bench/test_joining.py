"""The benchmark of joining measures both backends; what it measures is not judged here."""

from __future__ import annotations

import re

from tests.bench._run import run_bench


def test_each_number_of_ranks_joins_a_world_and_groups_on_both_backends():
    done = run_bench("bench.joining", "--ranks", "1,2", "--groups", 2, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    times = r"phalanx \d+\.\d{3} s, Gloo \d+\.\d{3} s, ratio \d+\.\d\d"
    for line, what in zip(
        done.stdout.splitlines(),
        ["1 ranks join the world", "1 ranks join 2 groups", "2 ranks join the world", "2 ranks join 2 groups"],
        strict=True,
    ):
        assert re.fullmatch(f"{what}: {times}", line)
