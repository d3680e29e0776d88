"""What lies in /dev/shm, for the checks that tests leave nothing there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_KEPT = ("cuda.shm.", f"phalanx-{os.geteuid()}")  # CUDA's own; the folder in which publications are found


def files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("*") if not path.name.startswith(_KEPT)}


def unmapped(paths: set[str]) -> set[str]:
    """Return those that no living process maps: other jobs on the machine make files there too, and use them."""
    left = set(paths)
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            mapped = maps.read_text(errors="replace")
            left = {path for path in left if path not in mapped}
    return left
