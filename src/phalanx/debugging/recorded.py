"""Notes for observers of a job that a rank is in the debugger, or waits for the one that is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_PHASE = 4  # EventKind of csrc/memory/record.h; `record.writer` is on the floor of this package


@contextlib.contextmanager
def phase(core: Any, name: str, site: str) -> Iterator[None]:
    """Record the body as a phase in this rank's black box, if it has one."""
    event = core.begin_event(_PHASE, 0, name, 0, 0, site)
    try:
        yield
    finally:
        if event:
            core.end_event(event)
