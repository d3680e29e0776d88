"""The way in which this package waits for what it can only poll: with ever longer pauses, until a deadline.

Looks are frequent at first and rare later, so polling adds at most a quarter to the length of a wait. Where the kernel
or Python can wait (for a descriptor, a process, a lock of this process), nothing is polled. This module does not import
torch: the launcher and the commands wait without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LEAST_S, _GROWTH = 0.0002, 1.25  # first pause between two checks, and its growth from one to the next


class StoreSilentError(TimeoutError):
    """The store does not answer yet: the process that serves it may be stopped, and may continue."""


def wait_until(
    look: Callable[[], T | None],
    deadline: float,
    *,
    seldom: Callable[[], None] = lambda: None,
    seldom_s: float = 0.1,
    least_s: float = _LEAST_S,
    most_s: float = 0.02,
) -> T | None:
    """Call `look` repeatedly until it returns something other than None, and return that; None at the deadline.

    Args:
        look: Function that looks once, called ever less often. If it raises `StoreSilentError`, that counts as None.
        deadline: Time on the monotonic clock.
        seldom: Function called every `seldom_s` during the wait, which may raise to end it.
        least_s: First pause between two looks.
        most_s: Longest pause between two looks.
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
