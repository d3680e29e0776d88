"""`BoxMemory`: memory for the boxes of ranks, held by the process that starts them and outliving them.

Each rank writes a ring of 8,192 events, one cache line each, into 640 KiB of a memfd that ranks open through
``/proc``. The supervisor saves it after each attempt. Under torchrun, mpirun or by hand a rank's box lies in a memfd
of its own, which ends with the rank: nobody is there to hold it, and a file in ``/dev/shm`` or ``/tmp`` would need
somebody to clean it up. Whoever may read ``/proc/PID/fd`` can read a box.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from phalanx.record.box import BOX_BYTES, MEMORY_NAME, save_boxes
from phalanx.wire.files import free_pages


class BoxMemory:
    """Memory for one box of each rank on this host, in the order of local ranks.

    If memory or descriptors are short, there is none, and each rank records in its own memory.
    """

    def __init__(self, num_boxes: int) -> None:
        self._num_boxes = num_boxes
        self._fd = -1  # none
        with contextlib.suppress(OSError):
            self._fd = os.memfd_create(MEMORY_NAME)
            try:
                os.ftruncate(self._fd, num_boxes * BOX_BYTES)
            except OSError:  # RLIMIT_FSIZE
                self.close()

    def places(self, num_boxes: int) -> list[tuple[int, int]]:
        """Return the open file and the offset of each of the first boxes; empty if there is no memory."""
        return [(self._fd, number * BOX_BYTES) for number in range(num_boxes)] if self._fd >= 0 else []

    @property
    def path(self) -> str:
        """Path at which the ranks open it, for `_env.RECORD_VARIABLE`; empty: there is none."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""

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
                # Kept ranks still map it, so the file must keep its size.
                free_pages(self._fd, 0, self._num_boxes * BOX_BYTES)

    def close(self) -> None:
        """Give the memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
