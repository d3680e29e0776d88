"""The newest lines of the ranks' logs, filtered and searched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from phalanx._errors import printable
from phalanx.wire.files import open_regular

_MOST_BYTES = 512 << 10  # read from all logs together
_MOST_LINES = 500


def newest_lines(folder: str, rank: str, words: str) -> list[str]:
    """Return lines of the newest attempt, rank by rank, the newest of each rank last.

    Args:
        folder: Folder of the run's logs.
        rank: Number of the rank whose lines count; empty for all ranks.
        words: Text that a line must contain, in upper or lower case; empty for all lines.
    """
    logs = [*_logs_of(folder, rank)]
    if not logs:
        return []
    per_log = max(4096, _MOST_BYTES // len(logs))
    kept = max(5, _MOST_LINES // len(logs))
    wanted = words.casefold()
    lines = []
    for number, stream, path in logs:
        head = f"[rank {number}{' stderr' * (stream == 'stderr')}] "
        found = [line for line in _tail(path, per_log) if wanted in line.casefold()]
        lines += [head + line for line in found[-kept:]]
    return lines[-_MOST_LINES:]


def _logs_of(folder: str, rank: str) -> Iterator[tuple[int, str, Path]]:
    """Yield rank, stream and path of each log."""
    attempts = [path for path in Path(folder).glob("attempt_*") if _number_of(path) >= 0] if folder else []
    if attempts:
        ranks = sorted(max(attempts, key=_number_of).glob("rank_*"), key=_number_of)
        for path in ranks:
            if _number_of(path) >= 0 and rank in ("", str(_number_of(path))):
                yield from ((_number_of(path), stream, path / f"{stream}.log") for stream in ("stdout", "stderr"))


def _number_of(path: Path) -> int:
    number = path.name.rpartition("_")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1


def _tail(path: Path, most_bytes: int) -> list[str]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        text = file.read(most_bytes).decode(errors="replace")
        lines = [printable(line) for line in text.splitlines()]
        return lines[1:] if size > most_bytes else lines
    return []
