"""What a script sets in its environment before it imports torch, as far as its source tells.

torch reads variables when it is imported. Where ranks are forked from a process that has imported it, it must have read
what each rank would have read; where that can't be known, ranks import it themselves. Nothing is executed here.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence

from phalanx.launch.ahead import READ_BY_TORCH
from phalanx.launch.environment import THREADS_VARIABLE

_MOST_FILES = 100
_TORCH = ("torch", "phalanx")
_ANYTHING = ""  # the name of a variable that is not told


@dataclasses.dataclass(frozen=True)
class Head:
    """What a script does before it imports torch; only of variables that torch reads meanwhile.

    Attributes:
        settings: Variables that it sets, whatever happens, and their values.
        doubt: Words for what it may set, and to what is not known; empty if there is none.
    """

    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    doubt: str = ""


def read_head(command: Sequence[str], environ: Mapping[str, str]) -> Head:
    """Return what the script of an interpreter's command does before it imports torch.

    Args:
        environ: Environment in which it will run.
    """
    is_module = command[1] == "-m"
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[1]))
    reader = _Reader(folder, environ)
    if is_module:
        reader.read_module(command[2], folder, is_program=True)
    elif os.path.isdir(command[1]):
        reader.read_file(os.path.join(command[1], "__main__.py"), is_program=True)
    else:
        reader.read_file(command[1], is_program=True)
    return Head(reader.settings, reader.doubt)


class _Reader:
    """Walks through statements in the order in which they run, up to the first import of torch.

    Args:
        folder: Folder of the script, in which its modules lie.
        environ: Environment in which it will run.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        on_path = [path for path in sys.path if path not in ("", os.getcwd()) and not path.startswith(installed)]
        self._folders = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *on_path]
        self._environ = environ
        self._seen: set[str] = set()
        self._is_certain = True  # that the next statement is executed, and that torch is not imported yet
        self.settings: dict[str, str] = {}
        self.doubt: str = ""

    def read_file(self, path: str, *, is_program: bool = False) -> bool:
        """Return whether torch is imported by the end of this file for certain."""
        path = os.path.realpath(path)
        if path in self._seen or len(self._seen) >= _MOST_FILES:
            return False
        self._seen.add(path)
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError):  # a program of another kind, or one that fails
            return False
        return self._walk(tree.body, path, is_program=is_program)

    def read_module(self, name: str, *folders: str, is_program: bool = False) -> bool:
        """Read the files that an import of that module executes; return whether torch is imported by then."""
        for folder in folders:
            for path in _files_of(name, folder, is_program=is_program):
                if self.read_file(path, is_program=is_program):
                    return True
        return False

    def _walk(self, body: Iterable[ast.stmt], path: str, *, is_program: bool = False) -> bool:
        return any(self._take(statement, path, is_program=is_program) for statement in body)

    def _maybe(self, bodies: Iterable[Iterable[ast.stmt]], path: str) -> bool:
        """Walk through what may be executed or not."""
        was_certain = self._is_certain
        imports_torch = False
        for body in bodies:
            self._is_certain = False
            imports_torch |= self._walk(body, path)
        self._is_certain = was_certain and not imports_torch
        return False

    def _take(self, statement: ast.stmt, path: str, *, is_program: bool) -> bool:
        """Take a statement in; return whether torch is imported behind it for certain."""
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return self._take_import(statement, path)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            was_certain = self._is_certain
            self._maybe([statement.body], path)
            self._is_certain = was_certain  # its imports are executed when somebody calls it
            return False
        if isinstance(statement, (ast.With, ast.ClassDef)):
            return self._walk(statement.body, path)
        if isinstance(statement, ast.If) and (wanted := _known_test(statement.test, is_program)) is not None:
            return self._walk(statement.body if wanted else statement.orelse, path)
        bodies = list(_bodies_of(statement))
        if bodies:
            return self._maybe(bodies, path)
        for node in ast.walk(statement):
            for name, value in self._changes_of(node):
                self._take_change(name, value)
        return False

    def _take_import(self, statement: ast.Import | ast.ImportFrom, path: str) -> bool:
        is_relative = isinstance(statement, ast.ImportFrom) and statement.level > 0
        if isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in statement.names)]
            folders = self._folders
            if statement.level:
                folders = [os.path.normpath(os.path.join(os.path.dirname(path), *[".."] * (statement.level - 1)))]
        else:
            names, folders = [alias.name for alias in statement.names], self._folders
        for name in filter(None, names):
            package = name.partition(".")[0]
            if package in _TORCH and not is_relative:
                return True
            if any(os.path.exists(os.path.join(folder, package + end)) for folder in folders for end in (".py", "")):
                if self.read_module(name, *folders):
                    return True
            elif package not in sys.stdlib_module_names and not is_relative:
                self._is_certain = False  # it may import torch
        return False

    def _take_change(self, name: str, value: str | None) -> None:
        if name != _ANYTHING and not READ_BY_TORCH.fullmatch(name):
            return
        if value is not None and self._is_certain:
            self.settings[name] = value
        elif not self.doubt:
            self.doubt = name or "what is not known"

    def _changes_of(self, node: ast.AST) -> Iterator[tuple[str, str | None]]:
        """Return the variables that an expression or a statement changes, and to what; None: that is not known."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environment(target.value):
                    yield _text_of(target.slice) or _ANYTHING, _text_of(node.value)
            if _is_environment(node.value):  # under another name from now on
                yield _ANYTHING, None
        elif isinstance(node, (ast.AugAssign, ast.Delete)):
            for target in [node.target] if isinstance(node, ast.AugAssign) else node.targets:
                if _is_environment(target):
                    yield _ANYTHING, None
                elif isinstance(target, ast.Subscript) and _is_environment(target.value):
                    yield _text_of(target.slice) or _ANYTHING, None
        elif isinstance(node, ast.Call):
            yield from self._changes_of_call(node)

    def _changes_of_call(self, call: ast.Call) -> Iterator[tuple[str, str | None]]:
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        first = call.args[0] if call.args else None
        if called in ("load_dotenv", "putenv", "unsetenv"):
            yield (called != "load_dotenv" and _text_of(first)) or _ANYTHING, None
        elif isinstance(call.func, ast.Attribute) and _is_environment(call.func.value):
            name = _text_of(first) or _ANYTHING
            if called == "setdefault":
                if name not in self._environ and name != THREADS_VARIABLE:  # which every rank has
                    yield name, self.settings.get(name) or (_text_of(call.args[1]) if len(call.args) == 2 else None)
            elif called in ("pop", "clear", "popitem"):
                yield name, None
            elif called == "update":
                for keyword in call.keywords:
                    yield keyword.arg or _ANYTHING, _text_of(keyword.value) if keyword.arg else None
                if isinstance(first, ast.Dict):
                    for key, item in zip(first.keys, first.values, strict=True):
                        yield _text_of(key) or _ANYTHING, _text_of(item)
                elif first is not None:
                    yield _ANYTHING, None


def _files_of(name: str, folder: str, *, is_program: bool) -> Iterator[str]:
    """Return the files that an import of a module in that folder executes, in their order."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        package = os.path.join(folder, *parts[:i], part)
        if os.path.isfile(os.path.join(package, "__init__.py")):
            yield os.path.join(package, "__init__.py")
        elif os.path.isfile(f"{package}.py"):
            yield f"{package}.py"
    if is_program and os.path.isdir(os.path.join(folder, *parts)):
        yield os.path.join(folder, *parts, "__main__.py")


def _known_test(test: ast.expr, is_program: bool) -> bool | None:
    """Return what a condition comes to; None: that is not known."""
    text = ast.unparse(test)
    if text in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return False
    return is_program if text == "__name__ == '__main__'" else None


def _is_environment(expression: ast.expr) -> bool:
    return ast.unparse(expression) in ("os.environ", "environ")


def _text_of(expression: ast.expr | None) -> str | None:
    """Return the text that a literal is; None if it is not one."""
    return expression.value if isinstance(expression, ast.Constant) and isinstance(expression.value, str) else None


def _bodies_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Return the blocks in a statement, one of which may be executed."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body
