"""Whether phalanx stands in the place of Gloo in this process, and who asked for it. `_replace` puts it there."""

from __future__ import annotations

import sys

_origins: list[str] = []
_said: set[str] = set()


def origin() -> str:
    """Return who asked for it, ``PHALANX_REPLACE`` or ``phalanx.replace_gloo()``; empty: Gloo is Gloo."""
    return _origins[0] if _origins else ""


def note(who: str) -> None:
    """Note that phalanx now stands in the place of Gloo."""
    _origins.append(who)


def say_once(line: str) -> None:
    """Print a line on stderr, unless this process has printed it before."""
    if line not in _said:
        _said.add(line)
        print(f"phalanx: {line}", file=sys.stderr, flush=True)
