"""The offsets of other hosts' clocks from the clock of this host, kept beside the boxes of an attempt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.wire.files import read_json
from phalanx.wire.messages import read_value

_NAME = "clocks.json"
Ahead = dict[str, tuple[int, int]]  # for each host name: how far its clock is ahead in ns, and the largest error


def save_clocks(clocks: Mapping[str, Sequence[float]], folder: Path) -> None:
    """Save how many seconds each host's monotonic clock is ahead, and the largest error; without hosts, save nothing.

    Raises:
        OSError: The file can't be written.
    """
    if clocks:
        (folder / _NAME).write_text(json.dumps(clocks))


def load_clocks(folder: Path) -> Ahead:
    """Return the saved clocks; empty if they can't be read."""
    with contextlib.suppress(OSError, ValueError):
        saved = read_value(read_json(folder / _NAME), dict[str, tuple[float, ...]])
        return {host: (int(ahead_s * 1e9), int(within_s * 1e9)) for host, (ahead_s, within_s) in saved.items()}
    return {}
