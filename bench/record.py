"""The record of a benchmark: one JSON format for all benchmarks, with the tables that the documentation shows.

A record says who measured what, when and where: the command, the date, the machine and the versions. Beside all samples
it holds tables of plain numbers, seconds and bytes; `tools/tables.py` turns these into pages and pictures.
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

KINDS = ("text", "count", "bytes", "seconds", "ratio", "fraction")  # ratio: "x faster"; fraction: a share or a multiple
Value = str | float | None
_OWN_FLAGS = ("--json", "--out", "--note")


@dataclass(frozen=True)
class Table:
    """Named columns, each with a kind of `KINDS`, and rows of values in the kind's unit.

    A value is None where nothing was measured.
    """

    name: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Value]]

    def __post_init__(self) -> None:
        assert all(kind in KINDS for _, kind in self.columns)
        assert all(len(row) == len(self.columns) for row in self.rows)


def add_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--json`` and ``--note``; a record that is always written lies in the folder of ``--out`` as `default`."""
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
    """Write a record, if a file was asked for.

    Args:
        path: File, or None.
        note: Remark for readers.
        facts: Machine and versions, as `bench.report.machine_facts` finds them.
        tables: Tables for the documentation.
        raw: All samples and verdicts, in the benchmark's own form; its keys are added to those of the record.
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
