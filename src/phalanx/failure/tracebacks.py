"""Finds the tracebacks in a rank's output, and decides which of them the screen shows.

A rank's last words belong in the report of the job's failure, which shows them once, folded, with a hint. So a
traceback is kept off the screen until it is known whether it ends the rank. The logs have every traceback.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Final, Protocol

from phalanx.failure.last_words import LastWords, class_name
from phalanx.failure.victims import is_victim

HOLD_S: Final = 5.0
"""Seconds for which a traceback is held back; it is shown if the rank is still running by then."""

HOLD_LAST_S: Final = 30.0
"""Seconds for which a traceback of torch's excepthook is held back: longer, because its process surely ends."""

STYLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
TORCH_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)")  # prefix that torch's excepthook puts before each line
TRACEBACK = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):$")
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
CPP_FRAME = re.compile(r"^(?:frame #\d+: |#\d+ .* from .*:\d+$|<omitting python frames>|Exception raised from )")
_CHAIN = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
_SYNTAX = re.compile(r'^  File ".*", line \d+$')
_IGNORED = ("Exception ignored in", "Exception in thread")
_FATAL = "Fatal Python error: "
_TERMINATED = re.compile(r"^terminate called after throwing an instance of '([\w:]+)'$")
_WHAT = re.compile(r"^\s+what\(\):\s+(.*)$")

_FIRST_WORDS = (
    b"Traceback (most recent call last):",
    b"  + Exception Group Traceback (most recent call last):",
    b'  File "',  # how a SyntaxError begins
    _FATAL.encode(),
    b"terminate called after throwing an instance of ",
)
_FIRST_OF_CPP = (b"frame #", b"Exception raised from ")
_TORN_PREFIX = re.compile(rb"(\[(r(a(n(k(\d+(\](:( )?)?)?)?)?)?)?)?)?")
_WHOLE_PREFIX = re.compile(rb"^\[rank\d+\]: ")
_BEGINNING = re.compile(
    rb"^(?:\[rank\d+\]: )?(?:" + b"|".join(re.escape(words) for words in _FIRST_WORDS) + rb")", re.MULTILINE
)
_BEGINNING_OR_IGNORED = re.compile(_BEGINNING.pattern + rb"|^Exception ignored ", re.MULTILINE)
_MAX_HELD_BYTES = 1 << 20  # no traceback is longer; longer output that looks like one is forwarded


# ---------------------------------------------------------------- finding tracebacks


@dataclasses.dataclass(frozen=True)
class Block:
    """The lines ``[start, end)`` in which a process says why it ends, without torch's prefix."""

    start: int
    end: int
    kind: str
    message: str
    lines: tuple[str, ...]

    @property
    def is_interrupt(self) -> bool:
        """Whether Ctrl-C ended the process; while Python starts, it reports an interrupt as a fatal error."""
        last = next((line for line in reversed(self.lines) if line), "")
        return "KeyboardInterrupt" in (class_name(self.kind), last)


def find_last_block(raw: Sequence[str]) -> Block | None:
    """Return the last words among the lines that a process has written: a crash, else its last exception.

    A chained exception is returned with the whole chain. An exception that did not end the process, such as a thread's,
    counts only if there is no other.
    """
    lines = [TORCH_PREFIX.sub("", line) for line in raw]
    if (crash := _last_crash(lines)) is not None:
        return crash
    starts = [number for number, line in enumerate(lines) if TRACEBACK.match(line)]
    starts = [n for n in starts if n == 0 or not lines[n - 1].startswith(_IGNORED)] or starts
    if not starts:
        return _last_syntax_error(lines)
    start = starts[-1]
    end = _end_of(raw, start)
    for number in range(start + 1, end):
        line = lines[number]
        if line and not line[0].isspace() and (found := EXCEPTION.match(line)):
            end = max(_end_of(raw, number), number + 1) if found[2] else number + 1
            first = _first_of_chain(lines, starts)
            return Block(first, end, found[1], found[2] or "", tuple(lines[first:end]))
    return Block(start, end, "", "", tuple(lines[start:end]))


def _end_of(raw: Sequence[str], start: int) -> int:
    """Return the end of the lines that belong together: those with torch's prefix, else those before a blank line."""
    if TORCH_PREFIX.match(raw[start]) is None:
        return next((number for number in range(start, len(raw)) if not raw[number]), len(raw))
    end = start
    for number in range(start, len(raw)):  # torch puts no prefix before blank lines
        if TORCH_PREFIX.match(raw[number]):
            end = number + 1
        elif raw[number]:
            break
    return end


def _first_of_chain(lines: Sequence[str], starts: Sequence[int]) -> int:
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if first < 2 or not _CHAIN.match(lines[first - 2]):
            break
        first = start
    return first


def _last_crash(lines: Sequence[str]) -> Block | None:
    crashes = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if not crashes:
        return None
    start = crashes[-1]
    stacks = [line for line in lines[start:] if not line.startswith("Extension modules: ")]
    # The report of an uncaught C++ exception comes before the crash.
    for number in range(start, -1, -1):
        if (thrown := _TERMINATED.match(lines[number])) and number + 1 < len(lines):
            what = _WHAT.match(lines[number + 1])
            message = what[1] if what else ""
            return Block(number, len(lines), thrown[1], message, (f"{thrown[1]}: {message}", *stacks))
    return Block(start, len(lines), "", "", tuple(stacks))


def _last_syntax_error(lines: Sequence[str]) -> Block | None:
    """Return the syntax error of the script itself, which Python prints without a heading."""
    for number in range(len(lines) - 1, -1, -1):
        found = EXCEPTION.match(lines[number])
        if found and found[1] in ("SyntaxError", "IndentationError", "TabError"):
            for start in range(number - 1, -1, -1):
                if _SYNTAX.match(lines[start]):
                    return Block(start, number + 1, found[1], found[2] or "", tuple(lines[start : number + 1]))
    return None


# ---------------------------------------------------------------- showing tracebacks


class Stream(Protocol):
    def feed(self, data: bytes) -> None: ...
    def finish(self) -> None: ...


class HeldTracebacks:
    """Forwards a rank's output to `stream` at once, but holds back a traceback, and what follows it, for a while.

    Attributes:
        hides_interrupts: Whether to drop tracebacks of KeyboardInterrupt: after Ctrl-C, every rank prints one.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.hides_interrupts = False
        self._pending = b""  # incomplete line that may become the beginning of a traceback
        self._held = bytearray()
        self._since_s = 0.0
        self._at_line_start = True
        self._is_in_backtrace = False  # whether a C++ backtrace is being printed

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> None:
        if self._held:
            self._held += data
            if len(self._held) > _MAX_HELD_BYTES or b"\r" in data.replace(b"\r\n", b""):  # too long, or a progress bar
                self.release()
            return
        data, self._pending = self._pending + data, b""
        if begins := self._beginning_in(data):
            self._pass(data[: begins - 1])
            self._held += data[begins - 1 :]
            self._since_s = time.monotonic()
            self._at_line_start = True
            return
        start = data.rfind(b"\n") + 1
        if (start or self._at_line_start) and _may_begin(data[start:]):
            data, self._pending = data[:start], data[start:]
        self._pass(data)

    def _beginning_in(self, data: bytes) -> int:
        """Return the position at which a traceback begins, counted from 1; 0 if none begins."""
        for found in (_BEGINNING_OR_IGNORED if self.hides_interrupts else _BEGINNING).finditer(data):
            if found.start() or self._at_line_start:
                return found.start() + 1
        return 0

    def _pass(self, data: bytes) -> None:
        if data:
            self._at_line_start = data.endswith(b"\n")
            if b"frame #" in data or b"Exception raised from" in data or self._is_in_backtrace:
                data = self._without_cpp_frames(data)
            if data:
                self._stream.feed(data)

    def _without_cpp_frames(self, data: bytes) -> bytes:
        kept = []
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):  # a \r does not end a line
            if not line.endswith(b"\n") and len(line) < _MAX_HELD_BYTES:
                self._pending = line + self._pending
                self._at_line_start = True
                break
            is_frame = CPP_FRAME.match(line.decode(errors="replace").rstrip("\r\n")) is not None
            if is_frame and not self._is_in_backtrace:
                kept.append(b"(C++ frames: see the log)\n")
            elif not is_frame and not (self._is_in_backtrace and not line.strip()):
                kept.append(line)
            self._is_in_backtrace = is_frame
        return b"".join(kept)

    def release_late(self) -> None:
        """Forward held output if the rank has kept running for long enough."""
        limit_s = HOLD_LAST_S if _WHOLE_PREFIX.match(self._held) else HOLD_S
        if self._held and time.monotonic() - self._since_s >= limit_s:
            self.release()

    def release(self) -> None:
        """Forward held output; a victim's traceback is cut to one line."""
        self._forward(drops_last_words=False)

    def settle(self) -> None:
        """Forward held output, except for the last words, which the report shows because the rank has ended."""
        self._forward(drops_last_words=True)

    def _forward(self, *, drops_last_words: bool) -> None:
        lines = bytes(self._held).splitlines(keepends=True)
        self._held.clear()
        texts = [STYLE.sub("", line.decode(errors="replace")).rstrip("\r\n") for line in lines]
        block = find_last_block(texts)
        while self.hides_interrupts and block is not None and block.is_interrupt:
            has_headline = block.start and texts[block.start - 1].startswith(_IGNORED)
            hidden = slice(block.start - bool(has_headline), block.end)
            del lines[hidden], texts[hidden]
            block = find_last_block(texts)
        if block is not None:
            name = class_name(block.kind)
            replacement = []
            if not drops_last_words:
                replacement = lines[block.start : block.end]
                if name and is_victim(LastWords(name, block.message)):
                    replacement = [f"{name}: {block.message} (traceback in the log)\n".encode()]
            lines[block.start : block.end] = replacement
        if any(line.strip() for line in lines):
            self._pass(b"".join(lines))

    def finish(self) -> None:
        """Forward held output, because the rank will write nothing more."""
        self.release()
        pending, self._pending = self._pending, b""
        self._is_in_backtrace = False
        self._pass(pending)
        if self._pending:  # an incomplete line of a C++ frame
            self._stream.feed(self._pending)
        self._pending = b""
        self._at_line_start = True
        self._stream.finish()


def _may_begin(data: bytes) -> bool:
    """Whether `data`, at the start of a line, may become the beginning of a traceback."""
    rest = _WHOLE_PREFIX.sub(b"", data)
    return _TORN_PREFIX.fullmatch(data) is not None or any(
        words.startswith(rest) for words in (*_FIRST_WORDS, *_FIRST_OF_CPP)
    )
