"""A temporary extension of a group's timeouts, which ends with the first operation that starts after it.

torch's ``_add_ephemeral_timeout`` adds to the timeout of every operation that starts from now on. The extension ends
when the first of these operations is over; operations that have already started keep their deadlines. Gloo ignores the
call, NCCL obeys it.

While an extension lasts, an `Extended` object stands in for the core, so operations without an extension cost nothing
extra. The alternative, a check in every call, would take 0.1 us of the call's 4 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


class _Blocking:
    """Stands in for the handle of an operation that runs in the calling thread."""

    done = False


@dataclass(eq=False)
class _Extension:
    """One extension of the timeouts.

    Attributes:
        by_s: Seconds that are added to each timeout.
        until: Handle of the operation with which the extension ends; None until such an operation has begun.
    """

    by_s: float
    until: Any = None


def _is_given(value: Any) -> bool:
    return value is not None


def _message(name: str) -> Callable[..., Any]:
    """Return a method that starts a message through the core's method of this name."""

    def start(self: Extended, *args: Any) -> Any:
        return self._start(lambda: getattr(self.core, name)(*args), _is_given)

    return start


class Extended:
    """The core of a group while its timeouts are extended.

    Args:
        core: Core, or group on several hosts.
        timeout_s: Timeout of operations that have none of their own, in seconds.
        restore: Function called with this object once no extension is left.

    Attributes:
        core: The argument `core`.
    """

    def __init__(self, core: Any, timeout_s: float, restore: Callable[[Extended], object]) -> None:
        self.core = core
        self._timeout_s = timeout_s
        self._restore = restore
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the thread that holds it
        self._extensions: list[_Extension] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def extend(self, by_s: float) -> None:
        """Add an extension of `by_s` seconds; several extensions add up."""
        with self._lock:
            self._extensions.append(_Extension(by_s))
            self.set_timeout(self._timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of operations that have none of their own; the extensions are added to it."""
        with self._lock:
            self.core.set_timeout(timeout_s + self._by_s)
            self._timeout_s = timeout_s

    @property
    def _by_s(self) -> float:
        return sum(extension.by_s for extension in self._extensions)

    # ---- calls that start an operation -----------------------------------------------------------------------------

    def run(self, call: Any, ins: Any, outs: Any, timeout: Any, site: str | None) -> Any:
        return self._start(lambda: self.core.run(call, ins, outs, self._longer(timeout), site), lambda _: True)

    def run_plain(self, *args: Any) -> bool:
        *others, timeout = args
        return self._start(lambda: self.core.run_plain(*others, self._longer(timeout)), bool)

    def all_reduce_pieces(self, *args: Any) -> Any:
        *others, timeout = args
        return self._start(lambda: self.core.all_reduce_pieces(*others, self._longer(timeout)), lambda _: True)

    def average_plain(self, *args: Any) -> Any:
        *others, timeout = args
        return self._start(lambda: self.core.average_plain(*others, self._longer(timeout)), _is_given)

    send, recv = _message("send"), _message("recv")
    send_plain, recv_plain = _message("send_plain"), _message("recv_plain")
    send_now, recv_now = _message("send_now"), _message("recv_now")

    def _start(self, start: Callable[[], Any], has_begun: Callable[[Any], bool]) -> Any:
        """Start an operation. The extensions that were added since the previous operation end with this one.

        Args:
            start: Function that runs the operation, or starts it and returns its handle.
            has_begun: Function that returns, given the result of `start`, whether the operation has begun. The core may
                have declined it.
        """
        with self._lock:
            self._end([one for one in self._extensions if one.until is not None and one.until.done])
            mine = [one for one in self._extensions if one.until is None]
            for extension in mine:
                extension.until = _Blocking
        try:
            value = start()
        except BaseException:
            self._end(mine)
            raise
        with self._lock:
            for extension in mine:
                extension.until = value if hasattr(value, "done") else None
            if has_begun(value) and not hasattr(value, "done"):
                self._end(mine)
        return value

    def _longer(self, timeout: Any) -> Any:
        """Return a call's own timeout, extended. Zero or less means the group's timeout, which is extended already."""
        if not isinstance(timeout, timedelta):
            return timeout + self._by_s if timeout > 0 else timeout
        if timeout <= timedelta(0):
            return timeout
        return timeout + min(timedelta(seconds=self._by_s), timedelta.max - timeout)

    def _end(self, extensions: Sequence[_Extension]) -> None:
        """Remove extensions; after the last one, restore the core."""
        if not extensions:
            return
        with self._lock:
            self._extensions = [one for one in self._extensions if one not in extensions]
            self.set_timeout(self._timeout_s)
            if not self._extensions:
                self._restore(self)
