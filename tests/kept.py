"""Ranks that a module of tests keeps: each call of `run_ranks` gets a group of its own in the same processes.

A group in kept ranks costs a tenth of one in fresh ranks. They are for functions that leave no trace in a process but
random numbers, which each call finds as in a fresh rank, and variables, which are as before after it. Whatever needs
ranks of its own gets fresh ones: failures that are meant, processes with another environment, folder or path.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx import RankError, _env
from phalanx.failure.report import first_true_failure
from phalanx.launch.spawn.worker import Function, dumps
from phalanx.testing import Ranks, await_release, reached, run_ranks, spawn_ranks
from phalanx.testing.rank import Group, run_in_group

_NEVER_S = 1e6  # a rank waits for its next call until the module ends
_MAX_ROWS = 400  # of a failure, as of fresh ranks
_END_S = 60.0
_AFTER_HANG_S = 1.0  # for those that have done their part, and end as soon as they are told


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
                return kept.call(dumps((group, Function.of(fn), kwargs or {}, args)), timeout_s)
            except BaseException:
                self._groups.pop(key).close()
                raise

    def close(self) -> None:
        """End the ranks; those that can't end as ranks do fail the module's last test."""
        with contextlib.ExitStack() as stack:
            for kept in self._groups.values():
                stack.callback(kept.close)
            for kept in self._groups.values():
                kept.end()
        self._groups.clear()


class _Kept:
    """Ranks that run one call after the other.

    Attributes:
        holds: What their start has added to what the test process holds.
    """

    def __init__(self, world_size: int, hosts: Sequence[int], holdings: Callable[[], dict[str, set[str]]]) -> None:
        before = holdings()
        self._stack = contextlib.ExitStack()
        self._ranks: Ranks = self._stack.enter_context(spawn_ranks(_serve, world_size, init=False, hosts=hosts))
        self._num_calls = itertools.count()
        self.holds = {kind: names - before[kind] for kind, names in holdings().items()}

    def call(self, task: bytes, timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        point = f"call {next(self._num_calls)}"
        self._ranks.release(point, task)
        try:
            return self._ranks.wait_until_reached(point, timeout_s=timeout_s)
        except RankError as error:
            late = error
        self._tell_to_end()
        outcomes = self._ranks.join(_AFTER_HANG_S if late.exitcode is None else timeout_s, stop_at_failure=True)
        if all(outcome.ok for outcome in outcomes):  # it came to its end after the limit
            raise late
        raise first_true_failure(outcomes, timeout_s, max_rows=_MAX_ROWS)

    def _tell_to_end(self) -> None:
        self._ranks.release(f"call {next(self._num_calls)}", None)

    def end(self) -> None:
        self._tell_to_end()
        outcomes = self._ranks.join(_END_S, stop_at_failure=True)
        if not all(outcome.ok for outcome in outcomes):
            raise first_true_failure(outcomes, _END_S, max_rows=_MAX_ROWS)

    def close(self) -> None:
        self._stack.close()


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


def _serve(rank: int, world_size: int) -> None:
    drawn, environ = torch.get_rng_state(), _env.environment()
    for number in itertools.count():
        task = await_release(f"call {number}", _NEVER_S)
        if task is None:
            return
        group, function, kwargs, args = pickle.loads(task)
        torch.set_rng_state(drawn)
        value = run_in_group(rank, group, function, kwargs, *args)
        sys.stdout.flush()
        sys.stderr.flush()
        if _env.environment() != environ:
            _env.replace_all(environ)
        if patched := _patched():
            raise AssertionError(f"{', '.join(patched)}: left replaced by a test's own; run it with run_fresh_ranks")
        reached(f"call {number}", value)
        del group, function, kwargs, args, value
