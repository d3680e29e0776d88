"""Which rank was the cause, what it said last, and how the screen ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Sequence

from phalanx._env import PREEMPTED_CODE
from phalanx._text import named
from phalanx.launch.causes import is_victim
from phalanx.launch.folding import COLUMNS, ROWS, fold, num_rows
from phalanx.launch.notes import has_made_room
from phalanx.launch.tracebacks import STYLE, TORCH_PREFIX, class_name, find_last_block

_MAX_LINES = 400  # of an exception, kept
_MAX_PLAIN_LINES = 5  # of what a rank that raised nothing wrote last: it stands on the screen, too
_MAX_OTHERS = 4


@dataclasses.dataclass(frozen=True)
class LastWords:
    """What a rank wrote last on stderr: its exception if there was one, and the lines of it, or the last of all."""

    kind: str = ""
    message: str = ""
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, stderr_tail: bytes) -> LastWords:
        text = STYLE.sub("", stderr_tail.decode(errors="replace"))
        lines = [line.rstrip() for line in text.splitlines()]
        block = find_last_block(lines)
        if block is None:
            return cls(lines=tuple(TORCH_PREFIX.sub("", line) for line in lines[-_MAX_PLAIN_LINES:]))
        shown = block.lines
        if len(shown) > _MAX_LINES:
            half = _MAX_LINES // 2
            shown = (*shown[:half], f"  ... {len(shown) - 2 * half} lines ...", *shown[-half:])
        return cls(block.kind, block.message, shown)

    @property
    def summary(self) -> str:
        """The exception in one line; empty when there was none."""
        return (f"{self.kind}: {self.message}" if self.message else self.kind) if self.kind else ""


def alike(kind: str, message: str) -> tuple[str, str]:
    """Return an exception's class and message without what differs between ranks that fail alike: numbers."""
    name = class_name(kind)
    if name == "CollectiveMismatch":  # which each rank tells from its own call
        message = ""
    return name, re.sub(r"\d+", "N", message)


@dataclasses.dataclass
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: Rank that ended; -1: the process that starts the ranks.
        returncode: Exit code, or minus the signal.
        asked: Whether we had told it to end, so that it is not the cause.
        folder: Folder of its logs.
        host: Host on which it ran; empty: this one.
    """

    rank: int
    pid: int
    returncode: int
    asked: bool
    last_words: LastWords
    folder: str
    when_s: float
    host: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank >= 0 else "the process that starts the ranks"

    @property
    def log(self) -> str:
        return os.path.join(self.folder, "stderr.log" if self.rank >= 0 else "launch.log")

    @property
    def failed(self) -> bool:
        return self.returncode != 0 and not self.asked

    @property
    def made_room(self) -> bool:
        """Whether it was asked to end, has saved its state, and can go on from there."""
        return self.returncode == PREEMPTED_CODE and has_made_room(self.folder)

    @property
    def raised(self) -> str:
        """Class of the exception that ended it; empty if none did. One that it has caught and printed did not."""
        by_exception = self.returncode in (1, -signal.SIGABRT)
        return class_name(self.last_words.kind) if by_exception else ""

    @property
    def is_victim(self) -> bool:
        """Whether it failed because a peer had gone before it."""
        return bool(self.raised) and is_victim([self.raised], self.last_words.message)

    @property
    def exit_code(self) -> int:
        """What a shell would report: 128 plus the signal, if one ended the rank."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    @property
    def error_alike(self) -> tuple[str, str]:
        """The exception, without what differs between ranks that fail alike."""
        return alike(self.last_words.kind, self.last_words.message)

    def describe(self) -> str:
        if self.returncode < 0:
            how = f"was killed by {signal_name(-self.returncode)}"
        elif self.raised:
            how = f"raised {self.raised} and exited with code {self.returncode}"
        else:
            how = f"exited with code {self.returncode}"
        where = f" on {self.host}" if self.host else ""
        return f"{self.name} (pid {self.pid}{where}) {how}"


def find_culprit(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the rank whose end was the cause: never a victim if another failed; a signal before a code; the first."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.is_victim, end.returncode > 0, end.when_s), default=None)


def report(culprit: RankEnd, ends: Sequence[RankEnd], *, hint: str) -> str:
    """Return the last words of a job that failed: the cause, then what became of the others, on one screen."""
    where = f"{culprit.host}:" if culprit.host else ""
    after = [*_others(culprit, ends), f"log: {where}{culprit.log}", *([f"hint: {hint}"] if hint else [])]
    code = f"; exit code {culprit.exit_code}" if culprit.returncode < 0 else ""
    head = f"phalanx run: {culprit.describe()}{code}"
    rows_left = ROWS - 1 - num_rows(head) - sum(num_rows(f"  {line}") for line in after)
    lines = [head, *(f"  {line}" for line in [*fold(culprit.last_words.lines, rows_left), *after])]
    return "\n".join(lines) + "\n"


def brief_report(culprit: RankEnd) -> str:
    """Return what failed and why, for a job that goes on."""
    return "\n".join([culprit.describe(), *(f"  {line}" for line in fold(culprit.last_words.lines, ROWS // 2))])


def _others(culprit: RankEnd, ends: Sequence[RankEnd]) -> list[str]:
    """Return what became of the other ranks, a line for all that ended alike."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        if end.rank != culprit.rank and (end.returncode or end.asked):
            groups.setdefault(_end_in_brief(end, culprit), []).append(end.rank)
    lines = []
    for what, ranks in sorted(groups.items(), key=lambda group: min(group[1])):
        who = named("rank", ranks)
        lines.append(f"{who}: {what}"[: COLUMNS - 2])
    return lines if len(lines) <= _MAX_OTHERS else [*lines[:_MAX_OTHERS], "others: see the logs"]


def _end_in_brief(end: RankEnd, culprit: RankEnd) -> str:
    words = end.last_words
    if words.kind and (end.asked or end.raised):
        name = class_name(words.kind)
        if is_victim([name], words.message) and not culprit.is_victim:
            return f"{name}, because of it"
        if end.error_alike == culprit.error_alike:
            return "the same error"
        said = f"{name}: {words.message}" if words.message else name
        return f"ended by phalanx run; before: {said}" if end.asked and end.returncode != 1 else said
    if end.asked:
        return "ended by phalanx run"
    return f"was killed by {signal_name(-end.returncode)}" if end.returncode < 0 else f"exit code {end.returncode}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def write_error_file(end: RankEnd) -> None:
    """Write ``error.json`` in the form of torch's ``@record``, unless the rank has written its own."""
    path = os.path.join(end.folder, "error.json")
    if os.path.exists(path):
        return
    content = {
        "message": {
            "message": end.last_words.summary or end.describe(),
            "extraInfo": {"py_callstack": "\n".join(end.last_words.lines), "timestamp": str(int(time.time()))},
        },
        "rank": end.rank,
        "pid": end.pid,
        "host": socket.gethostname(),
        "exit_code": end.returncode if end.returncode >= 0 else None,
        "signal": signal_name(-end.returncode) if end.returncode < 0 else None,
    }
    with contextlib.suppress(OSError), open(path, "w") as file:  # the disk may be what failed
        json.dump(content, file, indent=1)
