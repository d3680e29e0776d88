"""No page is behind its record, and a record of a benchmark becomes a table with its command, date and machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from bench import record
from tests.docs.blocks import REPOSITORY
from tools import tables


def test_every_page_shows_what_its_records_say():
    done = subprocess.run(
        [sys.executable, "tools/tables.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_place_asks_for_a_view_that_there_is():
    wanted = {name for page in tables.pages() for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())}
    assert wanted <= {"summary", *tables.SENTENCES, *tables.VIEWS}
    assert {view.record for view in tables.VIEWS.values()} <= {path.stem for path in tables.RECORDS.glob("*.json")}


@pytest.mark.parametrize("path", sorted(tables.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_how_it_was_made(path):
    found = json.loads(path.read_text())
    assert found["command"].startswith("python -m bench")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert found["machine"]["torch"]
    for table in found["tables"]:
        record.Table(**table)  # checks kinds and lengths


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("seconds", 6.96e-6, "6.96 µs"),
        ("seconds", 0.00331, "3.31 ms"),
        ("seconds", 1.54, "1.54 s"),
        ("bytes", 4, "4 B"),
        ("bytes", 262_144, "256 KiB"),
        ("ratio", 146.3, "146x"),
        ("fraction", 1.1, "1.10"),
    ],
)
def test_a_value_is_shown_in_its_unit(kind, value, shown):
    assert tables.FORMATS[kind](value).replace("\N{NO-BREAK SPACE}", " ") == shown


def test_a_record_written_by_a_benchmark_becomes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    table = record.Table(
        "launch", [("what", "text"), ("median", "seconds")], [["phalanx run", 1.5], ["torchrun", None]]
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "bench.launch"}))
    monkeypatch.setattr(
        sys, "argv", ["launch.py", "--rounds", "3", "--note", "A short run on a busy machine.", "--json=x"]
    )
    facts = {"usable_cpus": 2, "torch": "2.15.0", "cpu": "A processor"}
    record.write(tmp_path / "launch.json", "A short run on a busy machine.", facts, [table], {})
    english, chinese = (
        tables.render("launch", language).replace("\N{NO-BREAK SPACE}", " ") for language in ("en", "zh")
    )
    assert "| phalanx run | 1.5 s |\n| torchrun |  |" in english
    assert "`python -m bench.launch --rounds 3`" in english
    assert english.endswith("2 CPUs (A processor), torch 2.15.0. A short run on a busy machine.")
    assert "by hand" not in english
    assert "2 个 CPU" in chinese
