"""``python -m bench.shared_data`` measures; what it measures is not judged here."""

from __future__ import annotations

import re

from tests.bench._run import run_bench


def test_both_ways_are_measured():
    done = run_bench(
        "bench.shared_data",
        "--ranks",
        "2",
        "--workers",
        "1",
        "--mib",
        "8",
        "--records",
        "2000",
        "--images",
        "64",
        "--rounds",
        "1",
    )
    assert done.returncode == 0, done.stderr
    *lines, images = done.stdout.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["tensors", "records"]
    for line in lines:
        assert re.search(r"2 ranks x 1 workers, .* shared [\d.-]+ copies, built in .* usual [\d.-]+ copies", line)
    assert re.search(r"^images, 2 ranks x 1 workers, .* with a cache \d+ samples/s .* without \d+ samples/s$", images)
