"""A diagnosis for people, on a terminal or in a log, and as JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import phalanx
from phalanx._text import counted, named
from phalanx.doctor.examination import Diagnosis
from phalanx.doctor.finding import LEVELS, Finding

FORMAT_VERSION = 1
_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def exit_code(diagnosis: Diagnosis) -> int:
    """Return 1 if there is a problem on any host."""
    return int(diagnosis.level == "problem")


def as_json(diagnosis: Diagnosis) -> str:
    """Return everything: who was examined, every finding with its facts, the worst level."""
    told: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "phalanx": phalanx.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(diagnosis.seconds, 3),
        "host": diagnosis.role.node_rank,
        "num_hosts": diagnosis.role.num_hosts,
        "hosts": [{key: host[key] for key in ("host", "name", "address", "interface")} for host in diagnosis.hosts],
        "findings": [finding.as_dict() for finding in diagnosis.findings],
        "level": diagnosis.level,
        "exit_code": exit_code(diagnosis),
    }
    return json.dumps(told, indent=2)


def print_report(diagnosis: Diagnosis) -> None:
    """Print the findings as a table where somebody looks on, as lines for logs and other programs."""
    role = diagnosis.role
    if diagnosis.is_told_by_first:
        print(f"phalanx doctor: host {role.node_rank} is examined; host 0 ({role.master_addr}) prints what was found")
        return
    rows = merged(diagnosis.findings)
    has_hosts = role.num_hosts > 1
    if not (sys.stdout.isatty() and _print_table(rows, has_hosts)):
        _print_lines(rows, has_hosts)
    print(f"phalanx doctor: {summary(diagnosis)}")


def merged(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Return findings with the hosts that they are about, the alike of several hosts in one.

    Those that are ok count as alike if they are about the same thing: the first host's stands for all, whose numbers
    are in the JSON.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    seen: dict[tuple[int | None, str], int] = {}
    for finding in findings:
        role = seen[finding.host, finding.topic] = seen.get((finding.host, finding.topic), -1) + 1
        is_alike = finding.level == "ok" and finding.host is not None
        key = (
            ("ok", finding.topic, str(role))
            if is_alike
            else (finding.level, finding.topic, finding.found, finding.todo)
        )
        groups.setdefault((*key, str(finding.host is None)), []).append(finding)
    rows = []
    for group in groups.values():
        hosts = [finding.host for finding in group if finding.host is not None]
        alike = "" if len({finding.found for finding in group}) == 1 else f" (host {hosts[0]}; the others alike)"
        first = group[0]
        rows.append(
            (Finding(**{**first.as_dict(), "found": first.found + alike}), named("host", hosts) if hosts else "job")
        )
    return rows


def summary(diagnosis: Diagnosis) -> str:
    """Return the last line: how many of each level, and the exit code."""
    counts = [sum(finding.level == level for finding in diagnosis.findings) for level in LEVELS]
    bad = [counted(number, level) for level, number in zip(LEVELS, counts, strict=True) if number and level != "ok"]
    hosts = counted(len(diagnosis.hosts), "host")
    said = ", ".join(reversed(bad)) or "all is well"
    return f"{hosts}, {said}; {diagnosis.seconds:.1f} s; exit code {exit_code(diagnosis)}"


def _print_lines(rows: Sequence[tuple[Finding, str]], has_hosts: bool) -> None:
    cells = [
        [finding.level, hosts, finding.topic] if has_hosts else [finding.level, finding.topic]
        for finding, hosts in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    indent = " " * (sum(widths) + 2 * len(widths))
    for (finding, _), row in zip(rows, cells, strict=True):
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), finding.found]))
        if finding.todo and finding.level != "ok":
            print(f"{indent}to do: {finding.todo}")


def _print_table(rows: Sequence[tuple[Finding, str]], has_hosts: bool) -> bool:
    """Print with rich; return False if it is not installed."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    table = Table("", *["hosts"] * has_hosts, "what", "found")
    for finding, hosts in rows:
        style = _STYLES[finding.level]
        todo = f"\n[{style}]to do:[/] {escape(finding.todo)}" if finding.todo and finding.level != "ok" else ""
        cells = [f"[{style}]{finding.level}[/]", *[hosts] * has_hosts, finding.topic, escape(finding.found) + todo]
        table.add_row(*cells)
    Console(highlight=False).print(table)
    return True
