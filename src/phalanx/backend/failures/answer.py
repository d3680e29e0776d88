"""Runs ``phalanx why`` during a long wait, in a separate process, while this rank continues to wait.

The answer is printed after the report of the stall, noted in the black box, and becomes part of the error if the wait
times out. The report itself does not wait for the answer. In the default group, only the lowest waiting rank asks; a
rank asks once per operation. Without py-spy, or without permission to look into other ranks, there is no answer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

from phalanx._errors import Failure
from phalanx.backend.deadlines import ANSWER_S, ASK_WHY_S
from phalanx.failure.notices import notice
from phalanx.record import writer
from phalanx.record.box import ANSWER

_answers: dict[tuple[str, str, int], str] = {}
"""Answers by operation; an answer is empty while it is awaited."""


def ask_about(failure: Failure, waited_s: float) -> None:
    """Ask in the background why an operation waits, unless it is too early or another rank asks."""
    key = _key(failure)
    if waited_s < ASK_WHY_S or key in _answers or not is_first(failure):
        return
    _answers[key] = ""
    with contextlib.suppress(RuntimeError):  # no thread can be started, or the interpreter is ending
        threading.Thread(target=_ask, args=(key,), name="phalanx-why", daemon=True).start()


def answer_to(failure: Failure) -> str:
    """Return the answer about an operation; empty if there is none."""
    return _answers.get(_key(failure), "")


def _key(failure: Failure) -> tuple[str, str, int]:
    return failure.group, failure.op, failure.seq


def is_first(failure: Failure) -> bool:
    """Whether this rank is the lowest waiting one; True if that is unknown, as in all groups but the default one."""
    return failure.group != "default" or set(range(failure.rank)) <= set(failure.ranks)


def _ask(key: tuple[str, str, int]) -> None:
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "why", "--brief", str(os.getpid())],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False,
        )  # fmt: skip
        if done.returncode == 0 and (sentence := done.stdout.strip()):
            _answers[key] = sentence
            writer.note(f"{ANSWER}{sentence}")
            notice([f"{ANSWER}{sentence}"])
