"""The test process's side: forks the ranks that run a marked test, and combines their results into the test's result.

Ranks are forked from pytest's own process, by `Workers`. So a test may be a local function, and the ranks share the
memory of fixtures that are already computed, until they write to it. The test's own ``runtest`` runs on each rank. A
failure is returned as the text that pytest shows, because frames and rewritten asserts can't be pickled. Fixtures that
request ``rank`` are left out of the parent's setup and computed on the ranks.

A fork copies only one thread. So a test is rejected, with a message, if this process has initialized CUDA, or has a
default process group or another object that can't be forked. Such a test can use `run_ranks`, which forks from a
server. If pytest is killed, the kernel ends its ranks, and a shell that waits for pytest's end (`launch.spawn.cleaner`)
kills the processes that the ranks have started.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import _env
from phalanx.failure.ending import Ending, find_culprit
from phalanx.failure.report import first_true_failure, heads
from phalanx.launch.processes.forker import RANK_MODULES
from phalanx.launch.processes.pages import fork_cheaply
from phalanx.launch.spawn.workers import Workers
from phalanx.testing.plugin import shown
from phalanx.testing.plugin.marks import Options, checked_sizes
from phalanx.testing.plugin.on_rank import Task, Told, run_test
from phalanx.testing.rank import Group, group_in_folder
from phalanx.testing.ranks import Ranks
from phalanx.testing.results import result_of

_TIMEOUT_S = 60.0
# fraction of pytest-timeout's limit for the ranks, so that our report, which names ranks, is printed first
_SHARE_OF_LIMIT = 0.8
_OWN = frozenset(("rank", "group"))
_OF_PYTEST = frozenset(("capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys", "recwarn"))
"""Fixtures that each rank computes itself, because they capture the output or the warnings of one process."""


def prepare(item: pytest.Item) -> None:
    """Make a marked test run on ranks, which compute the fixtures that differ by rank."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    plain: Any = item
    try:
        if int(pytest.__version__.partition(".")[0]) < 7:
            raise ValueError(f"it needs pytest 7 or later, and this is pytest {pytest.__version__}")
        options = Options.of(mark)
        sizes = checked_sizes(mark, options)
    except ValueError as error:
        plain.setup = functools.partial(pytest.fail, f"@pytest.mark.ranks: {error}", pytrace=False)
        return
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "_ranks" in callspec.params:
        sizes = (callspec.params["_ranks"],)
    vars(item)["_phalanx_sizes"] = sizes
    by_rank = _computed_by_ranks(plain)
    plain.fixturenames = [name for name in getattr(plain, "fixturenames", ()) if name not in by_rank]
    plain.runtest = functools.partial(_run_on_ranks, item, sizes, options, Task(item, plain.runtest, by_rank))


def world_size_of(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of the requesting test."""
    sizes = vars(request.node).get("_phalanx_sizes", ())
    if not sizes:
        pytest.fail(shown.NOT_MARKED.format("world_size"), pytrace=False)
    if len(sizes) > 1:  # a method of unittest, which pytest can't parametrize
        pytest.fail("a unittest.TestCase method gets world_size for one world size only", pytrace=False)
    return int(sizes[0])


def _computed_by_ranks(item: Any) -> list[str]:
    """Return the fixtures of a test that each rank computes: those that differ by rank, and those that request them."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return []
    known = info.name2fixturedefs

    @functools.cache
    def differs(name: str) -> bool:
        defs = known.get(name, ())
        if defs and _differs_by_rank(name, defs[-1].func):
            return True
        asked = {asked for one in defs for asked in one.argnames} - {name}
        return any(map(differs, sorted(asked)))

    return [name for name in info.names_closure if differs(name)]


def _differs_by_rank(name: str, function: Any) -> bool:
    module = str(getattr(function, "__module__", ""))
    is_own = name in _OWN and module == "phalanx.testing.plugin.hooks"
    is_pytests = name in _OF_PYTEST and module.startswith("_pytest.")
    # Forked ranks can't share an event loop, because they would wait on the same descriptors.
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return is_own or is_pytests or is_async or module.partition(".")[0] == "pytest_asyncio"


# ---------------------------------------------------------------- the run


def _run_on_ranks(item: pytest.Item, sizes: tuple[int, ...], options: Options, task: Task) -> None:
    __tracebackhide__ = True
    began = time.monotonic()
    for size in sizes:
        _run(item, size, options, task, began)


def _run(item: pytest.Item, world_size: int, options: Options, task: Task, began: float) -> None:
    __tracebackhide__ = True
    for name in RANK_MODULES:
        importlib.import_module(name)
    from phalanx.testing.plugin import limits  # imported late, because it imports torch

    limits.check_room(world_size)
    limits.check_fork(item)
    shown.flush_coverage()
    own_s = options.timeout_s or _TIMEOUT_S
    limit_s = _limit_s(item, own_s, time.monotonic() - began)
    place = f"@pytest.mark.ranks({world_size}, timeout_s=SECONDS)" if limit_s == own_s else "pytest-timeout's limit"
    why: list[str] = []
    with (
        group_in_folder(world_size, **options.group) as group,
        contextlib.closing(_fork(group, options, task)) as workers,
    ):
        with _terminal_comes_back():
            Ranks(workers).wait(
                limit_s, stop_at_failure=True, before_kill=lambda: why.extend(shown.why(workers.outcomes))
            )
        told = [handle.points.get("told") or Told() for handle in workers.handles]
        outcomes = workers.outcomes
    _take_over(item, told)
    _take_over_marks(item, outcomes, told)
    _judge(item, outcomes, told, limit_s, why, f"for a limit other than {limit_s:g} s, change {place}")


def _fork(group: Group, options: Options, task: Task) -> Workers:
    environ = {**_env.environment(), **options.env}
    fork_cheaply(group.world_size)
    with warnings.catch_warnings():
        # Python 3.12 and newer warn of threads, which a fork does not copy; `limits` has rejected objects that can't be
        # forked.
        warnings.filterwarnings("ignore", r".*multi-threaded, use of fork", DeprecationWarning)
        try:
            return Workers(
                run_test,
                (group, task, random.getstate(), os.urandom(16)),
                group.world_size,
                environ=environ,
                num_threads=1,
                forked=True,
            )
        except OSError as error:
            from phalanx.testing.plugin import limits

            pytest.fail(limits.words_of_refused_fork(group.world_size, error), pytrace=False)


def _limit_s(item: pytest.Item, own_s: float, spent_s: float) -> float:
    """Return the limit of a test: its own, or less than pytest-timeout's, so that our report is printed first."""
    mark = item.get_closest_marker("timeout")
    given: Any = None
    if mark is not None:
        given = mark.args[0] if mark.args else mark.kwargs.get("timeout")
    elif item.config.pluginmanager.hasplugin("timeout"):
        with contextlib.suppress(ValueError, KeyError):
            given = item.config.getoption("timeout", None) or float(item.config.getini("timeout") or 0)
    if isinstance(given, (int, float)) and given > 0:
        return min(own_s, round(max(given * _SHARE_OF_LIMIT - spent_s, given / 10), 2))
    return own_s


@contextlib.contextmanager
def _terminal_comes_back() -> Iterator[None]:
    """After the block, take the terminal back from a rank that has ended in its debugger."""
    try:
        had_it = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        had_it = False
    try:
        yield
    finally:
        if had_it:
            shown.take_terminal(os.getpgrp())


# ---------------------------------------------------------------- the result


def _take_over(item: pytest.Item, told: list[Told]) -> None:
    """Adopt the output, logs, warnings, properties and coverage of the ranks."""
    capture = item.config.getoption("capture", "fd")
    seen: set[object] = set()
    logging_plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    for rank, one in enumerate(told):
        if capture in ("sys", "tee-sys"):
            sys.stdout.write(one.out)
            sys.stderr.write(one.err)
        if one.log and logging_plugin is not None:
            item.add_report_section("call", f"log of rank {rank}", one.log)
        for message, category, filename, lineno in one.warnings:
            if (key := (str(message), category, filename, lineno)) not in seen:
                seen.add(key)
                warnings.showwarning(message, category, filename, lineno)
        for pair in one.properties:
            if pair not in item.user_properties:
                item.user_properties.append(pair)
        shown.add_coverage(one.coverage)
    shown.replay_subtests(item, [one.subtests for one in told])


def _take_over_marks(item: pytest.Item, outcomes: list[Ending], told: list[Told]) -> None:
    """Adopt marks, such as xfail, that the test gave itself on all failed ranks or, if no rank failed, on any rank."""
    failed = [told[outcome.rank].marks for outcome in outcomes if outcome.failed and not outcome.is_victim]
    for mark in (mark for one in told for mark in one.marks):
        if mark not in item.own_markers and all(mark in marks for marks in failed):
            item.own_markers.append(mark)


def _judge(
    item: pytest.Item, outcomes: list[Ending], told: list[Told], limit_s: float, why: list[str], on_limit: str
) -> None:
    """Raise the result of the whole test, unless it passed on each rank.

    Args:
        why: Answer of ``phalanx why`` about ranks that hung.
        on_limit: Advice on the time limit at which hung ranks were killed.
    """
    __tracebackhide__ = True
    if result := result_of(outcomes):
        source = next(outcome.rank for outcome in outcomes if outcome.error is result)
        if told[source].longrepr is not None:
            vars(item)["_phalanx_shown"] = told[source].longrepr
        raise result
    culprit = find_culprit(outcomes)
    if culprit is None:
        return
    _no_second_debugger(item)
    longrepr = told[culprit.rank].longrepr
    if culprit.error is None or longrepr is None:
        for outcome in outcomes:
            outcome.last_words = shown.without_ours(outcome.last_words)
        error: BaseException = first_true_failure(outcomes, limit_s)
        lines = [*shown.fitted(why, item), *str(error).splitlines()]
        lines += shown.fitted([on_limit], item) if culprit.hung else []
        vars(item)["_phalanx_shown"] = shown.of_lines(lines, item)
        raise error
    lines = heads(culprit, outcomes, limit_s)
    if advice := shown.advice_for(culprit.error):
        lines.append(f"  hint: {advice}")
    lines = shown.fitted(lines, item)
    vars(item)["_phalanx_shown"] = shown.below_heads(lines, longrepr, culprit.rank)
    raise culprit.error


def _no_second_debugger(item: pytest.Item) -> None:
    """Keep --pdb from opening a second debugger in this process, which has no frames to show."""
    manager = item.config.pluginmanager
    plugin = manager.get_plugin("pdbinvoke")
    if plugin is not None:
        manager.unregister(plugin)
        item.addfinalizer(lambda: manager.register(plugin, "pdbinvoke"))
