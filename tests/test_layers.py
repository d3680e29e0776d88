"""The rooms of docs/design.md: a unit imports only from floors strictly below its own."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent
REPO = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+) \| `(\w+)` \|", re.MULTILINE)
FLOORS = {room: int(floor) for floor, room in ROW.findall((REPO / "docs" / "design.md").read_text())}
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
MOST_FILES, MOST_NAMES = 16, 30  # of a folder; of the package's root, folders included


def unit_of(module: str) -> str:
    unit = module.split(".")[1] if "." in module else "__init__"
    return "__init__" if unit == "_on_first_use" else unit  # the one function in the package's `__init__`


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return what a file imports anywhere, lazily or for type checking too, and its looks into `os`.

    But not what the package's `__init__` shows to type checkers: it names what stands on every floor.
    """
    tree = ast.parse(path.read_text())
    if path == PACKAGE / "__init__.py":
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os")
    ]


def imports_of(path: Path) -> set[str]:
    """Return the units of phalanx that a file imports."""
    units = set()
    for node in nodes_of(path):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] if node.module != "phalanx" else [f"phalanx.{alias.name}" for alias in node.names]
        units |= {unit_of(module) for module in modules if module.split(".")[0] == "phalanx"}
    return units


def test_the_table_has_each_room() -> None:
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert {*FLOORS} == names | {"_core"}
    assert len({*names, "_core.pyi", "py.typed"}) <= MOST_NAMES


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_room_is_small_and_says_where_to_begin_and_what_is_not_in_it(room: Path) -> None:
    files = [path for path in room.iterdir() if path.is_file()]
    assert room == PACKAGE or len(files) <= MOST_FILES
    docstring = " ".join((ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").split())
    first = re.search(r"[Ss]tart with `([\w.]+)`", docstring)
    assert first, "which file is to be read first?"
    assert (room / first[1].replace(".", "/")).with_suffix(".py").is_file()
    assert re.search(r"\b[Nn]othing here\b", docstring), "what must never be in it?"


def test_a_unit_imports_only_from_floors_below() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert unit in FLOORS, f"give {unit} a floor in docs/design.md"
        for imported in imports_of(path) - {unit, "__init__"}:
            assert FLOORS[imported] < FLOORS[unit], f"{path} imports {imported}"


def modules_of(path: Path, modules: Collection[str]) -> set[str]:
    """Return those of the modules that a file imports anywhere."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even lazily. The package's `__init__` is left out: it imports on use alone."""
    paths = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    by_name = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    below = {name: modules_of(path, by_name.keys()) - {name, "phalanx"} for name, path in by_name.items()}
    while leaves := {name for name, imported in below.items() if not imported}:
        below = {name: imported - leaves for name, imported in below.items() if name not in leaves}
    assert not below, "these import each other, or one that does"


def test_few_units_import_the_core() -> None:
    users = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if "_core" in imports_of(path)}
    assert users == {"_torch", "backend", "checkpoint", "debugging", "host", "record"}


def test_the_core_uses_no_streams() -> None:
    """Where it holds a libstdc++ of its own, they would ask torch's for facets by numbers that mean others there."""
    sources = [
        path
        for pattern in ("*.cpp", "*.h")
        for path in (REPO / "csrc").glob(f"*/{pattern}")
        if path.parent.name != "tests"
    ]
    assert len(sources) > 40
    streams = {"fstream", "iomanip", "iostream", "istream", "locale", "ostream", "regex", "sstream", "streambuf"}
    included = {name for path in sources for name in re.findall(r"#include <(\w+)>", path.read_text())}
    assert included & {"string", "vector"}
    assert not included & streams


def test_the_environment_is_read_in_one_place() -> None:
    """Apart from the hook that runs before phalanx can be imported."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    readers = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert readers == {"_env.py", "sitecustomize.py"}


# Imports every module but programs; prints what that has done to the process, and which fork hooks it has left.
IMPORT_ALL = """
import atexit, importlib, json, os, signal, sys, threading, warnings
import torch, torch.distributed as dist, torch.distributed.elastic.agent.server.api, torch.utils.data
import torch.distributed.elastic.rendezvous.registry, torch.distributed.algorithms.join
from torch.distributed import distributed_c10d as c10d

hooks = {"fork": []}
def record(kind, owner, name):
    real = getattr(owner, name)
    def recorded(*args, **named):
        for function in (*args, *named.values()):
            if str(getattr(function, "__module__", "")).startswith("phalanx"):
                hooks.setdefault(kind, []).append(f"{function.__module__}.{function.__qualname__}")
        return real(*args, **named)
    setattr(owner, name, recorded)
record("exit", atexit, "register")
record("fork", os, "register_at_fork")
record("signal", signal, "signal")

def look():
    return {
        "environment": dict(os.environ), "path": list(sys.path), "filters": list(warnings.filters),
        "threads": [thread.name for thread in threading.enumerate()], "signals": signal.pthread_sigmask(0, []),
        "descriptors": sorted(os.listdir("/proc/self/fd")), "finders": list(sys.meta_path),
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook],
    }
before, torchs = look(), [(module, dict(vars(module))) for module in (torch, dist, c10d)]
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = look()
hooks["changed"] = [kind for kind in before if before[kind] != after[kind]]
hooks["torch"] = [n for module, names in torchs for n, was in names.items() if vars(module).get(n) is not was]
print(json.dumps(hooks))
"""


def test_imports_have_no_effect_on_the_process() -> None:
    """Apart from hooks that let a forked child forget what is its parent's; they do nothing where there is nothing."""
    servers = (
        "phalanx._torch.forkserver",
        "phalanx.launch.spawn.server",
        "phalanx.testing.fast_server",
    )
    programs = ("__main__", *servers, "phalanx.launch.processes.preload.sitecustomize")
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    names = [name for name in names if not name.endswith(programs)]
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(names)], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "fork": [
            "phalanx.backend.calls.work._begin_anew",
            "phalanx.backend.hosts.channels._let_go",
            "phalanx.checkpoint.disk.claim._unlock_in_child",
            "phalanx.checkpoint.saving._forget_parents_saves",
            "phalanx.debugging.prompt._begin_anew",
        ],
        "changed": [],
        "torch": [],
    }


def test_every_exported_name_can_be_loaded() -> None:
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None


def test_the_stat_of_a_process_is_parsed_in_one_place() -> None:
    is_read = re.compile(r"/stat[\"']")
    readers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if is_read.search(path.read_text())}
    assert readers == {"host/proc_stat.py"}


@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        (r"Signals\([^)]*\)\.name|\bstrsignal\(", "_text.py"),
        (r"\" and \"\.join\(\[", "_text.py"),
        (r"// 3600|\bdivmod\([^)]*, 60\)", "_text.py"),
    ],
    ids=["names of signals", "a, b and c", "durations"],
)
def test_messages_say_alike_what_they_say_often(pattern: str, where: str) -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}
    assert found <= {where}
