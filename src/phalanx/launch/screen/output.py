"""The output of all ranks, on one terminal or in one pipe, without mixing lines.

Every rank's lines are written whole, each with the prefix ``[rank N]``. On a terminal, rank 0 is shown live instead,
character by character, so that its progress bar moves; lines of other ranks are inserted above the line that rank 0 is
writing. While a debugger's prompt is open, the prompt is live, and rank 0 is shown like the other ranks.

If we are on a terminal, rank 0 writes to a pseudo-terminal; all other ranks write to pipes. The pseudo-terminal is
narrower than the screen by the length of the prefix, because a progress bar that wraps can't be rewritten in place. For
the same reason, the rank gets an empty COLUMNS variable if the user's value is too large. The Trainer's bar uses rich,
which captures stderr and shows it on stdout. Under ``phalanx run``, warnings bypass rich; otherwise the warnings of
rank 0 would look different from the warnings of other ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable

_STDOUT, _STDERR = 1, 2
_ATOMIC_BYTES = select.PIPE_BUF  # once a pipe has room, writing this much never blocks
_LOOK_UP_MS = 100
_MAX_LINE_BYTES = 1 << 20  # a longer line is cut, so that a rank that never ends its line can't fill the memory
_MAX_KEPT_BYTES = 1 << 14  # size limit for the line under the cursor; a terminal shows less
_MAX_SEQUENCE_BYTES = 1 << 12  # anything longer does not count as an escape sequence
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red

_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")

# One step of a live stream: a line's end, a return, an escape sequence, or plain text.
_LIVE_TOKEN = re.compile(rb"\n|\r|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[]?|[^\n\r\x1b]+")
_MOVE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")  # an escape sequence that sets no style
_ERASE_LINE = b"\r\x1b[2K"
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


def printable(text: str) -> bytes:
    """Return a text of the launcher with control characters replaced: the text may quote ranks or hosts."""
    return text.translate(_CONTROLS).encode(errors="backslashreplace")


def prefix(rank: int, *, colour: bool) -> bytes:
    """Return the prefix of each line of `rank`."""
    text = f"[rank {rank}]"
    if colour:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode() + b" "


class Screen:
    """One of the launcher's own outputs, shared by all ranks; nothing else writes to it.

    Args:
        is_ending: Function that is called while nobody reads the output, and returns whether to drop the rest because
            the launcher is ending.
        on_closed: Function to call once, when the reader of this output is gone.
    """

    def __init__(
        self, fd: int, is_ending: Callable[[], bool] = lambda: False, on_closed: Callable[[], None] = lambda: None
    ) -> None:
        self.fd = fd
        self._is_ending = is_ending
        self._on_closed = on_closed
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self.is_terminal: bool = os.isatty(fd)
        # State of the live rank, whose stdout and stderr share the cursor, as without a launcher.
        self.open_line: bytes = b""  # the unfinished line, as the terminal shows it
        self.style = b""  # escape sequences for the style, received before the line began
        self.writer: LiveStream | None = None  # the stream that writes the open line
        self.borrower: LiveStream | None = None  # a debugger whose prompt is at the cursor; other lines go above it
        self._is_broken = False
        self._hides_cursor = False

    def room_of(self, rank: int) -> int:
        """Return the columns that a rank's lines have beside their prefix; 0 if the width is unknown."""
        columns = 0
        with contextlib.suppress(OSError):  # the screen is no terminal, or has hung up
            columns = os.get_terminal_size(self.fd).columns
        return max(20, columns - len(prefix(rank, colour=False))) if columns else 0

    def show_cursor(self) -> None:
        """Show the cursor again if a rank that was killed has hidden it, as progress bars do."""
        if self._hides_cursor:
            self.write(_SHOW_CURSOR)

    def write_lines(self, lines: bytes) -> None:
        """Write `lines`, endings included, above the line that is still being written."""
        self.write(_ERASE_LINE + lines + self.open_line if self.open_line else lines)

    def end_line(self) -> None:
        """Move the cursor to the start of a new line, unless it is already at the start of a line."""
        if self.open_line:
            self.open_line = b""
            if self.writer is not None:
                self.writer.is_cut = True
            self.write(b"\n")

    def lend(self, borrower: LiveStream) -> None:
        """Give the cursor to a debugger, on a line of its own, until ``self.borrower`` is None again."""
        self.borrower = borrower
        if self.writer is not borrower:
            self.end_line()

    def write(self, data: bytes) -> None:
        """Write all of `data`; after a failure, such as a full disk, report the failure and drop the rest."""
        if (last := max(data.rfind(_HIDE_CURSOR), data.rfind(_SHOW_CURSOR))) >= 0:
            self._hides_cursor = data.startswith(_HIDE_CURSOR, last)
        view = memoryview(data)
        try:
            while view and not self._is_broken:
                if not self._poll.poll(_LOOK_UP_MS):
                    self._is_broken = self._is_ending()
                    continue
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self.fd, view[:_ATOMIC_BYTES]) :]
        except BrokenPipeError:
            self._is_broken = True
            self._on_closed()
        except OSError as error:
            self._is_broken = True
            with contextlib.suppress(OSError):
                name, other = ("stdout", _STDERR) if self.fd == _STDOUT else ("stderr", _STDOUT)
                said = f"phalanx run: can't write to {name} ({error.strerror}): from now on, it goes only to the logs\n"
                os.write(other, said.encode())


class LineStream:
    """Forwards the output of a rank in whole lines. If a line was overwritten, only its last state is forwarded."""

    def __init__(self, screen: Screen, line_prefix: bytes) -> None:
        self._screen = screen
        self._prefix = line_prefix
        self._pending = b""

    def feed(self, data: bytes) -> None:
        whole, newline, self._pending = (self._pending + data).rpartition(b"\n")
        if newline:
            self._screen.write_lines(b"".join([self._line(line) for line in whole.split(b"\n")]))
        if len(self._pending) > _MAX_LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Forward the unfinished last line."""
        if self._pending:
            self._screen.write_lines(self._line(self._pending))
            self._pending = b""

    def take_back(self) -> bytes:
        """Return the unfinished last line, and forget it."""
        pending, self._pending = self._pending, b""
        return pending

    def _line(self, line: bytes) -> bytes:
        # A progress bar overwrites its line after each "\r", so a terminal shows only the text after the last "\r".
        shown = line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line
        return self._prefix + shown + b"\n"


class LiveStream:
    """Forwards the output of the one rank that owns the cursor, with a prefix at the start of each line.

    Escape sequences that move the cursor or erase are forwarded at once. Escape sequences that set a style wait until
    the prefix is written, because the prefix resets the style.

    Attributes:
        is_cut: Whether another writer has ended our line on the screen, so that our own newline has to be dropped.
    """

    def __init__(self, screen: Screen, line_prefix: bytes) -> None:
        self._screen = screen
        self._prefix = line_prefix
        self._pending = b""
        self._aside = LineStream(screen, line_prefix)  # gets the output while another stream has the cursor
        self.is_cut = False

    def feed(self, data: bytes) -> None:
        data = self._aside.take_back() + self._pending + data
        if self._has_no_cursor:
            self._pending = b""
            self._aside.feed(self._without_cut_end(_MOVE.sub(b"", data)))
            return
        cut = data.rfind(b"\x1b")
        torn = cut >= 0 and re.fullmatch(rb"\x1b(\[[0-?]*[ -/]*)?", data[cut:]) is not None
        torn = torn and len(data) - cut < _MAX_SEQUENCE_BYTES
        data, self._pending = (data[:cut], data[cut:]) if torn else (data, b"")
        self._screen.write(b"".join([self._step(token) for token in _LIVE_TOKEN.findall(data)]))

    def finish(self) -> None:
        if self._has_no_cursor:
            self._aside.finish()
            return
        self.feed(b"")
        self._screen.end_line()
        self._screen.style = b""

    @property
    def _has_no_cursor(self) -> bool:
        return self._screen.borrower not in (None, self)

    def _without_cut_end(self, data: bytes) -> bytes:
        if self.is_cut and data.strip(b"\r"):
            self.is_cut = False
            return data.lstrip(b"\r").removeprefix(b"\n")
        return data

    def _step(self, token: bytes) -> bytes:
        screen = self._screen
        if token in (b"\n", b"\r"):
            screen.open_line = b""
            was_cut = self.is_cut and token == b"\n"
            self.is_cut = self.is_cut and not was_cut
            return b"" if was_cut else token
        if not screen.open_line:
            if token.startswith(b"\x1b["):
                if not token.endswith(b"m"):
                    return token
                screen.style += token
                return b""
            token = self._prefix + screen.style + token
            screen.style = b""
        screen.writer, self.is_cut = self, False
        screen.open_line = (screen.open_line + token)[-_MAX_KEPT_BYTES:]
        return token
