"""Preemption: signals that ask a job to end early, noticed on any rank, and acted on by all ranks after the same step.

A rank that was asked to end saves its state, unless weights are not finite, and exits with 75 (EX_TEMPFAIL). Ctrl-C is
such a request, like SIGTERM, so under a launcher, the exit code is 75 in both cases. Without a launcher, Ctrl-C gives
130, which shells expect. Two SIGINT within 0.15 s count as one, because torchrun passes on the signal that the terminal
has already sent to the ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from phalanx import _env
from phalanx._text import signal_name
from phalanx._torch import shield
from phalanx.record.notes import note_preempted, words_on_disk
from phalanx.train.report.run_log import RunLog
from phalanx.wire.rank_group import RankGroup

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A signal from a service manager, or Ctrl-C under torchrun, may arrive twice: directly and through the launcher. A
# second signal within this time counts as the first. SIGUSR1 is not listed, because a second one never ends a rank.
_AGAIN_S: dict[int, float] = {signal.SIGTERM: 1.0, signal.SIGINT: 0.15}


class Preemption:
    """While open, records SIGTERM, SIGUSR1 and Ctrl-C instead of dying from them; a later SIGTERM or Ctrl-C is fatal.

    Args:
        speaks: Whether to tell the user what a Ctrl-C does; one rank is enough.
        checkpoints: Folder of the checkpoints, for a message about what is on disk when a second Ctrl-C ends the
            process.

    Attributes:
        signal: Number of the first signal that arrived, or 0.
    """

    def __init__(self, *, speaks: bool = False, checkpoints: str = "") -> None:
        self.signal: int = 0
        self._speaks = speaks
        self._checkpoints = checkpoints
        self._noted_s = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Preemption:
        shield.watch()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGINT or not _keeps_interrupts():
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal and now_s - self._noted_s > _AGAIN_S.get(number, math.inf):
            _show_cursor()
            if number == signal.SIGINT:
                self._say(f"\nCtrl-C again: ended at once; {words_on_disk(self._checkpoints)}\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.signal:
            self.signal, self._noted_s = number, now_s
            if number == signal.SIGINT:
                self._say("\nCtrl-C: saving after this step; once more to end at once\n")

    def _say(self, text: str) -> None:
        if self._speaks:
            with contextlib.suppress(OSError):  # written without print(), which the signal may have interrupted
                os.write(2, text.encode())


def _keeps_interrupts() -> bool:
    """Return whether to leave Ctrl-C alone: in a notebook or a prompt, Ctrl-C interrupts the cell, not the process."""
    return hasattr(sys, "ps1") or signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _show_cursor() -> None:
    """Show the terminal's cursor again, which a progress bar has hidden."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")


def leave(
    run_log: RunLog, number: int, step: int, *, is_saved: bool, ranks: RankGroup, begins_anew: bool = False
) -> NoReturn:
    """End this rank after a step because of a signal, with the exit code for that signal.

    Args:
        run_log: Log of the run.
        number: Number of the signal.
        step: Number of the step.
        is_saved: Whether the state of that step is on disk.
        ranks: All ranks of the job.
        begins_anew: Whether the script, if it is started again, starts over instead of resuming from that step.
    """
    run_log.record("preempted", step=step, signal=number)
    saved = "saved" if is_saved else "weights that are not finite were not saved"
    note = _requeue() if ranks.rank == 0 and number != signal.SIGINT else ""
    why = f"preempted by {signal_name(number)}"
    if number == signal.SIGINT:
        why = "stopped by Ctrl-C"
        note = 'start again with resume="auto" to resume' if begins_anew else "start again to resume"
    run_log.say(f"{why}: {saved} after step {step}{note and f'; {note}'}")
    run_log.report()
    note_preempted()
    raise SystemExit(_exit_code(number))


def _exit_code(number: int) -> int:
    """Return the exit code of a rank that ends because of a signal: 130 for Ctrl-C without a launcher, else 75."""
    is_launched = "TORCHELASTIC_RUN_ID" in _env.environment()
    return 128 + number if number == signal.SIGINT and not is_launched else _env.PREEMPTED_CODE


def _requeue() -> str:
    """Ask Slurm to requeue this job; return a line about the result, or "" outside Slurm."""
    job = _env.environment().get("SLURM_JOB_ID")
    if not job or not shutil.which("scontrol"):
        return ""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30, capture_output=True)
        return f"job {job} is queued again"
    return f"scontrol could not requeue job {job}"
