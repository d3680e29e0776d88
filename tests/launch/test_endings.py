"""How a process ended is one type, whoever saw it and wherever it is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import phalanx

PACKAGE = Path(phalanx.__file__).parent
CODES = {"code", "exit_code", "exitcode", "returncode", "status", "signal"}


def fields(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def test_only_one_class_holds_a_process_and_how_it_ended():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, source in sources.items()
        if re.search(r"\bpid\s*:", source)  # to parse all of them takes seconds
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and "pid" in (names := fields(node)) and names & CODES
    }
    # The error carries what the message says, for whoever catches it. A loader's worker is no rank.
    of_ranks = {"failure/ending.py: Ending", "_errors/__init__.py: RankFailed"}
    assert found == of_ranks | {"data/workers/deaths.py: Death"}
