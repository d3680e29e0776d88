"""Prints the messages of a waiting rank, in lines that fit the terminal, even if only its launcher has one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from phalanx import _env
from phalanx._text import broken, broken_at


def notice(lines: Sequence[str]) -> None:
    """Print lines to standard error in one write, because ranks share the stream; drop them if it is closed."""
    columns = _env.environment().get(_env.COLUMNS_VARIABLE, "")
    with contextlib.suppress(OSError, ValueError):
        shown = broken_at(int(columns), lines) if columns else broken(lines, sys.stderr)
        print("\n".join([*shown, ""]), end="", file=sys.stderr, flush=True)
