"""The snapshots that a launcher holds in memory for its job, as other processes of its user can read them."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from phalanx.checkpoint.memory import layout
from phalanx.record.box import memories_of


class Held(NamedTuple):
    """The snapshots of one host.

    Attributes:
        newest: Head of the newest snapshot that is complete on this host; None if there is none.
        copied: The snapshot that was copied to other hosts last; None if there is none.
        num_wanted: Number of other hosts that should have a copy.
    """

    newest: layout.Head | None = None
    copied: layout.Copied | None = None
    num_wanted: int = 0


def held_by(launcher_pid: int) -> Held:
    """Return the snapshots that a launcher holds; none if it can't be asked."""
    with contextlib.suppress(OSError):
        for path in memories_of(launcher_pid, layout.MEMORY_NAME) if launcher_pid else ():
            return held_in(path)
    return Held()


def held_in(path: str) -> Held:
    """Return the snapshots in a launcher's memory.

    Raises:
        OSError: The memory can't be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        newest = max(layout.common_heads(fd), key=lambda head: (head.attempt, head.step), default=None)
        return Held(newest, layout.last_copied(fd), layout.wanted_replicas(fd))
    finally:
        os.close(fd)
