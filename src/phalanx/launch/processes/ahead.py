"""Imports modules ahead of the script, hides them until the script imports them, and then checks the environment.

A module that is imported ahead reads the environment before the script has run, although the script may change it. So
the process that imports ahead records which package has read which variables. A rank that is forked from this process
hides the packages, so that the script still has to import them. When the script imports a hidden package, the rank
compares the recorded values with the present ones, and reports the names of variables that differ. Reads by native code
can't be recorded, so for torch, every variable that matches `READ_BY_TORCH` counts as read. This module does not import
torch.

``import torch`` also applies our own variables (``PHALANX_REPLACE``). These are unset while the forker or a fork server
imports torch. The rank applies these variables later: when its script imports torch, or, with `phalanx.spawn`, before
it calls the user's function.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from phalanx import _env

READ_BY_TORCH = re.compile(
    r"""
    (?!KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)$)  # which scikit-learn sets, for Intel's OpenMP alone
    (?:(TORCH|PYTORCH)(?!_(NCCL|HOME$|EXTENSIONS_DIR$)|ELASTIC_|INDUCTOR_CACHE_DIR$).*
    | (OMP|GOMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|NPY|NUMPY|FX|KINETO|CUBLAS|CUBLASLT)_.*
    | GOTOBLAS_.* | COMPILE_STROBELIGHT_.* | NVPL_BLAS_.*)
    """,
    re.VERBOSE,
)
"""Variables that ``import torch``, or a library that it loads, may read. Variables that are read later are left out."""


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that ``import torch`` may read."""
    return {name: value for name, value in environ.items() if READ_BY_TORCH.fullmatch(name)}


class Imports:
    """Record of the top-level packages that this process has imported ahead, and of the variables that they have read.

    Attributes:
        read: Values of the variables that packages have read; keys: package, variable; None: the variable was not set.
        outer: Packages whose import led to the import of a package; key: the imported package.
        readers: Modules whose import was running when a variable was read; key: the variable.
    """

    def __init__(self) -> None:
        self.read: dict[str, dict[str, str | None]] = {}
        self.outer: dict[str, set[str]] = {"phalanx": {"torch"}}  # torch imports phalanx as an entry point
        self.readers: dict[str, set[str]] = {}
        self._set: set[str] = set()  # variables that the packages themselves have set

    @contextlib.contextmanager
    def noted(self, changes: Mapping[str, str | None]) -> Iterator[None]:
        """Record what is imported within this context.

        Args:
            changes: Variables to set within the context; None unsets a variable.
        """
        own = _env.environment()
        _env.change(changes)
        before = _env.environment()
        stop = _env.watch_reads(self._note)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            stop()
            after = _env.environment()
            self._set |= {name for name in {*before, *after} if before.get(name) != after.get(name)}
            _env.change({name: own.get(name) for name in changes if name not in self._set})

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Record that a package is being imported, and leave the import to other finders."""
        if "." not in name and name not in self.outer:
            self.outer[name] = set(map(_package_of, _being_imported(sys._getframe())))
            if name == "torch":
                self.read[name] = dict(relevant(_env.environment()))
        return None

    def _note(self, name: str, value: str | None) -> None:
        if readers := list(_being_imported(sys._getframe())):
            self.read.setdefault(_package_of(readers[0]), {}).setdefault(name, value)
            self.readers.setdefault(name, set()).update(readers)

    def changed(self, package: str) -> list[str]:
        """Return the variables that have changed since the package read them."""
        before, now = self.read.get(package, {}), _env.environment()
        names = {*before, *(relevant(now) if package == "torch" else ())}
        return sorted(name for name in names - self._set if now.get(name) != before.get(name))


def _being_imported(frame: FrameType | None) -> Iterator[str]:
    """Yield the modules whose import is running, innermost first, except modules of Python itself."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__", ""))
            if _package_of(name) not in {*sys.stdlib_module_names, "__main__", "sitecustomize"}:
                yield name
        frame = frame.f_back


class Hidden:
    """An import finder that keeps packages out of ``sys.modules``, and restores a package when the script imports it.

    Args:
        imports: Record of how the packages were imported.
        keep: Modules that stay in ``sys.modules``.
        on_return: Function to call when a package is restored, with the package's name and the variables that have
            changed since the package read them.
    """

    def __init__(
        self, imports: Imports, keep: Collection[str], on_return: Callable[[str, Sequence[str]], None]
    ) -> None:
        self._imports, self._on_return = imports, on_return
        packages = set(imports.outer).difference(sys.stdlib_module_names, map(_package_of, keep))
        self._specs: dict[str, ModuleSpec | None] = {}  # original specs of packages that are being restored
        self._modules: dict[str, dict[str, ModuleType]] = {}  # modules by package
        for name in [name for name in sys.modules if _package_of(name) in packages]:
            self._modules.setdefault(_package_of(name), {})[name] = sys.modules.pop(name)
        if self._modules:
            sys.meta_path.insert(0, self)
            atexit.register(self._bring_back_all)  # the interpreter tears down only modules in sys.modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that restores a hidden package."""
        return ModuleSpec(name, self) if name in self._modules else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the package, which has been executed already."""
        module = self._modules[spec.name][spec.name]
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore all modules of the package, and of the packages whose import was part of its import."""
        name, outer = module.__name__, self._imports.outer
        module.__spec__ = self._specs.pop(name)
        packages = [one for one in self._modules if one == name or name in outer.get(one, ())]
        for package in packages:
            sys.modules.update(self._modules.pop(package))
        if not self._modules:
            self._bring_back_all()
        for package in packages:
            self._on_return(package, self._imports.changed(package))

    def _bring_back_all(self) -> None:
        for modules in self._modules.values():
            sys.modules.update(modules)
        self._modules.clear()
        sys.meta_path.remove(self)
        atexit.unregister(self._bring_back_all)


class Log:
    """An import finder that records which modules this rank imports, in which order and in which environment.

    Args:
        given: Variables specific to this rank or attempt.
    """

    def __init__(self, given: Collection[str]) -> None:
        self._given = sorted(given)
        self._base = _env.environment()
        self._last = dict(_env.raw())
        self._steps: list[tuple[dict[str, str | None], dict[str, None]]] = [({}, {})]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Record that a module is being imported, and leave the import to other finders."""
        if _env.raw() != self._last:
            self._last = dict(_env.raw())
            now = _env.environment()
            names = {*now, *self._base}.difference(self._given)
            changes = {one: now.get(one) for one in names if now.get(one) != self._base.get(one)}
            self._steps.append((changes, {}))
        self._steps[-1][1][name] = None
        return None

    def summary(self, wanted: Collection[str]) -> dict[str, Any]:
        """Return a record from which `replay` can repeat the imports of the wanted modules in another process.

        Modules that were imported before the log began are first in the record.
        """
        noted = {name for _, modules in self._steps for name in modules}
        before = [name for name in wanted if name not in noted]
        steps = [(changes, [name for name in modules if name in wanted]) for changes, modules in self._steps]
        return {"given": self._given, "steps": [({}, before), *steps]}


log: Log | None = None
"""The log of this rank's imports; None if nobody would read the log."""


def begin_log(given: Collection[str]) -> None:
    """Begin to record what this rank imports; see `Log`."""
    global log
    log = Log(given)


def replay(logs: Sequence[Mapping[str, Any]], imports: Imports, left_out: Collection[str]) -> set[str]:
    """Import the modules that the first of several ranks has imported, in the same order and environments.

    Errors are ignored, because the script will run into the same errors itself.

    Args:
        logs: Results of `Log.summary`, one for each rank.
        left_out: Packages not to import.

    Returns:
        Packages to leave out: those that read variables that differ between ranks, and those that import such a
            package.
    """
    varying = {name for one in logs for name in one["given"]}
    histories = [_histories(one) for one in logs]
    varying |= {name for one in histories for name in one if any(other.get(name) != one[name] for other in histories)}
    for changes, modules in logs[0]["steps"]:
        with imports.noted({name: value for name, value in changes.items() if name not in varying}):
            for name in modules:
                if _package_of(name) not in left_out:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
    unfit = {package for package, read in imports.read.items() if not varying.isdisjoint(read)} - {"phalanx"}
    return unfit.union(*(imports.outer.get(package, ()) for package in unfit))


def _histories(summary: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Return the successive values of each variable."""
    found: dict[str, list[str | None]] = {}
    for changes, _ in summary["steps"]:
        for name, value in changes.items():
            if found.setdefault(name, [value])[-1] != value:
                found[name].append(value)
    return found


def _package_of(module: str) -> str:
    return module.partition(".")[0]
