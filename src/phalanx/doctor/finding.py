"""The result of one test: what was found, how bad it is, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

LEVELS = ("ok", "note", "warning", "problem")
"""Severities: a `note` is worth knowing, a `warning` costs speed or breaks some jobs, a `problem` stops a job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: Subject of the test, such as ``memory``, ``network`` or ``all_reduce``.
        level: Severity, one of `LEVELS`.
        found: Result of the test, in one line.
        todo: Advice; empty if nothing is to be done.
        facts: Measured numbers for other programs, by name; the name ends in the unit.
        host: Node rank of the host that the finding is about; None if it is about several hosts.
    """

    topic: str
    level: str
    found: str
    todo: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host: int | None = None

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def ok(topic: str, found: str, **facts: Any) -> Finding:
    return Finding(topic=topic, level="ok", found=found, facts=facts)


def note(topic: str, found: str, todo: str = "", **facts: Any) -> Finding:
    return Finding(topic=topic, level="note", found=found, todo=todo, facts=facts)


def warning(topic: str, found: str, todo: str, **facts: Any) -> Finding:
    return Finding(topic=topic, level="warning", found=found, todo=todo, facts=facts)


def problem(topic: str, found: str, todo: str, **facts: Any) -> Finding:
    return Finding(topic=topic, level="problem", found=found, todo=todo, facts=facts)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level of the findings, ``ok`` if there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
