"""Output of a test's ranks, in the forms of pytest and of coverage.py."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)

from phalanx._errors import PhalanxError
from phalanx._text import broken_at, message_of
from phalanx.failure.ending import Ending
from phalanx.failure.last_words import LastWords, owner_of

NOT_MARKED = "the fixture {} is that of a test on ranks: mark the test with @pytest.mark.ranks(2)"
BEFORE_FORK = (
    "a rank is known once the ranks have been forked: ask for the fixture rank by name, as an argument of the test or "
    "of the fixture, rather than by request.getfixturevalue"
)
_OURS = re.compile(r'/(?:_pytest|pluggy|phalanx/testing/plugin)/[^"]*"')
_BELOW = ("phalanx", "torch", "Python")
_BAD_FORK = ("in forked subprocess", "CUDA driver initialization failed")
_SECOND_GROUP = "initialize the default process group twice"


def of_lines(lines: Sequence[str], item: pytest.Item) -> Any:
    """Return lines as a failure in pytest's form."""
    path, line, _ = item.reportinfo()
    crash = ReprFileLocation(str(path), (line or 0) + 1, lines[0])
    return ExceptionChainRepr([(_plain(lines), crash, None)])


def fitted(lines: Sequence[str], item: pytest.Item) -> list[str]:
    """Return lines, broken between words if pytest prints to a terminal; otherwise unchanged."""
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty:
        return list(lines)
    return broken_at(item.config.get_terminal_writer().fullwidth, lines)


def below_heads(heads: Sequence[str], longrepr: Any, rank: int) -> Any:
    """Return a rank's failure with `heads`, lines about all ranks, above it."""
    made = below_lines(heads, longrepr)
    crash = made.chain[-1][1] if isinstance(made, ExceptionChainRepr) else None
    if crash is not None:
        crash.message = f"rank {rank}: {crash.message}"
    return made


def below_lines(lines: Sequence[str], longrepr: Any) -> Any:
    """Return a failure in pytest's form with `lines` above it."""
    chain = getattr(longrepr, "chain", None)
    if chain is None and hasattr(longrepr, "reprtraceback"):
        chain = [(longrepr.reprtraceback, longrepr.reprcrash, None)]
    if chain is None:
        return "\n".join([*lines, str(longrepr)])
    made = ExceptionChainRepr([(_plain(lines), None, None), *chain])
    made.sections = list(getattr(longrepr, "sections", ()))
    return made


def end_at_the_call(item: Any, excinfo: Any) -> None:
    """Cut the traceback of a phalanx error after the line that called torch or phalanx."""
    if (filtered := getattr(item, "_traceback_filter", None)) is not None:  # pytest 7.4 and newer
        item._traceback_filter = lambda one: _up_to_the_call(filtered(one), one.value)
    # pytest shows the last frame as the place of the crash
    excinfo.traceback = _up_to_the_call(excinfo.traceback, excinfo.value)


def _up_to_the_call(traceback: Any, error: BaseException) -> Any:
    if not isinstance(error, PhalanxError):
        return traceback
    kept = len(traceback)
    while kept and owner_of(str(traceback[kept - 1].path)) in _BELOW:
        kept -= 1
    return traceback[:kept] if kept else traceback


def _plain(lines: Sequence[str]) -> ReprTraceback:
    return ReprTraceback([ReprEntryNative([f"{line}\n" for line in lines])], None, style="native")


def without_ours(words: LastWords) -> LastWords:
    """Return a rank's stacks without the frames of pytest and phalanx that called the test."""
    kept: list[str] = []
    is_below = False
    for line in words.lines:
        is_frame = line.startswith("  File ")
        is_below = is_frame and (is_below or _OURS.search(line) is not None)
        if not is_below:
            kept.append(line)
    return dataclasses.replace(words, lines=tuple(kept))


def advice_for(error: BaseException) -> str:
    """Return advice for an error that is specific to the mark; empty for other errors."""
    text = message_of(error)
    if _SECOND_GROUP in text:
        return "the mark has made a process group already; ranks(..., init=False) leaves that to the test"
    if any(words in text for words in _BAD_FORK):
        return (
            "pytest's process has asked CUDA something before it forked the ranks, such as torch.cuda.is_available() "
            "in conftest.py, or a package that it has imported did, as numba.cuda does: set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 for torch, and leave other questions to the ranks"
        )
    return ""


def why(outcomes: Sequence[Ending]) -> list[str]:
    """Return the answer of ``phalanx why`` about hanging ranks; an empty list if there is none."""
    with contextlib.suppress(Exception):  # the failure is reported anyway
        from phalanx.diagnose.jobs import find_job
        from phalanx.diagnose.why.evidence import gather
        from phalanx.diagnose.why.findings import conclude
        from phalanx.diagnose.why.wording import answer

        pids = {outcome.rank: outcome.pid for outcome in outcomes if outcome.exitcode is None}
        evidence = gather(find_job(str(next(iter(pids.values())))))
        if not any(pids.get(one.doing.rank) == one.look.pid for one in evidence.seen if not one.look.has_ended):
            return []  # the ranks have not begun yet, or have already ended
        return [answer(evidence, conclude(evidence))]
    return []


# ---------------------------------------------------------------- coverage.py


def flush_coverage() -> None:
    """Make coverage.py store the data of this process, so that forked ranks start without data."""
    if (current := _coverage()) is not None:
        current.get_data()


def begin_coverage() -> Any:
    """Make coverage.py, if active, collect data in this rank's memory; return the argument for `end_coverage`."""
    current = _coverage()
    if current is None:
        return None
    from coverage import CoverageData  # type: ignore[import-not-found,unused-ignore]

    data = CoverageData(no_disk=True)
    current._collector.covdata = data  # kept in memory, because the file belongs to the parent
    return current._collector, data


def end_coverage(begun: Any) -> bytes:
    """Return the coverage data since `begin_coverage`."""
    if begun is None:
        return b""
    collector, data = begun
    collector.flush_data()
    return bytes(data.dumps())


def add_coverage(told: bytes) -> None:
    """Add the coverage data of a rank to those of this process."""
    current = _coverage() if told else None
    if current is not None:
        from coverage import CoverageData

        data = CoverageData(no_disk=True)
        data.loads(told)
        current.get_data().update(data)


def _coverage() -> Any:
    kind = getattr(sys.modules.get("coverage"), "Coverage", None)
    return kind.current() if kind is not None else None


# ---------------------------------------------------------------- subtests


def hold_subtests(item: Any) -> list[dict[str, Any]]:
    """Withhold the reports of subtests from this rank's plugins; return the list in which they are collected."""
    config, manager = item.config, item.config.pluginmanager
    held: list[dict[str, Any]] = []
    call = manager._inner_hookexec

    def hold(name: str, methods: Any, kwargs: Any, firstresult: bool) -> Any:
        if name != "pytest_runtest_logreport":
            return call(name, methods, kwargs, firstresult)
        held.append(config.hook.pytest_report_to_serializable(config=config, report=kwargs["report"]))
        return []

    manager._inner_hookexec = hold
    return held


def replay_subtests(item: Any, told: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Report each subtest once: with the result of the first rank on which it failed, or else of the first rank."""
    chosen: dict[str, dict[str, Any]] = {}
    for data in (data for reports in told for data in reports):
        key = repr(data.get("_subtest.context"))
        if key not in chosen or (data["outcome"] == "failed" != chosen[key]["outcome"]):
            chosen[key] = data
    capture = item.config.pluginmanager.get_plugin("capturemanager")
    for data in chosen.values():
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        if report.failed:
            with contextlib.suppress(ImportError):  # before pytest 9
                from _pytest.subtests import failed_subtests_key

                item.config.stash[failed_subtests_key][report.id] += 1
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            item.ihook.pytest_runtest_logreport(report=report)


# ---------------------------------------------------------------- the terminal


@contextlib.contextmanager
def held_terminal(folder: str) -> Iterator[None]:
    """Hold the terminal during the block; the ranks of one test take turns."""
    from phalanx.debugging.prompt import held

    with open(os.path.join(folder, "terminal"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = None
        with contextlib.suppress(OSError):
            before = os.tcgetpgrp(0)
            take_terminal(os.getpgrp())
        if sys.stdin.fileno() != 0:  # multiprocessing has replaced sys.stdin by /dev/null
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
        with held("the test's debugger"):
            yield
        if before is not None:
            take_terminal(before)


def take_terminal(process_group: int) -> None:
    """Give the terminal to a process group, even if this process is in a background group."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, process_group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
