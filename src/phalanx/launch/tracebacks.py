"""Tracebacks in what a rank prints: where they begin and end, and which of them nobody needs to read on the screen.

When one rank fails, every other fails of it and says so at length. Those tracebacks are kept off the screen, one line
for each; the logs have them whole.
"""

from __future__ import annotations

import re
from typing import Protocol

from phalanx.launch.causes import is_victim

STYLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
TORCH_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)")  # torch's excepthook puts it before each line
TRACEBACK = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):$")
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_WITHIN = re.compile(r"^(\s|$|During handling of|The above exception|Traceback \()")

_TORN_PREFIX = re.compile(rb"(\[(r(a(n(k(\d+(\](:( )?)?)?)?)?)?)?)?)?")
_WHOLE_PREFIX = re.compile(rb"^\[rank\d+\]: ")
_MAX_HELD_BYTES = 1 << 20  # no traceback is that long: what only looks like one is given on, and takes no memory
_FIRST_WORDS = b"Traceback (most recent call last):"


def class_name(kind: str) -> str:
    """Return the class without its module or namespace."""
    return re.split(r"\.|::", kind)[-1]


class Stream(Protocol):
    def feed(self, data: bytes) -> None: ...
    def finish(self) -> None: ...


class VictimFilter:
    """Gives on to `stream` what a rank prints, at once, but for tracebacks: those it holds until their last line.

    Attributes:
        hides_interrupts: Drop those of KeyboardInterrupt too, for after Ctrl-C: every rank has one.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.hides_interrupts = False
        self._pending = b""  # of a line that a traceback may begin with, or that follows one
        self._held: list[bytes] = []  # of a traceback whose last line has not come
        self._num_held_bytes = 0
        self._swallowing = False  # what torch's prefix marks as belonging to a dropped traceback
        self._at_line_start = True

    def feed(self, data: bytes) -> None:
        data, self._pending = self._pending + data, b""
        if not self._held and not self._swallowing and _FIRST_WORDS not in data:
            self._pass(data)
        else:
            self._search(data)

    def _pass(self, data: bytes) -> None:
        """Give on what has no traceback in it, but for an end that may become one."""
        start = data.rfind(b"\n") + 1
        if (start or self._at_line_start) and _may_begin(data[start:]):
            data, self._pending = data[:start], data[start:]
        if data:
            self._at_line_start = data.endswith(b"\n")
            self._stream.feed(data)

    def _search(self, data: bytes) -> None:
        out = []
        while data:
            end = data.find(b"\n") + 1
            if self._at_line_start and (self._held or self._swallowing or _may_begin(data)):
                if not end and self._num_held_bytes + len(data) < _MAX_HELD_BYTES:
                    self._pending = data
                    break
                out += self._take(data[:end] if end else data)
                self._at_line_start = bool(end)
            else:
                out.append(data[:end] if end else data)
                self._at_line_start = bool(end)
            data = data[end:] if end else b""
        if out:
            self._stream.feed(b"".join(out))

    def finish(self) -> None:
        """Give on what is held: nothing more will come."""
        rest = [*self._held, self._pending]
        self._num_held_bytes = 0
        self._held, self._pending, self._swallowing, self._at_line_start = [], b"", False, True
        if any(rest):
            self._stream.feed(b"".join(rest))
        self._stream.finish()

    def _take(self, line: bytes) -> list[bytes]:
        """Return what may be given on now that `line` has come."""
        text = STYLE.sub("", line.decode(errors="replace")).rstrip("\r\n")
        plain = TORCH_PREFIX.sub("", text)
        if self._swallowing:
            if plain != text:
                return []
            self._swallowing = False
        is_within = TRACEBACK.match(plain) or (self._held and _WITHIN.match(plain))
        if is_within and self._num_held_bytes + len(line) < _MAX_HELD_BYTES:
            self._held.append(line)
            self._num_held_bytes += len(line)
            return []
        held, self._held, self._num_held_bytes = self._held, [], 0
        found = EXCEPTION.match(plain) if held else None
        if found and self.hides_interrupts and found[1] == "KeyboardInterrupt":
            return []
        if found and is_victim([class_name(found[1])], found[2] or ""):
            self._swallowing = True
            return [f"{class_name(found[1])}: {found[2] or ''} (traceback in the log)\n".encode()]
        return [*held, line]


def _may_begin(data: bytes) -> bool:
    """Whether `data`, at the start of a line, is the beginning of a traceback or may become one."""
    rest = _WHOLE_PREFIX.sub(b"", data)[: len(_FIRST_WORDS)]
    return _FIRST_WORDS.startswith(rest) or rest.startswith(_FIRST_WORDS) or _TORN_PREFIX.fullmatch(data) is not None
