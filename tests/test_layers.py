"""The floors of docs/design.md: a unit imports only from floors strictly below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent
FLOORS = {
    "__init__": 0,
    "_cgroups": 0,
    "_core": 0,
    "_env": 0,
    "_launched": 0,
    "_errors": 0,
    "_files": 0,
    "_network": 0,
    "_plugin": 0,
    "_snapshots": 0,
    "_sockets": 0,
    "_last_words": 1,
    "_tensors": 1,
    "backend": 2,
    "checkpoint": 2,
    "data": 2,
    "launch": 2,
    "_loop": 2,
    "rendezvous": 2,
    "doctor": 3,
    "parallel": 3,
    "session": 3,
    "testing": 3,
    "train": 4,
    "cli": 5,
    "__main__": 6,
}
# A lazy import by name, which must stay lazy: the entry point is light.
ALLOWED = {("_plugin", "backend"), ("_plugin", "rendezvous"), ("_plugin", "session")}


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(path: Path) -> set[str]:
    """Return the units of phalanx that a file imports anywhere, lazily or for type checking too."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] if node.module != "phalanx" else [f"phalanx.{alias.name}" for alias in node.names]
        units |= {unit_of(module) for module in modules if module.split(".")[0] == "phalanx"}
    return units


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_unit_imports_only_from_floors_below(path: Path) -> None:
    unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert unit in FLOORS, f"give {unit} a floor here and in docs/design.md"
    for imported in imports_of(path) - {unit, "__init__"}:
        assert FLOORS[imported] < FLOORS[unit] or (unit, imported) in ALLOWED, f"{path.name} imports {imported}"


def test_only_the_backend_and_the_checkpoints_import_the_core() -> None:
    users = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if "_core" in imports_of(path)}
    assert users == {"backend", "checkpoint"}


def test_every_exported_name_can_be_loaded() -> None:
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None
