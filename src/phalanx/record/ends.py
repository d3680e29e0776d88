"""The ends of an attempt's ranks, kept beside their saved boxes: by then nobody else knows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from phalanx._errors import printable
from phalanx.wire.files import open_regular, read_json
from phalanx.wire.messages import read_value

_NAME = "ends.json"
_REASON = "ended_by"
_MOST_BYTES = 1000


@dataclasses.dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        code: Exit code, or minus the number of the signal that ended it.
        was_told: Whether it was told to end, because another rank had failed or the job was to.
        at_ns: Time of its end, by CLOCK_MONOTONIC of the host.
    """

    code: int
    was_told: bool
    at_ns: int


def save_ends(ends: Mapping[int, End], folder: Path) -> None:
    """Write how ranks ended, by their numbers.

    Raises:
        OSError: The folder or the file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NAME).write_text(json.dumps({str(rank): dataclasses.asdict(end) for rank, end in ends.items()}))


def load_ends(folder: Path) -> dict[int, End]:
    """Return how ranks ended, by their numbers; nothing if that was not saved, or can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return {int(rank): end for rank, end in read_value(read_json(folder / _NAME), dict[str, End]).items()}
    return {}


def save_reason(reason: str, folder: Path) -> None:
    """Write what ended a run, as words such as ``phalanx run got SIGTERM``.

    Args:
        folder: Folder of the attempts' boxes.

    Raises:
        OSError: It can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _REASON).write_text(f"{reason}\n")


def load_reason(folder: Path) -> str:
    """Return what `save_reason` has written; empty if nothing."""
    with contextlib.suppress(OSError), open_regular(folder / _REASON) as file:
        return printable(file.read(_MOST_BYTES).decode(errors="replace").strip())
    return ""
