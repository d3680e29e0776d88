"""Finds, in a script's source, the environment variables that the script sets before it imports torch.

torch reads variables when it is imported. If ranks are forked from a process that has imported torch, that process must
have read the values that each rank would read. If the source does not show these values for certain, ranks import torch
themselves, and the first line that the job prints says so. No code of the script is executed here.

The reader understands ``os.environ["NAME"] = "value"``, and ``setdefault`` and ``update`` with literals, each as a
statement of its own, up to the first import of torch. Everything else that may change the environment counts as a
doubt: any use of the environment other than reading, code that the source does not show (``exec``, ``importlib``), and
packages that are not listed here. The reader lists what is harmless rather than what is dangerous, because a false
doubt costs seconds, but after a missed change, ranks would run with wrong settings.

The alternative is that a rank starts over (execve) when its script imports torch. It would need no reader, but
everything before the import would run twice.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence

from phalanx.launch.environment import THREADS_VARIABLE
from phalanx.launch.processes.ahead import READ_BY_TORCH

_MOST_FILES = 100
_TORCH = ("torch", "phalanx", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "timm")
"""Packages that import torch as soon as they are imported."""
_ANYTHING = ""  # stands for a variable of unknown name
_KNOWN_PACKAGES = """
    PIL absl accelerate attr attrs click cv2 datasets einops evaluate fire h5py jsonargparse loguru matplotlib numpy
    omegaconf packaging pandas polars psutil pyarrow pydantic pytest regex requests rich safetensors scipy sentencepiece
    simple_parsing sklearn tabulate tensorboard tiktoken tokenizers tomli tqdm transformers triton typer
    typing_extensions wandb yaml
"""
"""Packages whose functions never change a variable that torch reads."""
_OPAQUE_MODULES = """
    bdb builtins cProfile code codeop ctypes doctest imp importlib nt pkgutil posix profile pydoc runpy timeit trace
    unittest
"""
"""Modules of the standard library that change the environment, or run code that the script's source does not show."""
_OPAQUE_FUNCTIONS = ("exec", "eval", "__import__", "__builtins__")
_SEEN_THROUGH = ("importlib.util.find_spec", "importlib.metadata", "importlib.resources")  # harmless parts of importlib
_BEHIND_ENVIRON = ("environb", "putenv", "unsetenv")
_COPYING = ("dict", "len", "list", "print", "set", "sorted")
_READING = ("get", "copy", "items", "keys", "values")


@dataclasses.dataclass(frozen=True)
class Head:
    """The changes that a script makes, before it imports torch, to variables that torch reads.

    Attributes:
        settings: Variables that the script is certain to set, and their values.
        doubt: Name of a variable that the script may set, or sets to an unknown value; a phrase if this name is
            unknown; "" if there is no such variable.
    """

    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    doubt: str = ""


def read_head(command: Sequence[str], environ: Mapping[str, str]) -> Head:
    """Return the changes that the script of an interpreter's command makes before it imports torch.

    Args:
        environ: Environment in which the script will run.
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
    """Reads statements in the order in which they run, up to the first import of torch.

    If any file binds a name to ``os``, for example, the reader takes that name for ``os`` in all files, even where the
    name is bound to something else. This can only add doubts, because a setting counts as certain only if the name was
    last bound by an import that is certain to run.

    Args:
        folder: Folder of the script, in which its modules lie.
        environ: Environment in which the script will run.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        on_path = [path for path in sys.path if path not in ("", os.getcwd()) and not path.startswith(installed)]
        self._folders = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *on_path]
        self._environ = environ
        self._imports_torch: dict[str, bool] = {}  # by file: whether torch has been imported when the file ends
        self._os_names = {"os"}
        self._environ_names = {"environ"}
        self._bound_names: set[str] = set()  # names that are certain to stand for os or os.environ
        self._opaque_names = set(_BEHIND_ENVIRON)
        self._changes_path = False
        self._is_certain = True  # whether the next statement is certain to run before torch is imported
        self.settings: dict[str, str] = {}
        self.doubt: str = ""

    def read_file(self, path: str, *, is_program: bool = False) -> bool:
        """Read a file; return whether torch is certain to have been imported when the file ends."""
        path = os.path.realpath(path)
        if path in self._imports_torch:
            return self._imports_torch[path]
        if len(self._imports_torch) >= _MOST_FILES:
            self._take_change(_ANYTHING)
            return False
        self._imports_torch[path] = False  # set before reading, because modules may import each other
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError):  # not Python source, or Python itself will reject it
            return False
        self._imports_torch[path] = self._walk(tree.body, path, is_program=is_program)
        return self._imports_torch[path]

    def read_module(self, name: str, *folders: str, is_program: bool = False) -> bool:
        """Read the files that an import of that module executes; return whether they are certain to import torch."""
        for folder in folders:
            for path in _files_of(name, folder, is_program=is_program):
                if self.read_file(path, is_program=is_program):
                    return True
        return False

    def _walk(self, body: Iterable[ast.stmt], path: str, *, is_program: bool = False) -> bool:
        return any(self._take(statement, path, is_program=is_program) for statement in body)

    def _maybe(self, bodies: Iterable[Iterable[ast.stmt]], path: str) -> None:
        """Walk through blocks that may or may not be executed."""
        was_certain = self._is_certain
        imports_torch = False
        for body in bodies:
            self._is_certain = False
            imports_torch |= self._walk(body, path)
        self._is_certain = was_certain and not imports_torch

    def _take(self, statement: ast.stmt, path: str, *, is_program: bool) -> bool:
        """Process a statement; return whether torch is certainly imported after it."""
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            if self._take_import(statement, path):
                return True
            self._note_names(statement)
            return False
        for part in _outside_of_blocks(statement):
            if plain := self._plain_changes(part):
                for name, value in plain:
                    self._take_change(name, value)
            else:
                for name in self._changes_in(part):
                    self._take_change(name)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._bound_names.discard(statement.name)
        if isinstance(statement, (ast.With, ast.ClassDef)):
            return self._walk(statement.body, path)
        if isinstance(statement, ast.If) and (wanted := _known_test(statement.test, is_program)) is not None:
            return self._walk(statement.body if wanted else statement.orelse, path)
        if isinstance(statement, ast.Try) and self._take(statement.body[0], path, is_program=is_program):
            return True  # if this import fails, torch is not installed
        was_certain = self._is_certain
        self._maybe(_blocks_of(statement), path)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._is_certain = was_certain  # the body's imports are executed only when the function is called
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
            if is_relative or self._is_own(package):
                if self.read_module(name, *folders):
                    return True
            elif package in _TORCH:
                return True
            elif package not in sys.stdlib_module_names:
                self._is_certain = False  # the package may import torch, and settings after it would be too late
                if self._changes_path and not _is_installed(package):
                    self._take_change(_ANYTHING)
        return False

    def _is_own(self, package: str) -> bool:
        """Return whether a package is found in the user's folders."""
        if package in _TORCH:
            return False
        paths = [os.path.join(folder, package) for folder in self._folders]
        if any(os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py")) for path in paths):
            return True
        is_folder = any(map(os.path.isdir, paths))  # a folder alone counts only if no installed package has its name
        return is_folder and package not in sys.stdlib_module_names and not _is_installed(package)

    def _note_names(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Record the names that this import binds to the environment, or to objects that may change the environment."""
        is_from = isinstance(statement, ast.ImportFrom)
        module = f"{statement.module}." if isinstance(statement, ast.ImportFrom) and not statement.level else ""
        for alias in statement.names:
            name = alias.asname or (alias.name if is_from else alias.name.partition(".")[0])
            origin = module + alias.name
            for known in (self._os_names, self._environ_names, self._opaque_names):
                if alias.name in known:  # the name comes from os, or from a module that imports it from os
                    known.add(name)
            if not self._binds_environment(statement, alias):
                self._bound_names.discard(name)
            elif self._is_certain:
                self._bound_names.add("environ" if name == "*" else name)
            if origin in ("sys.path", "site"):
                self._changes_path = True
            elif (module or not is_from) and self._is_opaque(origin):
                self._opaque_names.add(name)
                if name == "*":
                    self._take_change(_ANYTHING)

    def _binds_environment(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
        """Return whether an import binds a name to ``os`` or to the environment."""
        match statement:
            case ast.Import():
                return alias.name == "os" or (alias.name.startswith("os.") and not alias.asname)
            case ast.ImportFrom("os", _, 0):
                return alias.name in ("environ", "*")
        return alias.name in self._bound_names

    def _is_opaque(self, origin: str) -> bool:
        package = origin.partition(".")[0]
        if self._is_own(package):
            return False
        if package in sys.stdlib_module_names:
            return package in _OPAQUE_MODULES.split() and not origin.startswith(_SEEN_THROUGH)
        return package not in _KNOWN_PACKAGES.split() and package not in _TORCH

    def _take_change(self, name: str, value: str | None = None) -> None:
        if name != _ANYTHING and not READ_BY_TORCH.fullmatch(name):
            return
        if value is not None and self._is_certain:
            self.settings[name] = value
        elif not self.doubt:
            self.doubt = name or "unknown variables"

    def _plain_changes(self, statement: ast.AST) -> list[tuple[str, str]]:
        """Return the variables that a statement sets, and their values; empty if it may have any other effect."""
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        match statement:
            case ast.Assign(targets, value):
                for target in targets:
                    is_item = isinstance(target, ast.Subscript) and self._is_bound(target.value)
                    pairs.append((target.slice if is_item else None, value))  # type: ignore[attr-defined]
            case ast.Expr(ast.Call(ast.Attribute(owner, "setdefault"), [name, value], [])):
                if self._is_bound(owner) and not self._is_set(_text_of(name)):
                    pairs.append((name, value))
            case ast.Expr(ast.Call(ast.Attribute(owner, "update"), args, keywords)) if self._is_bound(owner):
                for given in args:
                    pairs += (
                        zip(given.keys, given.values, strict=True) if isinstance(given, ast.Dict) else [(None, given)]
                    )
                pairs += [(ast.Constant(keyword.arg), keyword.value) for keyword in keywords]
        changes = [(_text_of(name), _text_of(value)) for name, value in pairs]
        plain = [(name, value) for name, value in changes if name and value is not None]
        return plain if len(plain) == len(changes) else []

    def _changes_in(self, node: ast.AST) -> Iterator[str]:
        """Return the variables that running an expression or a statement may change."""
        parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
        match node:
            case ast.Subscript(owner, key) if self._is_environment(owner):
                if not isinstance(node.ctx, ast.Load):
                    yield _text_of(key) or _ANYTHING
                parts = [key]
            case ast.Compare(left, [_], [owner]) if self._is_environment(owner):
                parts = [left]
            case ast.comprehension(target, owner, tests) if self._is_environment(owner):
                parts = [target, *tests]
            case ast.Call(ast.Name(called), args) if called in _COPYING:
                parts = [part for part in parts if part not in args or not self._is_environment(part)]
            case ast.Call(ast.Attribute(owner, called), args, keywords) if self._is_environment(owner):
                yield from self._changes_by(called, args, keywords)
                parts = [*args, *(keyword.value for keyword in keywords)]
            case ast.Call(ast.Attribute(ast.Name(owner), "putenv" | "unsetenv"), args) if owner in self._os_names:
                yield _text_of(args[0] if args else None) or _ANYTHING
                parts = args
            case ast.Attribute(ast.Name(owner), called) if owner in self._os_names:
                if called == "environ" or called in _BEHIND_ENVIRON:
                    yield _ANYTHING
                parts = []
            case ast.Attribute() if ast.unparse(node).startswith(_SEEN_THROUGH):
                parts = []
            case ast.Attribute(_, "path") | ast.Name("site"):
                self._changes_path |= ast.unparse(node).endswith(("sys.path", "site"))
            case ast.Name(name, ast.Store() | ast.Del()):
                self._bound_names.discard(name)
            case ast.Name(name, ast.Load()) if name in _OPAQUE_FUNCTIONS:
                yield _ANYTHING
            case ast.Name(name, ast.Load()) | ast.Attribute(_, name):
                if name in self._os_names | self._environ_names | self._opaque_names:
                    yield _ANYTHING
        for part in parts:
            yield from self._changes_in(part)

    def _changes_by(self, called: str, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> Iterator[str]:
        """Return the variables that a method of the environment may change."""
        first = args[0] if args else None
        if called == "update":
            yield from (keyword.arg or _ANYTHING for keyword in keywords)
            names = first.keys if isinstance(first, ast.Dict) else [None] * len(args)
            yield from (_text_of(name) or _ANYTHING for name in names)
        elif called == "setdefault" and self._is_set(_text_of(first)):
            pass
        elif called not in _READING:
            yield _text_of(first) or _ANYTHING

    def _is_set(self, name: str | None) -> bool:
        return name in self._environ or name in self.settings or name == THREADS_VARIABLE  # the launcher sets it

    def _is_bound(self, expression: ast.expr) -> bool:
        """Return whether an expression is certain to be the environment."""
        root = expression.value if isinstance(expression, ast.Attribute) else expression
        return self._is_environment(expression) and isinstance(root, ast.Name) and root.id in self._bound_names

    def _is_environment(self, expression: ast.expr) -> bool:
        """Return whether an expression may be the environment, as far as names tell."""
        match expression:
            case ast.Name(name):
                return name in self._environ_names
            case ast.Attribute(ast.Name(owner), "environ"):
                return owner in self._os_names
        return False


def _files_of(name: str, folder: str, *, is_program: bool) -> Iterator[str]:
    """Return the files that an import of a module from that folder executes, in order."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        package = os.path.join(folder, *parts[:i], part)
        if os.path.isfile(os.path.join(package, "__init__.py")):
            yield os.path.join(package, "__init__.py")
        elif os.path.isfile(f"{package}.py"):
            yield f"{package}.py"
    if is_program and os.path.isdir(os.path.join(folder, *parts)):
        yield os.path.join(folder, *parts, "__main__.py")


def _is_installed(package: str) -> bool:
    """Return whether this interpreter finds a package on its own path."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _known_test(test: ast.expr, is_program: bool) -> bool | None:
    """Return the value of a condition; None if the value is not known."""
    text = ast.unparse(test)
    if text in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return False
    return is_program if text == "__name__ == '__main__'" else None


def _text_of(expression: ast.expr | None) -> str | None:
    """Return the value of a string literal; None for any other expression."""
    return expression.value if isinstance(expression, ast.Constant) and isinstance(expression.value, str) else None


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Return the blocks of a compound statement, each of which may or may not be executed."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _outside_of_blocks(statement: ast.stmt) -> Iterator[ast.AST]:
    """Return the parts of a statement that are always executed, such as the condition of an ``if``."""
    if not any(_blocks_of(statement)):
        yield statement
        return
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, (ast.ExceptHandler, ast.match_case)):
            yield from (one for one in ast.iter_child_nodes(part) if not isinstance(one, ast.stmt))
        elif not isinstance(part, ast.stmt):
            yield part
