"""Write the measured numbers into the pages: ``python tools/tables.py`` fills every place that asks for a table.

A place is a pair of comments, ``<!-- table: VIEW -->`` and ``<!-- end of table -->``, in a page of docs/ or a README.
The text between them is replaced by the view of a record in docs/numbers, so no number is typed by hand. ``--check``
writes nothing and fails if a page is older than its record. The benchmarks write the records, with ``--json
docs/numbers/NAME.json``; `tables.json` translates the words in the records for each language.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RECORDS = REPOSITORY / "docs" / "numbers"
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_BLANK = "\N{NO-BREAK SPACE}"
_STEP_COLUMNS = ("1: python", "2: torchrun, torch DDP on Gloo", "2: torchrun, phalanx DDP on phalanx")

WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""How the headings, names and notes of records are shown, by language; text that is missing here is shown as it is."""


@dataclass(frozen=True)
class View:
    """Part of a table of a record: rows in which `where` holds and the size is one of `sizes`, and some `columns`.

    An empty field selects everything. The column "Gloo ratio" is the one that follows the column "Gloo".
    """

    record: str
    columns: Sequence[str] = ()
    where: tuple[str, object] | None = None
    table: int = 0
    sizes: Sequence[int] = ()


VIEWS = {
    "all_reduce": View(
        "collectives",
        ("ranks", "size", "phalanx", "Gloo", "Gloo ratio", "Open MPI", "Open MPI ratio"),
        ("operation", "all_reduce"),
    ),
    "collectives": View(
        "collectives",
        ("operation", "ranks", "size", "phalanx", "Gloo", "Gloo ratio", "Open MPI", "Open MPI ratio"),
        sizes=(0, 4, 2**18, 2**20, 2**24, 2**28),
    ),
    "calls": View("calls", ("operation", "ranks", "size", "phalanx", "torch's front end", "direct way", "Open MPI")),
    "hosts_10gbit": View("hosts_10gbit", ("size", "phalanx", "ratio")),
    "hosts_1gbit": View("hosts_1gbit", ("size", "phalanx", "ratio")),
    "recovery": View("recovery"),
    "replicas": View("replicas"),
    "launch": View("launch"),
    "testing": View("testing"),
    "step": View("step", ("model", *_STEP_COLUMNS)),
    "step_memory": View("step", table=1),
    "ddp": View("ddp"),
    "ddp_memory": View("ddp", table=1),
    "imports": View("imports"),
}


_AT_1_MIB = {"operation": "all_reduce", "ranks": 2, "size": 2**20}
SENTENCES: dict[str, tuple[str, Sequence[tuple[dict[str, object], str]]]] = {
    "fact_collectives": ("collectives", [(_AT_1_MIB, "phalanx"), (_AT_1_MIB, "Gloo")]),
    "fact_restart": ("launch", [({"what": "death to next all_reduce"}, "median")]),
    "fact_report": ("launch", [({"what": "death to end of command"}, "median")]),
}
"""Sentences of `tables.json`, each with its record and the cells that the sentence quotes, all in seconds."""


def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g}{_BLANK}{unit}"
    return f"{num_bytes:g}{_BLANK}B"


def _seconds(value: float) -> str:
    unit, factor = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)
    return f"{_three_digits(value * factor)}{_BLANK}{unit}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda value: f"{value:,.0f}",
    "bytes": _size,
    "seconds": _seconds,
    "ratio": lambda value: f"{_three_digits(value)}x",
    "fraction": lambda value: f"{value:.2f}",
}


def _shown(text: str, language: str) -> str:
    return WORDS[language].get(text, text)


def _place_of(names: Sequence[str], wanted: str) -> int:
    if wanted not in names and wanted.endswith(" ratio"):
        return names.index(wanted.removesuffix(" ratio")) + 1
    return names.index(wanted)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], is_text: Sequence[bool]) -> list[str]:
    rule = ["---" if text else "---:" for text in is_text]
    return [f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows)]


def facts(record: dict[str, Any], language: str) -> str:
    """Return the line under a table: command, date, machine, versions, and the record's note."""
    machine, note = record["machine"], record["note"]
    if language == "zh" and note and note not in WORDS["zh"]:
        raise SystemExit(f"tools/tables.json has no Chinese for this note: {note}")
    cpus = _shown("{} CPUs", language).format(machine["usable_cpus"])
    if machine.get("cpu"):
        cpus += _shown(" ({})", language).format(machine["cpu"])
    template = "`{command}`, {date}, {cpus}, {software}. {note}"
    return (
        _shown(template, language)
        .format(
            command=record["command"],
            date=record["date"],
            cpus=cpus,
            software=f"torch {machine['torch']}" + (f", {machine['mpi']}" if machine.get("mpi") else ""),
            note=_shown(note, language),
        )
        .rstrip()
    )


def render(name: str, language: str) -> str:
    """Return the Markdown of a view: the table, and the line that says how it was measured."""
    if name == "summary":
        return "\n".join(summary(language))
    if name in SENTENCES:
        return _sentence(name, language)
    view = VIEWS[name]
    record = load(view.record)
    table = record["tables"][view.table]
    names, kinds = zip(*table["columns"], strict=True)
    rows = table["rows"]
    if view.where is not None:
        rows = [row for row in rows if row[names.index(view.where[0])] == view.where[1]]
    if view.sizes:
        rows = [row for row in rows if row[names.index("size")] in view.sizes]
    places = [_place_of(names, wanted) for wanted in view.columns] or range(len(names))
    cells = [["" if row[i] is None else _shown(FORMATS[kinds[i]](row[i]), language) for i in places] for row in rows]
    heading = [_shown(names[i], language) for i in places]
    lines = markdown_table(heading, cells, [kinds[i] == "text" for i in places])
    return "\n".join([*lines, "", facts(record, language)])


def _value(record: str, row: dict[str, object], column: str) -> float:
    """Return the number in `column` of the one row in which all of `row` holds."""
    table = load(record)["tables"][0]
    names = [name for name, _ in table["columns"]]
    found = [r for r in table["rows"] if all(r[names.index(name)] == value for name, value in row.items())]
    assert len(found) == 1, f"{record}: {len(found)} rows with {row}"
    value: float = found[0][_place_of(names, column)]
    return value


def _sentence(name: str, language: str) -> str:
    record, cells = SENTENCES[name]
    times = [_seconds(_value(record, row, column)) for row, column in cells]
    return WORDS[language][name].format(*times, command=f"`{load(record)['command']}`")


def summary(language: str) -> list[str]:
    """Return the one table of the README: a few numbers of several records."""
    rows = []
    for size_bytes in (4, 2**20, 16 * 2**20):
        where = {"operation": "all_reduce", "ranks": 2, "size": size_bytes}
        ours, gloo, ratio = (_value("collectives", where, column) for column in ("phalanx", "Gloo", "Gloo ratio"))
        rows.append([f"all_reduce, {_size(size_bytes)}", _seconds(ours), f"Gloo: {_seconds(gloo)}", f"{ratio:.3g}x"])
    ours, theirs = (_value("launch", {"what": what}, "median") for what in ("phalanx run", "torchrun"))
    start = _shown("start and end of a job", language)
    rows.append([start, _seconds(ours), f"torchrun: {_seconds(theirs)}", f"{theirs / ours:.3g}x"])
    restart = _value("launch", {"what": "death to next all_reduce"}, "median")
    rows.append([_shown("rank's death to next all_reduce", language), _seconds(restart), "", ""])
    for model in ("MLP of 17 M", "small GPT"):
        ratio = _value("step", {"model": model}, _STEP_COLUMNS[1])
        step = _shown("training step, {}", language).format(_shown(model, language))
        rows.append([step, "", "torchrun + DDP + Gloo", f"{ratio:.2f}x"])
    heading = [_shown(name, language) for name in ("on two ranks", "phalanx", "elsewhere", "ratio")]
    return markdown_table(heading, rows, [True, False, False, False])


def pages() -> list[Path]:
    return [*REPOSITORY.glob("README*.md"), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def filled(page: Path) -> str:
    """Return the page's text with every table filled from its record."""
    text = page.read_text(encoding="utf-8")
    is_chinese = "zh" in page.relative_to(REPOSITORY).parts or ".zh" in page.name
    language = "zh" if is_chinese else "en"
    return _PLACE.sub(lambda place: f"{place[1]}{render(place[2], language)}\n{place[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is behind its record")
    given = parser.parse_args()
    stale = [page for page in pages() if filled(page) != page.read_text(encoding="utf-8")]
    if given.check:
        names = ", ".join(str(page.relative_to(REPOSITORY)) for page in stale)
        sys.exit(f"behind docs/numbers: {names}; run tools/tables.py" if stale else 0)
    for page in stale:
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
