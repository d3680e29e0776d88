"""``python -m bench.black_box`` measures each kind with and without recording."""

from __future__ import annotations

import json
import re

from tests.bench._run import run_bench

KINDS = ["event in the core", "event from Python", "all_reduce of 4 elements", "step of the MLP 784-1024-10"]


def test_each_kind_is_measured_with_and_without_recording(tmp_path):
    done = run_bench("bench.black_box", "--turns", "2", "--json", tmp_path / "box.json")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\S.+?) +([\d.]+) us, recorded +([\d.]+) us: +(-?\d+) ns more$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == KINDS
    assert 0 < float(rows[0][2]) < 100  # of an event in the core, which is next to nothing without a recorder
    assert float(rows[0][1]) < float(rows[0][2])
    assert len(re.findall(r"^(?:reached|missed): ", done.stdout, re.MULTILINE)) == 2
    (table,) = json.loads((tmp_path / "box.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == KINDS
