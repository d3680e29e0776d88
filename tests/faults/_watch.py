"""What the fault tests look at from outside: is a rank asleep, does the kernel tell how a process ended."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

_FUTEX = {"x86_64": "202", "aarch64": "98"}[platform.machine()]
_RELEASE = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])

TELLS_ENDING = _RELEASE >= (6, 15)
"""Older kernels tell a peer how a process ended only until its parent has collected it: the facts may be None."""

NAMED_WITHIN_S = 1.0
"""Every survivor must have named the culprit by then."""


def wait_until_asleep(pid: int, timeout_s: float = 20.0) -> None:
    """Return once a thread of the process sleeps on a futex, as one does that waits in an operation."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "syscall").read_text().split()[0] == _FUTEX:
                return
        os.sched_yield()
    raise TimeoutError(f"process {pid} did not begin to wait within {timeout_s:g} s")
