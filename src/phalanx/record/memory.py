"""`BoxMemory`: memory for the boxes of ranks. The process that starts the ranks holds it, so it outlives the ranks.

Each rank writes a ring of 8,192 events, one cache line each, into 640 KiB of a memfd that ranks open through ``/proc``.
The supervisor saves the boxes after each attempt. Under torchrun or mpirun, or without a launcher, a rank's box lies in
a memfd of its own and is gone when the rank ends: no other process holds it. (A file in ``/dev/shm`` or ``/tmp`` would
survive, but somebody would have to remove it.) A process that may read the rank's ``/proc/PID/fd`` can read its box.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from phalanx.host.shared_blocks import path_of, unnamed_file
from phalanx.record.box import BOX_BYTES, MEMORY_NAME, save_boxes
from phalanx.wire.files import free_pages


class BoxMemory:
    """Memory for one box of each rank on this host, in the order of local ranks.

    If memory or descriptors are short, no such memory is made, and each rank records in memory of its own.
    """

    def __init__(self, num_boxes: int) -> None:
        self._num_boxes = num_boxes
        self._fd = -1  # -1: there is no memory
        with contextlib.suppress(OSError):
            self._fd = unnamed_file(MEMORY_NAME)
            try:
                os.ftruncate(self._fd, num_boxes * BOX_BYTES)
            except OSError:  # such as RLIMIT_FSIZE, which applies to a memfd
                self.close()

    def places(self, num_boxes: int) -> list[tuple[int, int]]:
        """Return the open file and the offset of each of the first `num_boxes` boxes; empty if there is no memory."""
        return [(self._fd, number * BOX_BYTES) for number in range(num_boxes)] if self._fd >= 0 else []

    @property
    def path(self) -> str:
        """Path at which ranks open the memory, for `_env.RECORD_VARIABLE`; "" if there is none."""
        return path_of(self._fd) if self._fd >= 0 else ""

    def save(self, folder: Path) -> None:
        """Write each box into its own file, and clear the memory for the next ranks.

        Raises:
            OSError: The folder or a file can't be written.
        """
        if self._fd < 0:
            return
        try:
            save_boxes(self._fd, folder)
        finally:
            with contextlib.suppress(OSError):
                # Ranks that are kept for the next attempt still map the file, so it must not shrink.
                free_pages(self._fd, 0, self._num_boxes * BOX_BYTES)

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
