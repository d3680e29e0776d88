"""``python -m bench.data`` measures; what it measures is not judged here."""

from __future__ import annotations

import json

from tests.bench._run import run_bench


def test_both_loaders_are_measured(tmp_path):
    path = tmp_path / "data.json"
    few = ("--sizes", "1K,100K", "--turns", "2", "--seconds", "0.01", "--mib", "1")
    done = run_bench("bench.data", *few, "--json", path)
    assert done.returncode == 0, done.stderr
    records, copies = json.loads(path.read_text())["tables"]
    assert [row[0] for row in records["rows"]] == [1024, 102400]
    assert all(value > 0 for row in (*records["rows"], *copies["rows"]) for value in row)
