"""Ranks that a module of tests keeps: each call of `run_ranks` gets a group of its own in the same processes.

A group in kept ranks costs a tenth of one in fresh ranks. They are for functions that leave no trace in a process but
random numbers, which each call finds as in a fresh rank, and variables, which are as before after it. Whatever needs
ranks of its own gets fresh ones: failures that are meant, processes with another environment, folder or path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx import _env
from phalanx.launch.spawn.worker import Function
from phalanx.testing import run_ranks
from phalanx.testing.kept import KeptRanks as OnlyKept
from phalanx.testing.rank import Group, run_in_group

_END_S = 60.0

_PATCHED = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.futures", "threading")  # beside ours


class KeptRanks:
    """The ranks of one module, started when they are first wanted, and anew after a failure.

    Args:
        holdings: Returns all that the test process holds, as sets of names by kind.
    """

    def __init__(self, holdings: Callable[[], dict[str, set[str]]]) -> None:
        self._holdings = holdings
        self._start = _surroundings()
        self._groups: dict[tuple[int, tuple[int, ...]], _Kept] = {}

    def held(self, kind: str) -> set[str]:
        """Return what of `kind` the kept ranks hold, which no test leaves behind."""
        return set().union(*(kept.holds[kind] for kept in self._groups.values()))

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        backend: str | None = "phalanx",
        group_timeout_s: float | None = None,
        hosts: Sequence[int] = (),
        **options: Any,
    ) -> list[Any]:
        """Do what `phalanx.testing.run_ranks` does."""
        __tracebackhide__ = True
        if options or backend is None or _surroundings() != self._start:
            options |= {"backend": backend, "group_timeout_s": group_timeout_s, "hosts": hosts}
            return run_ranks(fn, world_size, *args, kwargs=kwargs, timeout_s=timeout_s, **options)
        key = (world_size, tuple(hosts))
        kept = self._groups.get(key) or self._groups.setdefault(key, _Kept(world_size, hosts, self._holdings))
        with tempfile.TemporaryDirectory(prefix="phalanx-group-") as folder:
            group = Group(backend, "file", group_timeout_s, folder, world_size)
            try:
                call = (group, Function.of(fn), kwargs or {}, args)
                return kept.ranks.call(_run_as_fresh, *call, timeout_s=timeout_s)
            except BaseException:
                self._groups.pop(key).ranks.close()
                raise

    def close(self) -> None:
        """End the ranks; those that can't end as ranks do fail the module's last test."""
        with contextlib.ExitStack() as stack:
            for kept in self._groups.values():
                stack.callback(kept.ranks.close)
            for kept in self._groups.values():
                kept.ranks.end(_END_S)
        self._groups.clear()


class _Kept:
    """Ranks that run one call after the other.

    Attributes:
        holds: What their start has added to what the test process holds.
    """

    def __init__(self, world_size: int, hosts: Sequence[int], holdings: Callable[[], dict[str, set[str]]]) -> None:
        before = holdings()
        self.ranks = OnlyKept(world_size, hosts)
        self.holds = {kind: names - before[kind] for kind, names in holdings().items()}


def _surroundings() -> tuple[Any, ...]:
    """Return what fresh ranks would take from this process when they start."""
    environ = _env.environment()
    environ.pop("PYTEST_CURRENT_TEST", None)
    return environ, os.getcwd(), list(sys.path), os.sched_getaffinity(0)


def _patched() -> list[str]:
    """Return the names in our modules and torch's that hold a function of a test."""
    found = []
    for place, module in list(sys.modules.items()):
        if not place.startswith("phalanx") and place not in _PATCHED:
            continue
        scopes = {place: vars(module)}
        for name, value in vars(module).items():
            if issubclass(type(value), type) and value.__module__ == place:
                scopes[f"{place}.{name}"] = vars(value)
        for scope, names in scopes.items():
            found += [
                f"{scope}.{name}"
                for name, value in names.items()
                if type(value) is types.FunctionType and value.__module__.startswith("tests.")
            ]
    return found


@functools.cache
def _fresh() -> tuple[torch.Tensor, dict[str, str]]:
    """Return the random state and the environment of a rank before its first call."""
    return torch.get_rng_state(), _env.environment()


def _run_as_fresh(rank: int, group: Group, function: Function, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
    drawn, environ = _fresh()
    torch.set_rng_state(drawn)
    value = run_in_group(rank, group, function, kwargs, *args)
    if _env.environment() != environ:
        _env.replace_all(environ)
    if patched := _patched():
        raise AssertionError(f"{', '.join(patched)}: left replaced by a test's own; run it with run_fresh_ranks")
    return value
