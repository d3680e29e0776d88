"""Prints a diagnosis: lines for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import phalanx
from phalanx._text import broken, columns, counted, named
from phalanx.doctor.examination import Diagnosis
from phalanx.doctor.finding import LEVELS, Finding

FORMAT_VERSION = 1


def exit_code(diagnosis: Diagnosis) -> int:
    """Return 1 if any host has a problem, otherwise 0."""
    return int(diagnosis.level == "problem")


def as_json(diagnosis: Diagnosis) -> str:
    """Return the whole diagnosis as JSON: the hosts, every finding with its facts, and the worst level."""
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
    """Print one line per finding, with advice below it, and a summary."""
    role = diagnosis.role
    if diagnosis.is_told_by_first:
        print(f"phalanx doctor: host {role.node_rank} is done; host 0 ({role.master_addr}) prints its findings")
        return
    rows = merged(diagnosis.findings)
    _print_lines(rows, role.num_hosts > 1)
    print(f"phalanx doctor: {summary(diagnosis)}")


def merged(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Return the findings, each with its hosts; equal findings of several hosts become one.

    Findings of level ok are merged by topic: only the first host's finding is returned; the JSON contains all of them.
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
        alike = "" if len({finding.found for finding in group}) == 1 else f" (host {hosts[0]}; the others are similar)"
        first = group[0]
        rows.append(
            (Finding(**{**first.as_dict(), "found": first.found + alike}), named("host", hosts) if hosts else "job")
        )
    return rows


def summary(diagnosis: Diagnosis) -> str:
    """Return the last line: the number of findings at each level, and the exit code."""
    counts = [sum(finding.level == level for finding in diagnosis.findings) for level in LEVELS]
    bad = [counted(number, level) for level, number in zip(LEVELS, counts, strict=True) if number and level != "ok"]
    hosts = counted(len(diagnosis.hosts), "host")
    said = ", ".join(reversed(bad)) or "all is well"
    return f"{hosts}, {said}; {diagnosis.seconds:.1f} s; exit code {exit_code(diagnosis)}"


def _print_lines(rows: Sequence[tuple[Finding, str]], has_hosts: bool) -> None:
    cells = [[finding.level, *[hosts] * has_hosts, finding.topic] for finding, hosts in rows]
    heads = columns([[*row, "|"] for row in cells])  # without the "|", columns() would strip the last column's padding
    for (finding, _), head in zip(rows, heads, strict=True):
        indent = len(head) - 1
        lines = [f"{head[:-1]}{finding.found}"]
        if finding.todo and finding.level != "ok":
            lines.append(f"{' ' * indent}to do: {finding.todo}")
        print("\n".join(broken(lines, hang=indent)))
