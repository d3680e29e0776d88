"""How far the clocks of other hosts are ahead of this one's, beside the boxes of an attempt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx._files import open_regular

_NAME = "clocks.json"
Ahead = dict[str, tuple[int, int]]  # by the name of a host: nanoseconds, and how wrong they can be


def save_clocks(clocks: Mapping[str, Sequence[float]], folder: Path) -> None:
    """Write how many seconds each host's monotonic clock is ahead, and how wrong that can be; nothing for none.

    Raises:
        OSError: The file can't be written.
    """
    if clocks:
        (folder / _NAME).write_text(json.dumps(clocks))


def load_clocks(folder: Path) -> Ahead:
    """Return what was saved; nothing if that can't be read."""
    clocks = {}
    with (
        contextlib.suppress(OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError),
        open_regular(folder / _NAME) as file,
    ):
        for host, (ahead_s, within_s) in json.loads(file.read()).items():
            clocks[host] = int(ahead_s * 1e9), int(within_s * 1e9)
    return clocks
