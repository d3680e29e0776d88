"""The environment variables of phalanx: declared once, typed, read here alone.

An unknown ``PHALANX_*`` variable is an error, since it is a misspelled one that would silently do nothing. Those that
begin with ``PHALANX_TEST_`` belong to the project's own tests.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from the environment; the variable of ``stall_s`` is ``PHALANX_STALL_S``, and so on."""

    stall_s: float = 10.0
    """Seconds after which a waiting rank prints who is missing and where each rank stands."""
    spin_us: float = 50.0
    """Microseconds that a waiting rank spins (yields, where ranks share CPUs) before it sleeps; 0 sleeps at once."""
    one_shot_bytes: int = 64 * 1024
    """all_reduce up to this size (at most 65536): every rank reads every rank's data, in one synchronisation."""
    chunk_bytes: int = 64 * 1024
    """Size of the chunks in which larger messages are pipelined, at most 65536."""


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def read_settings() -> Settings:
    """Return the settings of this process.

    Raises:
        ValueError: A ``PHALANX_*`` variable is unknown, not a number, or negative.
    """
    known = {f"PHALANX_{field.name.upper()}": field for field in fields(Settings)}
    ours = [name for name in os.environ if name.startswith("PHALANX_") and not name.startswith("PHALANX_TEST_")]
    unknown = sorted(set(ours).difference(known))
    if unknown:
        raise ValueError(f"unknown environment variable {unknown[0]}; known are {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            value = (int if field.type == "int" else float)(text)
        except ValueError:
            value = -1
        if not 0 <= value < math.inf:  # nor not-a-number
            raise ValueError(f"{name} must be a number, at least 0, got {text!r}")
        values[field.name] = value
    return Settings(**values)
