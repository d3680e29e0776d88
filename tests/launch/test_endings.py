"""How a process ended is one type, whoever saw it and wherever it is told."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx

PACKAGE = Path(phalanx.__file__).parent
CODES = {"code", "exit_code", "exitcode", "returncode", "status", "signal"}


def fields(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def test_only_one_class_holds_a_process_and_how_it_ended():
    found = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "pid" in (names := fields(node)) and names & CODES
    }
    # The error carries what the message says, for whoever catches it.
    assert found == {"failure/ending.py: Ending", "_errors/__init__.py: RankFailed"}
