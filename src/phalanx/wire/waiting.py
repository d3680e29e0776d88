"""Polls a condition with ever longer pauses, until a deadline; for conditions for which no other wait exists.

The checks are frequent at first and rare later, so polling adds at most a quarter to the length of a wait. Conditions
for which the kernel or Python can wait (a descriptor, a process, a lock of this process) are not polled. This module
does not import torch, because the launcher and the commands use it without torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LEAST_S, _GROWTH = 0.0002, 1.25  # first pause between two checks, and the factor from one pause to the next


class StoreSilentError(TimeoutError):
    """The store has not answered in time; it may still answer, because its process may only be suspended (SIGSTOP)."""


def wait_until(
    look: Callable[[], T | None],
    deadline: float,
    *,
    seldom: Callable[[], None] = lambda: None,
    seldom_s: float = 0.1,
    least_s: float = _LEAST_S,
    most_s: float = 0.02,
) -> T | None:
    """Call `look` until its result is not None, and return that result; return None at the deadline.

    Args:
        look: Function that checks the condition once, called ever less often. If it raises `StoreSilentError`, that
            counts as None.
        deadline: Time on the monotonic clock.
        seldom: Function called every `seldom_s` during the wait; it may raise an exception to end the wait.
        least_s: First pause between two calls of `look`.
        most_s: Longest pause between two calls of `look`.
    """
    pause_s, next_s = min(least_s, most_s), time.monotonic() + seldom_s
    while True:
        with contextlib.suppress(StoreSilentError):
            if (found := look()) is not None:
                return found
        now_s = time.monotonic()
        if now_s >= next_s:
            with contextlib.suppress(StoreSilentError):
                seldom()
            now_s = time.monotonic()
            next_s = now_s + seldom_s
        if now_s >= deadline:
            return None
        time.sleep(min(pause_s, deadline - now_s))
        pause_s = min(_GROWTH * pause_s, most_s)
