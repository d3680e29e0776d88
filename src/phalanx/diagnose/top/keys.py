"""Events at a terminal that shows a picture: keys, and changes of its size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType

from phalanx._text import is_terminal

_KEYS = {b"\x1b[A": "up", b"k": "up", b"\x1b[B": "down", b"j": "down", b"q": "quit", b"Q": "quit", b"\x04": "quit"}
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Keys:
    """Reads keys one by one, without echo, until the ``with`` block ends; Ctrl-C remains an interrupt.

    Without a terminal on standard input, there are no keys.
    """

    def __enter__(self) -> Keys:
        self._input = sys.stdin.fileno() if is_terminal(sys.stdin) else None
        self._typed = b""
        self._pipe = os.pipe()
        for fd in self._pipe:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
        self._handlers = {number: signal.signal(number, _leave) for number in _ENDS}
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._note_size)
        self._handlers[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._go_on)
        # Ctrl-Z is ignored, because suspending would leave the picture on the shell's screen.
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        if self._input is not None:
            self._modes = termios.tcgetattr(self._input)
            self._take_keys(self._input)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._input is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for fd in self._pipe:
            os.close(fd)

    def wait(self, seconds: float) -> str:
        """Wait for an event; return ``up``, ``down``, ``quit``, ``resize`` or ``other``, or "" after `seconds`."""
        watched = [self._pipe[0]] if self._input is None else [self._pipe[0], self._input]
        if self._typed:
            return self._key()
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if self._pipe[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
            return "resize"
        if ready and self._input is not None:
            self._typed = os.read(self._input, 64)
            return self._key() if self._typed else "quit"
        return ""

    def _key(self) -> str:
        """Return the next typed key; arrows are three bytes."""
        size = 3 if self._typed.startswith(b"\x1b[") else 1
        key, self._typed = self._typed[:size], self._typed[size:]
        return _KEYS.get(key, "other")

    @staticmethod
    def _take_keys(fd: int) -> None:
        tty.setcbreak(fd)
        modes = termios.tcgetattr(fd)
        modes[6][termios.VSUSP] = b"\0"  # Ctrl-Z is read as a plain key, see above
        termios.tcsetattr(fd, termios.TCSANOW, modes)

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        """On SIGCONT, set the terminal's modes again, because the shell has set its own meanwhile."""
        if self._input is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                self._take_keys(self._input)
        self._note_size(number, frame)

    def _note_size(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe[1], b"\0")


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit cleanly, so that the terminal's modes and screen are restored."""
    raise SystemExit(128 + number)
