"""Constants: each has one definition, and so one value wherever it is read."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import phalanx

PACKAGE = Path(phalanx.__file__).parent


def constants_of(path: Path) -> Counter[str]:
    """Return how often a module gives each of its constants a value, at its top level."""
    targets: list[ast.expr] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets.append(node.target)
    return Counter(target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper())


def test_no_module_defines_a_constant_twice():
    counts = {path: constants_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    twice = [f"{path.relative_to(PACKAGE)}: {name}" for path in counts for name, n in counts[path].items() if n > 1]
    assert sum(map(len, counts.values())) > 500, "the constants were not found"
    assert not twice, "\n".join(twice)


def test_a_deadline_that_is_defined_again_is_an_error_for_mypy():
    loose = []
    for path in sorted(PACKAGE.rglob("*deadlines.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign):
                loose.append(f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}")
    assert not loose, "mark them Final:\n" + "\n".join(loose)
