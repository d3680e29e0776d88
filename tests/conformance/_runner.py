"""Run one test of the exam on forked ranks, and leave nothing of it behind.

A rank is a fork of this process, which has imported torch and the exam: it starts in
milliseconds where a fresh interpreter needs more than a second. Nothing here may use
autograd or start a thread before the last fork.

torch's own ``MultiProcessTestCase`` decides what passes. Around it this file adds what
it lacks: a hard limit after which every rank is killed and the test has failed, a check
of *every* rank's exit code (torch looks at the first only), the ranks' output, and a
look at what the test left over: processes, files in /dev/shm.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tests import shm

Ending = Literal["passed", "failed", "skipped"]

DEFAULT_LIMIT_S = 120.0

# After one rank failed, how long the others have to show what they saw.
GRACE_S = 5.0

# How long a process that a rank forgot may take to end by itself.
_ORPHAN_S = 1.0
_SETTLE_S = 20.0  # files of another test, which runs beside this one, go when that one ends

_OUTPUT_CHARS = 8_000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Result:
    """What one test of the exam came to; `detail` is the reason of a skip or failure."""

    name: str
    outcome: Ending
    duration_s: float
    detail: str = ""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class Runner:
    """Sits the exam of one backend at one world size, one test at a time.

    Owns a temporary directory, and takes over every child of this process, for as long
    as the context lasts: use a process of its own.

    Args:
        exam: The module that `load_exam` returned.
        limit_s: Seconds that one test may take.
    """

    def __init__(self, exam: ModuleType, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._case = _exam_case(exam, limit_s)
        self._directory = tempfile.TemporaryDirectory(prefix="exam-")

    def __enter__(self) -> "Runner":
        # Processes that a rank forgets become children of this one, which ends them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        tempfile.tempdir = self._directory.name  # torch's test case leaves a file per test
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary directory."""
        tempfile.tempdir = None
        self._directory.cleanup()

    def test_names(self) -> list[str]:
        """Return the names of all tests, sorted."""
        return list(unittest.TestLoader().getTestCaseNames(self._case))

    def run(self, name: str) -> Result:
        """Run test `name` and return its result; never raises for what the test does."""
        before = shm.files()
        start = time.perf_counter()
        report = _Report()
        with _environment_kept():
            self._case(name).run(report)
        left = [f"process {pid} ({what})" for pid, what in _end_children()]
        left += sorted(_orphaned_files(before))
        duration_s = time.perf_counter() - start
        if report.outcome == "passed" and left:
            return Result(name, "failed", duration_s, f"left behind: {', '.join(left)}")
        return Result(name, report.outcome, duration_s, report.detail)


class _Report(unittest.TestResult):
    """Keeps the outcome of a single test."""

    outcome: Ending = "failed"
    detail = "the test case reported nothing"

    def _set(self, outcome: Ending, detail: str) -> None:
        self.outcome, self.detail = outcome, detail

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._set("passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._set("skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._set("failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._set("passed", "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._set("failed", "passed, where the exam expects a failure")


def _exam_case(exam: ModuleType, limit_s: float) -> type[unittest.TestCase]:
    """Return the test case as torch's own driver makes it, with forked ranks."""

    class Exam(exam.TestDistBackend, exam.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
        def setUp(self) -> None:
            super().setUp()
            self.output_dir = Path(tempfile.mkdtemp(prefix="output-"))
            os.environ["EXAM_OUTPUT_DIR"] = str(self.output_dir)
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            die_with_parent()
            _redirect_output(Path(os.environ["EXAM_OUTPUT_DIR"]) / f"rank-{rank}")
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            # A spawned rank would read this while it imports the exam.
            exam.INIT_METHOD = os.environ["INIT_METHOD"]  # type: ignore[attr-defined]
            super()._run(rank, test_name, file_name, pipe, **kwargs)

        def _join_processes(self, fn: Any) -> None:
            try:
                elapsed_s = _join(self.processes, limit_s)
                self._check_return_codes(fn, elapsed_s)
            except unittest.SkipTest:
                raise
            except BaseException as error:
                raise AssertionError(f"{error}\n{_outputs(self.output_dir)}") from None
            finally:
                for pipe in self.pid_to_pipe.values():
                    pipe.close()

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            codes = [process.exitcode for process in self.processes]
            if elapsed_time >= limit_s:
                raise AssertionError(f"killed at the limit of {limit_s:g} s; exit codes {codes}")
            told_why = self.TEST_ERROR_EXIT_CODE in codes or fn in self.skip_return_code_checks
            if len(set(codes)) != 1 and not told_why:
                raise AssertionError(f"ranks ended differently: exit codes {codes}")
            super()._check_return_codes(fn, elapsed_time)

    return Exam


def _join(processes: list[Any], limit_s: float) -> float:
    """Wait for the ranks until `limit_s`; return the seconds it took, with none alive."""
    start = time.monotonic()
    deadline = start + limit_s
    alive = {process.sentinel: process for process in processes}
    while alive and (wait_s := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(alive), timeout=wait_s):
            process = alive.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    elapsed_s = time.monotonic() - start
    for process in alive.values():
        os.kill(process.pid, signal.SIGUSR1)  # writes every thread's stack to its output
    if alive:
        time.sleep(0.5)
    for process in alive.values():
        process.kill()
        process.join()
    return elapsed_s


def _redirect_output(path: Path) -> None:
    """Send this process's output, C++'s included, to the file `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _outputs(directory: Path) -> str:
    parts = []
    for path in sorted(directory.iterdir()):
        text = path.read_text(errors="replace").strip()
        if len(text) > _OUTPUT_CHARS:
            text = "..." + text[-_OUTPUT_CHARS:]
        if text:
            parts.append(f"---- output of {path.name} ----\n{text}")
    return "\n".join(parts)


def _end_children() -> list[tuple[int, str]]:
    """Reap every child process; return pid and command of those that had to be killed."""
    killed: list[tuple[int, str]] = []
    deadline = time.monotonic() + _ORPHAN_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return killed
        if pid == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        elif pid == 0:
            for child in _children():
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ")
                killed.append((child, command.decode(errors="replace").strip()))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Return the pids of this process's children, none of which is reaped meanwhile."""
    children = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            after_name = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                children.append(int(directory.name))
    return children


def _orphaned_files(before: set[str]) -> set[str]:
    """Return the files in /dev/shm that came up since and that no living process maps, after a moment to settle."""
    deadline = time.monotonic() + _SETTLE_S
    while (new := shm.unmapped(shm.files() - before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return new


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
