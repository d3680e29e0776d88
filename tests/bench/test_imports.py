"""``python -m bench.imports`` measures both kinds; what it measures is not judged here."""

from __future__ import annotations

import re

from tests.bench._run import run_bench


def test_both_kinds_are_measured():
    done = run_bench("bench.imports", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.+?) +(\d+\.\d\d) ms \(\d+\.\d\d to \d+\.\d\d\)$", done.stdout, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["installed", "in the place of Gloo"]
    assert all(float(median) > 0 for _, median in rows)
