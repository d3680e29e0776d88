"""What is shown of the ranks of a test, in the forms of pytest and of coverage.py."""

from __future__ import annotations

import contextlib
import fcntl
import os
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

from phalanx.launch.outcome import Outcome

NOT_MARKED = "the fixture {} is that of a test on ranks: mark the test with @pytest.mark.ranks(2)"
BEFORE_FORK = (
    "a rank is known once the ranks have been forked: ask for the fixture rank by name, as an argument of the test or "
    "of the fixture, rather than by request.getfixturevalue"
)
_SECOND_GROUP = "initialize the default process group twice"


def of_lines(lines: Sequence[str], item: pytest.Item) -> Any:
    """Return a failure that is told by lines alone."""
    path, line, _ = item.reportinfo()
    crash = ReprFileLocation(str(path), (line or 0) + 1, lines[0])
    return ExceptionChainRepr([(_plain(lines), crash, None)])


def below_heads(heads: Sequence[str], longrepr: Any, rank: int) -> Any:
    """Return a failure as a rank has shown it, below lines about all ranks."""
    chain = getattr(longrepr, "chain", None)
    if chain is None and hasattr(longrepr, "reprtraceback"):
        chain = [(longrepr.reprtraceback, longrepr.reprcrash, None)]
    if chain is None:
        return "\n".join([*heads, str(longrepr)])
    crash = chain[-1][1]
    if crash is not None:
        crash.message = f"rank {rank}: {crash.message}"
    made = ExceptionChainRepr([(_plain(heads), None, None), *chain])
    made.sections = list(getattr(longrepr, "sections", ()))
    return made


def _plain(lines: Sequence[str]) -> ReprTraceback:
    return ReprTraceback([ReprEntryNative([f"{line}\n" for line in lines])], None, style="native")


def advice_for(error: BaseException) -> str:
    """Return what to do about a mistake that is the mark's; empty if it is none."""
    if _SECOND_GROUP in str(error):
        return "the mark has made a process group already; ranks(..., init=False) leaves that to the test"
    return ""


def why(outcomes: Sequence[Outcome]) -> list[str]:
    return []


def begin_coverage() -> Any:
    return None


def end_coverage(begun: Any) -> bytes:
    return b""


def add_coverage(data: bytes) -> None:
    pass


def hold_subtests(item: Any) -> list[dict[str, Any]]:
    return []


def replay_subtests(item: Any, told: Sequence[Sequence[dict[str, Any]]]) -> None:
    pass


# ---------------------------------------------------------------- the terminal


@contextlib.contextmanager
def held_terminal(folder: str) -> Iterator[None]:
    """Have the terminal, which the ranks of one test have by turns."""
    from phalanx.debugging.prompt import held

    with open(os.path.join(folder, "terminal"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = None
        with contextlib.suppress(OSError):
            before = os.tcgetpgrp(0)
            take_terminal(os.getpgrp())
        if getattr(sys.stdin, "name", None) == os.devnull:  # as multiprocessing leaves it
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
        with held("the test's debugger"):
            yield
        if before is not None:
            take_terminal(before)


def take_terminal(process_group: int) -> None:
    """Give the terminal to a process group, from whichever group this process is in."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, process_group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
