"""The supervisor's loop: waits for readable descriptors, signals and a deadline. One thread; no callback may block."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable

from phalanx.launch.screen.ranks import Output

Event = Callable[[], None]


class EventLoop:
    """Calls back when a descriptor is readable, and keeps signals until they are handled.

    Args:
        tell: Function to call with the problem when the log of a watched output can't be written.

    Attributes:
        signals: Signals received but not handled yet, oldest first.
        deadline: Time on the monotonic clock at which `wait` returns at the latest; None: no limit.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.signals: list[int] = []
        self.deadline: float | None = None
        self._tell = tell
        self._caught: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self.watch(self._wake_read, self._drain_wakes)

    def catch(self, signals: Iterable[int]) -> None:
        """Record these signals from now on, except signals that were ignored when this process started."""
        # Handlers only record the signal; Python writes a byte to the pipe, which wakes the loop.
        for sig in dict.fromkeys(signals):
            if signal.getsignal(sig) is not signal.SIG_IGN:  # so that a job under nohup still ignores SIGHUP
                signal.signal(sig, lambda got, _: self.signals.append(got))
                self._caught.append(sig)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def note(self, sig: int) -> None:
        """Act as if a signal had been received."""
        self.signals.append(sig)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def stop_process(self) -> None:
        """Suspend this process until SIGCONT, as SIGTSTP does by default; do nothing if no shell could continue it."""
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)

    def hold_signals(self) -> None:
        """Block the caught signals for good; while Python exits, its handlers are gone, and a signal would kill us."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)

    def close(self) -> None:
        self._selector.close()
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def watch(self, fd: int, callback: Event) -> None:
        """Call `callback` from `wait` whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def watch_output(self, output: Output) -> None:
        """Forward `output` until it ends."""

        def carry() -> None:
            output.carry()
            if output.ended:
                self.unwatch(output.fd)
            if output.log_problem:
                self._tell(output.log_problem)

        self.watch(output.fd, carry)

    def close_output(self, output: Output) -> None:
        if self.is_watched(output.fd):
            self.unwatch(output.fd)
        output.close()

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def wait(self, timeout_s: float | None = None) -> None:
        """Handle events; return after the first event, after `timeout_s` or at the deadline."""
        timeout = timeout_s
        if self.deadline is not None:
            left_s = max(0.0, self.deadline - time.monotonic())
            timeout = left_s if timeout_s is None else min(timeout_s, left_s)
        for key, _ in self._selector.select(timeout):
            if self.is_watched(key.fd):  # an earlier callback may have closed the descriptor
                key.data()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
