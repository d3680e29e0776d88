"""Shows a warning only once if several ranks print it, and names these ranks.

A warning is held back for half a second, in which other ranks may print the same warning.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

from phalanx._text import named
from phalanx.failure.tracebacks import Stream
from phalanx.launch.deadlines import SAME_S

_WARNING = re.compile(rb"^\S.*:\d+: \w*Warning: ")  # a warning of Python; a line of source code may follow
_LOGGED = re.compile(rb"^\[[EWI]\d{4} [\d:.]+ (?:\d+ )?")  # a log line of torch's C++ code: time, perhaps a thread


@dataclasses.dataclass
class _Warning:
    text: bytes
    since_s: float
    ranks: set[int] = dataclasses.field(default_factory=set)
    is_shown: bool = False


class WarningFilter:
    """Gathers the warnings of an attempt's ranks, and shows each one once.

    Args:
        show: Function that writes whole lines above the unfinished line.
        num_ranks: Number of ranks whose output is shown here.
    """

    def __init__(self, show: Callable[[bytes], None], num_ranks: int) -> None:
        self._show = show
        self._num_ranks = num_ranks
        self._warnings: dict[bytes, _Warning] = {}

    @property
    def is_waiting(self) -> bool:
        return any(not warning.is_shown for warning in self._warnings.values())

    def take(self, rank: int, text: bytes) -> None:
        """Record a rank's warning, which must consist of whole lines; show it as soon as all ranks have printed it."""
        key = _LOGGED.sub(b"", text)
        warning = self._warnings.setdefault(key, _Warning(text, time.monotonic()))
        warning.ranks.add(rank)
        if not warning.is_shown and len(warning.ranks) == self._num_ranks:
            self._tell(warning)

    def flush(self, *, late_only: bool = False) -> None:
        """Show the gathered warnings.

        Args:
            late_only: Whether to show only warnings that have waited long enough for other ranks.
        """
        latest_s = time.monotonic() - (SAME_S if late_only else 0)
        for warning in self._warnings.values():
            if not warning.is_shown and warning.since_s <= latest_s:
                self._tell(warning)

    def _tell(self, warning: _Warning) -> None:
        warning.is_shown = True
        ranks = sorted(warning.ranks)
        who = named("rank", ranks)
        prefix = f"[{'all ranks' if len(ranks) == self._num_ranks else who}] ".encode()
        self._show(b"".join(prefix + line + b"\n" for line in warning.text.splitlines()))


class FilteredStream:
    """Forwards the output of `rank` to `stream`, diverting warnings to the filter."""

    def __init__(self, warning_filter: WarningFilter, rank: int, stream: Stream) -> None:
        self._filter, self._rank, self._stream = warning_filter, rank, stream
        self._at_line_start = True

    def feed(self, data: bytes) -> None:
        if b"Warning: " in data or b"\n[" in data or data.startswith(b"["):
            data = self._without_warnings(data)
        if data:
            self._at_line_start = data.endswith(b"\n")
            self._stream.feed(data)

    def _without_warnings(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        kept = [] if self._at_line_start else [lines.pop(0)]
        while lines:
            line = lines.pop(0)
            is_source_below = _WARNING.match(line) is not None
            if not line.endswith(b"\n") or not (is_source_below or _LOGGED.match(line)):
                kept.append(line)
                continue
            follows = b"  " if is_source_below else b"(C++ frames"
            if lines and lines[0].startswith(follows) and lines[0].endswith(b"\n"):
                line += lines.pop(0)
            self._filter.take(self._rank, line)
        return b"".join(kept)

    def finish(self) -> None:
        self._stream.finish()
