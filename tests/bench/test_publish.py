"""``python -m bench.publish`` measures; what it measures is not judged here."""

from __future__ import annotations

import json

from tests.bench._run import run_bench


def test_publishing_and_reading_are_measured(tmp_path):
    path = tmp_path / "publish.json"
    only = ("--only", "copied,in-place,mapped,read")
    done = run_bench("bench.publish", "--turns", "2", "--mib", "1", *only, "--json", path)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    assert len(table["rows"]) == len(done.stdout.splitlines()) == 4
    assert all(row[1] > 0 and row[3] > 0 for row in table["rows"])


def test_an_unknown_row_is_named():
    done = run_bench("bench.publish", "--only", "copied,nothing")
    assert done.returncode == 2
    assert "got nothing" in done.stderr
