"""Signals that ask a job to make room: noticed on any rank, obeyed by all after the same step."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from types import FrameType

from phalanx import _env

_AGAIN_S = 1.0  # a service manager's signal comes twice: to each process, and through the supervisor
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """While open, notes SIGTERM and SIGUSR1 instead of dying of them.

    Attributes:
        signal: The number of the first that came, or 0.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._noted_s = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal and number == signal.SIGTERM and now_s - self._noted_s > _AGAIN_S:  # at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.signal:
            self.signal, self._noted_s = number, now_s


def requeue() -> str:
    """Have Slurm start this job again; return what was done, empty outside Slurm."""
    job = _env.environment().get("SLURM_JOB_ID")
    if not job or not shutil.which("scontrol"):
        return ""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30, capture_output=True)
        return f"job {job} is queued again"
    return f"scontrol could not requeue job {job}"
