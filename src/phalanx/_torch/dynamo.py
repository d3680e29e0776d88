"""Keeps ranks from importing ``torch._dynamo`` (1 s of CPU and 80 MB for each rank) before they compile something.

torch imports torch._dynamo wherever a running compiler would have to be notified: when the first optimizer is made, in
each step of an optimizer, and in methods under ``torch._disable_dynamo``. Before anything is compiled, the notification
has no effect, so four modules of torch get a stand-in that does nothing. As soon as any other code uses the stand-in,
torch's own module is imported and replaces the stand-in for good; functions that the stand-in was asked to disable are
then disabled in torch's module. The import also happens when a program uses a package such as torch.distributed.nn
without importing it: without phalanx, the program would find the package, because torch._dynamo imports it.

The alternative was to import torch._dynamo in the process that forks the ranks. But at import, torch._dynamo reads
environment variables that the script may set later, so the import would have to be hidden from the script, and would
still cost a second on each host. Ranks that use torch's own DDP need torch._dynamo in any case.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"  # attribute in which torch._disable_dynamo keeps the result of `disable`
_WITHOUT_EFFECT = {
    "torch._compile": "disable",
    "torch.optim.optimizer": "graph_break",
    "torch.distributed.distributed_c10d": "trace_rules",  # torch uses this name only to clear a cache
    "torch.testing._internal.common_utils": "reset",
}
"""Modules of torch that use torch._dynamo although nothing is compiled yet, each with the name that it uses."""
_FILLED = ("torch.distributed", "torch.fx.experimental")
"""Packages to which the import of torch._dynamo adds public modules."""


def postpone_import() -> None:
    """Postpone the import of ``torch._dynamo`` until some code needs it."""
    if _NAME not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import finder that finds the stand-in until torch's own module is needed."""

    def __init__(self) -> None:
        self.is_needed: bool = False
        self.without_effect: dict[str, Any] = {
            "disable": self._disable,
            "graph_break": _do_nothing,
            "reset": _do_nothing,
            "trace_rules": SimpleNamespace(clear_lru_cache=_do_nothing),
        }
        self._lock = threading.Lock()
        self._missed: list[tuple[Callable[..., Any], bool]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the stand-in; None for any other module."""
        if name == _NAME and not self.is_needed:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        # The import of this submodule began while the stand-in was its parent. Since then, torch's own module has
        # imported the submodule.
        if name.startswith(f"{_NAME}.") and name in sys.modules and target is None:
            return ModuleSpec(name, _Found(sys.modules[name]))  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a new, empty module."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Turn the module into the stand-in, now that the import system has inspected it."""
        vars(module)["_finder"] = self
        for name in _FILLED:
            if name in sys.modules:
                vars(sys.modules[name]).setdefault("__getattr__", _Filling(self, name))

    def torchs(self) -> ModuleType:
        """Return torch's own module; from now on, every import of torch._dynamo finds it."""
        with self._lock:
            if not self.is_needed:
                self.is_needed = True
                sys.modules.pop(_NAME, None)
                vars(sys.modules["torch"]).pop("_dynamo", None)
                for name in _FILLED:
                    if name in sys.modules and isinstance(vars(sys.modules[name]).get("__getattr__"), _Filling):
                        del vars(sys.modules[name])["__getattr__"]
        try:
            module = importlib.import_module(_NAME)
        except BaseException:
            self.is_needed = False  # so that the next call imports torch's module again and empties self._missed
            raise
        while self._missed:
            function, recursive = self._missed.pop()
            setattr(function, _CACHE, module.disable(function, recursive, wrapping=False))
        return module

    def _disable(self, function: Callable[..., Any], recursive: bool, *, wrapping: bool) -> Callable[..., Any]:
        self._missed.append((function, recursive))
        return function


class _StandIn(ModuleType):
    """A stand-in for ``torch._dynamo``: names with no effect do nothing; any other name loads torch's own module."""

    def __getattr__(self, name: str) -> Any:
        finder = vars(self).get("_finder")
        # Code that inspects all modules asks for dunder names; this alone must not import torch's own module.
        if finder is None or (name.startswith("__") and name != "__path__" and not finder.is_needed):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if not finder.is_needed and _WITHOUT_EFFECT.get(sys._getframe(1).f_globals.get("__name__", "")) == name:
            return finder.without_effect[name]
        return getattr(finder.torchs(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(vars(self)["_finder"].torchs(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_finder"].torchs(), name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_finder"].torchs())


class _Filling:
    """The ``__getattr__`` of a package some of whose modules are imported only by torch._dynamo."""

    def __init__(self, finder: _Finder, package: str) -> None:
        self._finder, self._package = finder, package

    def __call__(self, name: str) -> Any:
        package, full_name = sys.modules[self._package], f"{self._package}.{name}"
        # The import system also calls this function, but needs no answer: "from package import name" looks for an
        # attribute before it imports, and a module that is being imported is not yet an attribute of its package.
        is_imported = full_name in sys.modules or sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        if not name.startswith("__") and not is_imported and importlib.util.find_spec(full_name) is not None:
            self._finder.torchs()
            if name in vars(package):
                return vars(package)[name]
        raise AttributeError(f"module {self._package!r} has no attribute {name!r}")


class _Found:
    """A loader that returns a module that is already imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # some modules do not allow this assignment
            module.__spec__ = self._spec


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replace functions that have no effect before anything is compiled."""
