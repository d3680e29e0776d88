"""The records of a job's Trainer, found by the file that one of the job's ranks has open. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from phalanx.host.processes import open_files
from phalanx.train.report.metrics import NAME, MetricsTail, Record


def trainer_folder_of(pids: Iterable[int]) -> str:
    """Return the folder in which the Trainer of these ranks writes its metrics; "" if none of them has it open."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for target in open_files(pid).values():
                if os.path.basename(target) == NAME:
                    return os.path.dirname(target)
    return ""


class Training:
    """The records of a job's Trainer, read on at each look.

    Args:
        most_bytes: Number of bytes before the end of the file with which the first look begins.

    Attributes:
        folder: Folder of the Trainer; empty until one is found.
    """

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.folder: str = ""
        self._most_bytes = most_bytes
        self._tail: MetricsTail | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the last look has left records for the next one."""
        return self._tail is not None and self._tail.is_behind

    def look(self, pids: Iterable[int]) -> list[Record]:
        """Return the records that are new since the last look.

        Args:
            pids: Processes of the job's ranks on this host; only rank 0 writes records.
        """
        if self._tail is None and (folder := trainer_folder_of(pids)):
            self.folder, self._tail = folder, MetricsTail(folder, self._most_bytes)
        with contextlib.suppress(OSError):
            return self._tail.read() if self._tail is not None else []
        return []
