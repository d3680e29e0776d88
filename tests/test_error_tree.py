"""The tree at the head of `phalanx._errors` shows every error that a user can meet, below the class that it extends."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import phalanx
from phalanx import _errors

PACKAGE = Path(phalanx.__file__).parent
LINE = re.compile(r"^( {4,})(\+ )?(\w+)(?: \(([\w, ]+)\))?  +(\S.*)$", re.MULTILINE)


def bases_by_tree() -> dict[str, tuple[str, ...]]:
    """Return the bases of each class as the tree shows them: the class above, then those in parentheses."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    assert _errors.__doc__
    for spaces, plus, name, others, _ in LINE.findall(_errors.__doc__):
        above = [(depth, parent) for depth, parent in above if depth < len(spaces)] if plus else []
        bases = (above[-1][1],) if above else ()
        found[name] = (*bases, *filter(None, others.split(", ")))
        above.append((len(spaces), name))
    return found


def bases_by_classes() -> dict[str, tuple[str, ...]]:
    """Return the bases of the classes in the sources that extend the roots of the tree, however far below."""
    defined = {
        node.name: tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {root: defined[root] for root in ("PhalanxError", "RankError", "ArgumentError")}
    while more := {name: bases for name, bases in defined.items() if name not in found and found.keys() & {*bases}}:
        found |= more
    return found


def test_the_tree_shows_each_error_below_the_class_that_it_extends() -> None:
    assert bases_by_tree() == bases_by_classes()


def test_the_tree_has_every_public_error() -> None:
    packages = ("", ".checkpoint", ".data", ".parallel", ".testing", ".train")
    modules = [importlib.import_module(f"phalanx{package}") for package in packages]
    things = {name: getattr(module, name) for module in modules for name in module.__all__}
    public = {name for name, thing in things.items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    assert {"PhalanxError", "RankFailed", "NonFinite"} <= public
    assert public <= bases_by_tree().keys()
