"""What the fault tests look at from outside: is a rank asleep, does the kernel tell how a process ended."""

from __future__ import annotations

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
    """Return once the main thread of the process sleeps on a futex and stays there, as one does in a long wait."""
    deadline = time.monotonic() + timeout_s
    num_seen = 0
    while time.monotonic() < deadline:
        num_seen = num_seen + 1 if Path(f"/proc/{pid}/syscall").read_text().split()[0] == _FUTEX else 0
        if num_seen == 3:
            return
        time.sleep(0.002)  # a waiting thread makes no event
    raise TimeoutError(f"process {pid} did not begin to wait within {timeout_s:g} s")
