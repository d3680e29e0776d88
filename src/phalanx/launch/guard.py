"""Kills what forked ranks have started if the process that forked them is killed, which can do nothing about it then.

The ranks themselves end with that process, by the kernel's hand. Processes below them do not: but they are in the
ranks' process groups, whose numbers a shell knows that waits for its input to end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence

_SCRIPT = 'while read -r line; do last=$line; done; for pid in $last; do kill -s KILL -- "-$pid"; done 2> /dev/null'


class Guard:
    """The guard of this process. It starts with the first ranks, and ends with this process.

    Attributes:
        pid: Process id of the guard; None: there is none yet.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._owner = 0

    @property
    def fd(self) -> int:
        """Descriptor by which the guard sees that this process lives; -1: none."""
        return self._pipe

    def watch(self, pids: Sequence[int]) -> None:
        """Have the process groups of these ranks killed if this process is, and none else."""
        if self._owner != os.getpid():
            self._start()
        with contextlib.suppress(OSError):  # somebody has killed the guard
            os.write(self._pipe, f"{' '.join(map(str, pids))}\n".encode())

    def let_go(self) -> None:
        """Give up, in a forked rank, what keeps the guard waiting."""
        if self._pipe >= 0 and self._owner != os.getpid():
            os.close(self._pipe)
            self._pipe = -1

    def _start(self) -> None:
        self.let_go()
        theirs, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT],
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        self.pid, self._owner = self._process.pid, os.getpid()
        self._process.returncode = 0  # it is not to be waited for, nor warned of


guard = Guard()
"""That of this process."""
