"""Numbers, sizes and tables in messages."""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

_LONG_S = 1e9  # a longer duration is shown in seconds, because days would not be readable


def plural(number: int, noun: str) -> str:
    """Return ``rank`` for 1, else ``ranks``, ``passes`` and so on."""
    return noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 rank``, ``2 passes`` and ``1,024 steps``."""
    return f"{number:,} {plural(number, noun)}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ``0-2,5`` for 0, 1, 2 and 5, in the kernel's notation."""
    parts = _in_a_row(numbers)
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _in_a_row(numbers: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return parts


def named(noun: str, numbers: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0 and 1``, or ``ranks 0-2, 5 and 7-9``."""
    return f"{plural(len(numbers), noun)} {in_runs(numbers)}"


def in_runs(numbers: Sequence[int]) -> str:
    """Return ``3``, ``0 and 1``, or ``0-2, 5 and 7-9``."""
    parts = _in_a_row(sorted(numbers))
    runs = [run for part in parts for run in (map(str, part) if len(part) < 3 else [f"{part[0]}-{part[-1]}"])]
    return joined(runs)


def joined(items: Sequence[object]) -> str:
    """Return ``a``, ``a and b``, or ``a, b and c``."""
    *most, last = map(str, items) if items else ("",)
    return f"{', '.join(most)} and {last}" if most else last


def enumerated(noun: str, numbers: Sequence[object], most: int = sys.maxsize) -> str:
    """Return ``rank 3``, ``ranks 1, 2``, or ``ranks 1, 2 and 6 more`` for a `most` of 2."""
    return f"{plural(len(numbers), noun)} {listed(numbers, most)}"


def listed(items: Sequence[object], most: int = sys.maxsize) -> str:
    """Return ``a, b``, or ``a, b and 6 more`` for a `most` of 2."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(map(str, items[:most]))}{more}"


def in_units(size_bytes: float) -> str:
    """Return a size such as ``1.5 GiB``; whole numbers have no fraction."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a time span such as ``0.4 s``, ``41 s``, ``3 min 20 s``, ``5 min``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds > _LONG_S:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if minutes < 120:
        return f"{minutes} min {rest_s} s".removesuffix(" 0 s")
    return f"{hours} h {rest_min} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def measured(seconds: float) -> str:
    """Return a time span with three significant digits: ``12.3 us``, ``1.23 ms``, ``1.23 s``."""
    if not seconds > 0:
        return "0 s"
    if seconds >= 120:
        return duration(seconds)
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
    return f"{seconds / size:.3g} {unit}"


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; return ``signal 40`` for a signal without a name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_description(number: int) -> str:
    """Return ``Killed`` for 9, as the C library and torch name signals."""
    return signal.strsignal(number) or f"Unknown signal {number}"


def shortened(text: str, max_chars: int = 60) -> str:
    """Return text cut to `max_chars`, between words if it has some, so that it fits into a line with other text."""
    if len(text) <= max_chars:
        return text
    kept = text[: max_chars - 3]
    word = kept.rfind(" ")  # a word that takes half of the text is cut: it is hardly a word, but a path, for example
    return f"{kept[:word] if word > len(kept) // 2 else kept}..."


def ending_of(path: str, max_chars: int) -> str:
    """Return the end of a path that is too long, starting at a slash if possible."""
    if len(path) <= max_chars:
        return path
    end = path[len(path) - max(max_chars - 3, 1) :]
    return f"...{end[max(end.find('/'), 0) :]}"


def one_line(error: BaseException) -> str:
    """Return an error's class and message, for the middle of a line."""
    return " ".join(class_and_message(error).split())[:200]


def message_of(error: BaseException) -> str:
    """Return the message of an exception, even if its ``__str__`` fails."""
    try:
        return str(error)
    except BaseException:  # __str__ may even call sys.exit()
        return "<exception str() failed>"  # as in a traceback


def class_and_message(error: BaseException) -> str:
    """Return an exception's class and message for other ranks, with escapes for characters that UTF-8 can't encode."""
    words = f"{type(error).__name__}: {message_of(error)}".rstrip(": ")
    return words.encode(errors="backslashreplace").decode()


def filled(pieces: Sequence[str], width: int) -> list[str]:
    """Return pieces joined by semicolons into lines; each line is as full as possible, and no piece is split."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(piece) + 2 <= width:
            lines[-1] += f"; {piece}"
        else:
            lines.append(piece)
    return lines


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def complain(words: str, call: str = "") -> None:
    """Print a message to standard error, broken between words on a terminal; if writing fails, drop the message.

    Args:
        words: Message.
        call: Command line to print after the message. It is never broken, so that it can be pasted: if it does not fit
            behind the message, it gets a line of its own.
    """
    try:
        lines = broken(words.splitlines(), sys.stderr)
        if call:
            both = f"{lines[-1]} {call}"
            lines[-1:] = [both] if broken([both], sys.stderr) == [both] else [lines[-1], call]
        print("\n".join(lines), file=sys.stderr)
    except BrokenPipeError:
        raise  # `exit_code_of` handles a closed pipe
    except OSError:
        pass


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; `stream` is None if it was closed when Python started."""
    return stream is not None and stream.isatty()


def broken(lines: Iterable[str], screen: TextIO | None = None, hang: int | None = None) -> list[str]:
    """Return the lines, with lines wider than the terminal broken between words; unchanged if there is no terminal.

    Args:
        screen: Stream to which the lines are printed; None for standard output.
        hang: Column at which continuation lines begin; None for two columns to the right of the line's own indent.
    """
    if not is_terminal(screen or sys.stdout):
        return list(lines)
    return broken_at(shutil.get_terminal_size().columns, lines, hang)


def broken_at(width: int, lines: Iterable[str], hang: int | None = None) -> list[str]:
    """Return the lines, with lines of more than `width` columns broken between words; see `broken`."""
    width = max(width, 20)
    shown: list[str] = []
    for line in lines:
        if len(line) <= width:
            shown.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2 if hang is None else min(hang, width // 2))
        shown += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return shown
