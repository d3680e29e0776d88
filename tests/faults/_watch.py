"""What the fault tests look at: is a rank asleep, does it raise, does the kernel tell how a process ended."""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.testing import reached

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


@contextlib.contextmanager
def telling(point: str, kind: type[BaseException]) -> Iterator[None]:
    """In a rank: tell the test that the block has raised an error of that kind, which goes on."""
    try:
        yield
    except kind:
        reached(point)
        raise


def start_waiting(wait: Callable[[], None]) -> threading.Thread:
    """In a rank: return a thread that runs `wait`, once it sleeps there."""
    thread = threading.Thread(target=wait)
    thread.start()
    assert thread.native_id is not None
    wait_until_asleep(thread.native_id)
    return thread
