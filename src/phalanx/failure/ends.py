"""Saves how the ranks of an attempt ended, beside their black boxes, for commands that run after the launcher's end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from phalanx._errors import printable
from phalanx.failure.ending import Ending
from phalanx.wire.files import open_regular, read_json
from phalanx.wire.messages import as_facts, read_value

_NAME = "ends.json"
_REASON = "ended_by"
_MOST_BYTES = 1000


def save_ends(ends: Iterable[Ending], folder: Path) -> None:
    """Write how ranks ended.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NAME).write_text(json.dumps([as_facts(end.for_others()) for end in ends]))


def load_ends(folder: Path) -> dict[int, Ending]:
    """Return the ending of each rank, by rank; empty if the endings were not saved, or can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return {end.rank: end for end in read_value(read_json(folder / _NAME), list[Ending])}
    return {}


def save_reason(reason: str, folder: Path) -> None:
    """Write what ended a run, as words such as ``phalanx run got SIGTERM``.

    Args:
        folder: Folder of the attempts' boxes.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _REASON).write_text(f"{reason}\n")


def load_reason(folder: Path) -> str:
    """Return the reason that `save_reason` wrote; "" if there is none."""
    with contextlib.suppress(OSError), open_regular(folder / _REASON) as file:
        return printable(file.read(_MOST_BYTES).decode(errors="replace").strip())
    return ""
