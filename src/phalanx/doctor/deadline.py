"""A deadline for any call, even if the call waits inside native code."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LOOK_S = 0.5


class UnansweredError(TimeoutError):
    """The call did not return in time. Its thread keeps running."""


def within(limit_s: float, call: Callable[[], T], is_hopeless: Callable[[], bool] = lambda: False) -> T:
    """Return the result of a call that runs in a thread of its own, or raise its error.

    Args:
        limit_s: Seconds after which the thread is abandoned.
        call: Function to call.
        is_hopeless: Function, called about every half second, that returns whether `call` can no longer succeed. If so,
            `call` gets another half second.

    Raises:
        UnansweredError: `call` did not return in time.
    """
    answer: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(call())
        except Exception as error:
            answer.put(error)

    threading.Thread(target=run, name="doctor-call", daemon=True).start()
    ends_s = time.monotonic() + limit_s
    may_go_on = True
    while may_go_on and (left_s := ends_s - time.monotonic()) > 0:
        may_go_on = not is_hopeless()
        with contextlib.suppress(queue.Empty):
            result = answer.get(timeout=min(left_s, _LOOK_S))
            if isinstance(result, Exception):
                raise result
            return result
    raise UnansweredError(f"no answer within {limit_s:g} s")
