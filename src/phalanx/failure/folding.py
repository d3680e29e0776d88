"""Folds a traceback to fit on a screen: the user's own frames and the message. The log has all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from phalanx._text import counted, joined, shortened
from phalanx.failure.last_words import owner_of
from phalanx.failure.tracebacks import CPP_FRAME, EXCEPTION, TRACEBACK

COLUMNS, ROWS = 80, 24
_FRAME = re.compile(r'^(\s*)File "([^"]+)", line (\d+)(,? in .*)?$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+.*\(most recent call first\):$")
_CALLBACK = re.compile(r"^  (\S.*)\(\d+\): \S+$")  # a frame as pybind11 writes it, under "At:"
_CARETS = re.compile(r"^\s*[\^~]+\s*$")
_COMMAND = "<string>"  # file name of code given to `python -c`, and of generated code


def num_rows(line: str) -> int:
    """Return how many terminal rows `line` takes."""
    return max(1, -(-len(line) // COLUMNS))


def fold(lines: Sequence[str], max_rows: int) -> list[str]:
    """Return the user's frames, a note that counts the other frames, and the message, in at most `max_rows` rows."""
    shown, note = _without_others(_own_thread(lines))
    number = _message_of(shown)
    frames, message = shown[:number], shown[number:]
    note_lines = [note] if note else []
    rows_left = max_rows - len(note_lines)
    message = _crop_message(message, max(rows_left - min(_rows(frames), rows_left // 2), 1))
    return [*_last_frames(frames, rows_left - _rows(message)), *note_lines, *message]


def _rows(lines: Sequence[str]) -> int:
    return sum(num_rows(f"  {line}") for line in lines)


def _own_thread(lines: Sequence[str]) -> list[str]:
    """Return the lines of a crash without the stacks of other threads."""
    starts = [number for number, line in enumerate(lines) if _THREAD.match(line)]
    own = next((number for number in starts if lines[number].startswith("Current")), None)
    if own is None:
        return list(lines)
    end = next((number for number in range(own, len(lines)) if not lines[number]), len(lines))
    return [*lines[: starts[0]], *lines[own:end]]


def _without_others(lines: Sequence[str]) -> tuple[list[str], str]:
    """Return the lines without library frames, headings and blank lines, and a note of how many frames were folded."""
    shown: list[str] = []
    owners: dict[str, int] = {}
    last_other: list[str] = []
    num_own = num_cpp = 0
    paths = {found[2] for line in lines if (found := _FRAME.match(line))}
    # If no frame is in a file of the user's, the code given to `python -c` counts as the user's.
    is_command = all(map(owner_of, paths))
    depth = -1  # indent of the frame whose source line follows
    is_own = has_carets = True
    for line in lines:
        if found := _FRAME.match(line):
            depth, owner = len(found[1]), owner_of(found[2])
            is_own = not owner or (is_command and found[2] == _COMMAND)
            has_carets = found[4] is None  # no "in NAME": this is a SyntaxError, whose carets mark the place
            where = f'{found[1]}File "{short_path(found[2])}", line {found[3]}{found[4] or ""}'
            if is_own:
                num_own += 1
                shown.append(where)
            else:
                owners[owner] = owners.get(owner, 0) + 1
                last_other = [where]
        elif depth >= 0 and line[: depth + 1].isspace() and len(line) > depth + 1:
            if has_carets or not _CARETS.match(line):
                (shown if is_own else last_other).append(line)
        elif CPP_FRAME.match(line) or _CALLBACK.match(line):
            num_cpp += 1
        elif line not in ("", "At:") and not TRACEBACK.match(line):
            depth = -1
            shown.append(line)
    if not num_own and last_other:
        shown[:0] = last_other
    owners = {**owners, **({"C++": num_cpp} if num_cpp else {})}
    total = sum(owners.values())
    note = f"  ({counted(total, 'frame')} of {joined([*owners])} folded)" if total else ""
    return shown, note


def short_path(path: str) -> str:
    """Return the path relative to the current folder if it lies in that folder, else the path as it is."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except FileNotFoundError:  # the current folder has been removed
        return path


def _message_of(lines: Sequence[str]) -> int:
    """Return where the message of the last exception begins."""
    starts = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line) and line.startswith("  File")]
    after = [number for number in starts if not frames or number > frames[-1]]
    return (after or [len(lines) if frames else 0])[0]


def _last_frames(lines: Sequence[str], max_rows: int) -> list[str]:
    """Return the innermost frames that fit into `max_rows` rows."""
    kept: list[str] = []
    frame: list[str] = []
    for line in reversed(lines):
        frame.insert(0, line)
        if _FRAME.match(line) or line is lines[0]:
            if _rows(frame) + _rows(kept) > max_rows:
                break
            kept[:0], frame = frame, []
    return kept


def _crop_message(lines: Sequence[str], max_rows: int) -> list[str]:
    """Return the beginning of the message, and the message's last line, which often says what to do."""
    if _rows(lines) <= max_rows:
        return list(lines)
    last = [lines[-1]] if len(lines) > 2 and num_rows(lines[-1]) <= 2 else []
    rows_left = max_rows - 1 - _rows(last)
    kept = []
    body = lines[: len(lines) - len(last)]
    for line in body:
        if num_rows(f"  {line}") > rows_left:
            if rows_left > 0:
                kept.append(shortened(line, rows_left * COLUMNS - 2))
            break
        kept.append(line)
        rows_left -= num_rows(f"  {line}")
    num_left = len(body) - len(kept)
    more = [f"... {counted(num_left, 'more line')} in the log ..."] if num_left else []
    return [*kept, *more, *last]
