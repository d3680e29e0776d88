"""``python -m bench.interface`` measures every row; what it measures is not judged here."""

from __future__ import annotations

import json

from bench.interface import ROWS
from tests.bench._run import run_bench


def test_every_row_is_measured(tmp_path):
    path = tmp_path / "interface.json"
    done = run_bench("bench.interface", "--turns", "2", "--json", path)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    assert len(table["rows"]) == len(done.stdout.splitlines()) == len(ROWS)
    assert all(row[1] > 0 and row[3] > 0 for row in table["rows"])


def test_an_unknown_row_is_named():
    done = run_bench("bench.interface", "--only", "extend,nothing")
    assert done.returncode == 2
    assert "got nothing" in done.stderr
