"""The code of a rank forked from the test's process: computes the rank's fixtures, runs the test, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import pickle
import random
import re
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.failure.last_words import LastWords
from phalanx.failure.victims import is_victim
from phalanx.testing.plugin import shown
from phalanx.testing.rank import Group, reached
from phalanx.testing.ranks import HELD
from phalanx.testing.results import make_portable


@dataclasses.dataclass
class Task:
    """The test that every rank runs.

    Attributes:
        runtest: The test's own ``runtest``.
        by_rank: Fixtures that the rank computes.
    """

    item: Any
    runtest: Callable[[], None]
    by_rank: list[str]


@dataclasses.dataclass
class Told:
    """The report of a rank to the test's process.

    Attributes:
        longrepr: Failure in the form in which pytest shows it; None if there is none.
        out, err: Captured output, if pytest captures output in memory.
        log: Captured log.
        warnings: Message, category, file and line of each warning.
        properties: Names and values recorded by ``record_property``.
        subtests: Reports of subtests, as pytest serializes them.
        coverage: Data of coverage.py, in its own dump format.
        marks: Marks that the test has added to itself.
    """

    longrepr: Any = None
    out: str = ""
    err: str = ""
    log: str = ""
    warnings: list[tuple[Any, type[Warning], str, int]] = dataclasses.field(default_factory=list)
    properties: list[tuple[str, object]] = dataclasses.field(default_factory=list)
    subtests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    coverage: bytes = b""
    marks: list[pytest.Mark] = dataclasses.field(default_factory=list)


_TORCHS_OWN = re.compile(r"^.*\bc10d-NullHandler-default:c10d_logger.py:.*\n?", re.MULTILINE)
"""Pattern of the long line that torch logs for each error of a collective, although the error itself is shown."""

_HYPOTHESIS = "_hypothesis_global_random"  # attribute with Hypothesis's random generator
_rank: int | None = None  # rank of this process; None if it is not a rank
_group: Group | None = None


def rank_of(request: pytest.FixtureRequest) -> int:
    """Return the rank of this process, for the fixture `rank`."""
    if _rank is None:
        asks = vars(request.node).get("_phalanx_sizes", ())
        pytest.fail(shown.BEFORE_FORK if asks else shown.NOT_MARKED.format("rank"), pytrace=False)
    return _rank


def session_of(rank: int) -> Any:
    """Return the session of this rank, for the fixture `group`."""
    import torch.distributed as dist

    if not dist.is_initialized():
        pytest.fail("the fixture group needs a process group: leave init=False and backend=None out of ranks()", False)
    import phalanx

    return phalanx.init()


def run_test(rank: int, group: Group, task: Task, random_state: Any, seed: bytes) -> None:
    """Run the test on `rank`, inside the process group, and report to the test's process."""
    global _rank, _group
    import torch.distributed as dist

    gc.freeze()  # otherwise the garbage collector would write to objects shared with the parent, and copy their pages
    random.setstate(random_state)  # otherwise each forked process would have a different state
    _draw_alike(seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _rank, _group = rank, group
    group.take_host(rank)
    listener = _Listener(task.item)
    call = pytest.CallInfo.from_call(lambda: _run(rank, group, task), "call")
    told, error = listener.told(call)
    _tell(told)
    if error is not None:
        raise error
    if dist.is_initialized():
        dist.destroy_process_group()


def _draw_alike(seed: bytes) -> None:
    """Make Hypothesis, if used, try the same examples on all ranks, so that their collectives match."""
    core = sys.modules.get("hypothesis.core")
    place = getattr(core, "threadlocal", core)
    if hasattr(place, _HYPOTHESIS):
        setattr(place, _HYPOTHESIS, random.Random(seed))


def _run(rank: int, group: Group, task: Task) -> None:
    item = task.item
    if group.backend is not None:
        group.init(rank)
    finalizers = [one for one, _ in item.session._setupstate.stack.values()]
    for one in finalizers:
        one.clear()  # pytest's own process runs these finalizers
    threads = _begin_threads(item)
    try:
        for name in task.by_rank:
            if name not in item.funcargs:
                item.funcargs[name] = item._request.getfixturevalue(name)
        task.runtest()
    finally:
        failures = []
        for one in (*reversed(finalizers), threads):
            while one:
                try:
                    one.pop()()
                except BaseException as error:
                    failures.append(error)
        if failures and sys.exc_info()[0] is None and not getattr(item, "_excinfo", None):
            raise failures[0]


def _begin_threads(item: Any) -> list[Callable[[], object]]:
    """Make pytest collect exceptions in threads and finalizers; return functions that warn of them or raise them."""
    ends: list[Callable[[], object]] = []
    for name in ("threadexception", "unraisableexception"):
        hook = getattr(item.config.pluginmanager.get_plugin(name), "pytest_runtest_call", None)
        if inspect.isgeneratorfunction(hook):  # before pytest 8.4
            wrapper = hook()
            next(wrapper)
            ends.append(functools.partial(next, wrapper, None))
        elif hook is not None:
            ends.append(functools.partial(hook, item))
    return ends


class _Listener:
    """Collects the output, warnings and other records that pytest would have collected in its own process."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self._capture = None
        if item.config.getoption("capture", "fd") in ("sys", "tee-sys"):
            self._capture = item.config.pluginmanager.get_plugin("capturemanager")
            self._capture.read_global_capture()
        plugin = item.config.pluginmanager.get_plugin("logging-plugin")
        self._log = getattr(getattr(plugin, "report_handler", None), "stream", None)
        self._log_start = len(self._log.getvalue()) if self._log is not None else 0
        self._num_properties = len(item.user_properties)
        self._marks = list(item.own_markers)
        self._coverage = shown.begin_coverage()
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        self._subtests = shown.hold_subtests(item)

    def told(self, call: Any) -> tuple[Told, BaseException | None]:
        item = self._item
        if getattr(item, "_excinfo", None):  # set for a unittest.TestCase
            call.excinfo = item._excinfo.pop(0)
        told = Told(
            warnings=[(one.message, one.category, one.filename, one.lineno) for one in self._caught or ()],
            properties=item.user_properties[self._num_properties :],
            subtests=self._subtests,
            marks=[mark for mark in item.own_markers if mark not in self._marks],
        )
        error = None
        if call.excinfo is not None:
            error = call.excinfo.value
            if not item.config.getoption("fulltrace", False):
                shown.end_at_the_call(item, call.excinfo)
            report = pytest.TestReport.from_item_and_call(item, call)
            told.longrepr = report.longrepr
            try:
                self._debug(call, report)
            except pytest.exit.Exception as end:  # the user has quit the debugger
                error, told.longrepr = end, None
            make_portable(error)
        if self._log is not None:
            told.log = _TORCHS_OWN.sub("", self._log.getvalue()[self._log_start :]).strip()
        told.coverage = shown.end_coverage(self._coverage)
        if self._capture is not None:
            told.out, told.err = self._capture.read_global_capture()
        return told, error

    def _debug(self, call: Any, report: Any) -> None:
        """Open the debugger of --pdb in this rank's process, which has the frames."""
        item = self._item
        is_wanted = item.config.getoption("usepdb", False) and item.get_closest_marker("xfail") is None
        if is_wanted and report.failed and not is_victim(LastWords.of_error(call.excinfo.value)):
            report.longrepr = shown.below_lines([f"rank {_rank} (pid {os.getpid()})"], report.longrepr)
            item.ihook.pytest_exception_interact(node=item, call=call, report=report)
            if getattr(item, "_explicit_tearDown", None):
                item._explicit_tearDown()


def _tell(told: Told) -> None:
    """Send the report to the test's process; objects that can't be pickled are sent as text."""
    if not _can_be_sent(told):
        told.longrepr = told.longrepr and str(told.longrepr)
        told.warnings = [_plain(one) for one in told.warnings]
        told.properties = [(name, str(value)) for name, value in told.properties]
        told.marks = [mark for mark in told.marks if _can_be_sent(mark)]
    reached("told", told)


def _plain(one: tuple[Any, type[Warning], str, int]) -> tuple[Any, type[Warning], str, int]:
    message, category, filename, lineno = one
    if _can_be_sent((message, category)):
        return one
    return UserWarning(f"{category.__name__}: {message}"), UserWarning, filename, lineno


def _can_be_sent(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


# ---------------------------------------------------------------- the debugger

_debugging = contextlib.ExitStack()


def enter_debugger() -> None:
    """Take the terminal for this rank, once no other rank's debugger has it; in other processes, do nothing."""
    if _rank is None or _group is None:
        return
    reached(HELD, True)
    _debugging.enter_context(shown.held_terminal(_group.folder))


def leave_debugger() -> None:
    """Give the terminal back; in processes that are not ranks, do nothing."""
    if _rank is None:
        return
    _debugging.close()
    reached(HELD, False)
