"""How a benchmark is run in a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def run_bench(module, *arguments):
    """Return the ended ``python -m module arguments``."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
