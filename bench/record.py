"""The record of a benchmark: one JSON format for all benchmarks, with the tables that the documentation shows.

A record contains the command, the date, the machine and the versions of the software. Besides all samples, it contains
tables of plain numbers, seconds and bytes, which `tools/tables.py` turns into pages and pictures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

# a ratio is shown as "x faster", a fraction as a share or a multiple
KINDS = ("text", "count", "bytes", "seconds", "ratio", "fraction")
Value = str | float | None
_OWN_FLAGS = ("--json", "--out", "--note")


@dataclass(frozen=True)
class Table:
    """Columns, each with a name and one of `KINDS`, and rows of values in the unit of the column's kind.

    A value is None if it was not measured.
    """

    name: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Value]]

    def __post_init__(self) -> None:
        assert all(kind in KINDS for _, kind in self.columns)
        assert all(len(row) == len(self.columns) for row in self.rows)


def add_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--json`` and ``--note``. With `default`, the default of ``--json`` is a file of this name in ``--out``."""
    where = "" if default is None else f" (default: {default} in the folder of --out)"
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"file for the record{where}")
    parser.add_argument("--note", default="", metavar="TEXT", help="remark for the record's readers, as 'a short run'")


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats the measurement, without the flags for the record's file and remark."""
    kept, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in _OWN_FLAGS:
            rest[:1] = []
        elif not argument.startswith(tuple(f"{flag}=" for flag in _OWN_FLAGS)):
            kept.append(argument)
    return shlex.join(["python", "-m", module.removesuffix(".__main__"), *kept])


def write(
    path: Path | None, note: str, facts: Mapping[str, object], tables: Sequence[Table], raw: Mapping[str, object]
) -> None:
    """Write a record, if there is a path.

    Args:
        path: File to write, or None.
        note: Remark for readers.
        facts: Facts about the machine and the versions, as `bench.report.machine_facts` returns them.
        tables: Tables for the documentation.
        raw: All samples and verdicts, in the benchmark's own form; the keys of `raw` are added to the record.
    """
    if path is None:
        return
    record = {
        "command": command_line(sys.modules["__main__"].__spec__.name, sys.argv[1:]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "note": note,
        "machine": dict(facts),
        "tables": [asdict(table) for table in tables],
        **raw,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
