"""Times of the backend have one table."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx.backend
from phalanx.backend import deadlines

ROOM = Path(phalanx.backend.__file__).parent


def test_no_other_module_of_the_backend_defines_a_time():
    others = {
        f"{path.relative_to(ROOM)}: {target.id}"
        for path in ROOM.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name) and target.id.endswith("_S") and path != Path(deadlines.__file__)
    }
    assert others <= {"communicator.py: _GROUPS_OWN_S"}  # which is no time: it stands for the group's own
