"""Ends the processes that forked ranks have started, however the ranks or their parent end.

If the parent is killed, the kernel kills the ranks, but not the processes that the ranks have started. The cleaner then
kills these. It is a shell that knows the ranks' process groups, and that waits for the end of its input. As long as the
parent lives, the parent itself adopts processes that ranks leave behind, recognizes them by the rank's pid in their
environment, and kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx import _env
from phalanx.host.proc_stat import children_of
from phalanx.launch.deadlines import CHILDREN_S
from phalanx.launch.processes.descendants import adopt_orphans, adopts_orphans, reap

_SCRIPT = f"""
while read -r line; do last=$line; done
for pid in $last; do kill -s KILL -- "-$pid"; done 2> /dev/null
for pid in $last; do
    for file in $(grep -lzx -- "{_env.PROCESS_VARIABLE}=$pid" /proc/[0-9]*/environ); do
        one=${{file#/proc/}}
        kill -s KILL "${{one%/environ}}"
    done
done 2> /dev/null
"""


class Cleaner:
    """The cleaner of this process. It is started with the first ranks, and ends with this process.

    Attributes:
        pid: Process id of the cleaner; None: there is none yet.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._owner = 0

    @property
    def fd(self) -> int:
        """Descriptor by which the cleaner sees that this process is alive; -1: there is no such descriptor."""
        return self._pipe

    def watch(self, pids: Sequence[int]) -> None:
        """Tell the cleaner to kill the process groups of exactly these ranks if this process is killed."""
        if self._owner != os.getpid():
            self._start()
        with contextlib.suppress(OSError):  # the cleaner itself was killed
            os.write(self._pipe, f"{' '.join(map(str, pids))}\n".encode())

    def let_go(self) -> None:
        """In a forked rank, close the inherited copy of the pipe that keeps the cleaner waiting."""
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
        self._process.returncode = 0  # otherwise Python would warn that nobody has waited for the cleaner


cleaner = Cleaner()
"""The cleaner of this process."""


class Orphans:
    """Adopts the processes that later ranks leave behind, whatever their session, and kills these processes in `end`.

    While this object is in use, the process also adopts orphans of its other descendants, but leaves those alone.
    Children that another thread has started appear in that thread's list in ``/proc``, so they are not mistaken for
    orphans.
    """

    def __init__(self) -> None:
        self._had = adopts_orphans()
        self._before = set(children_of(os.getpid()))
        self._is_over = False
        adopt_orphans(True)

    def end(self, ranks: Sequence[int]) -> None:
        """Kill and reap the orphans of `ranks`, with all their descendants. Idempotent.

        Args:
            ranks: Process ids of the ranks, which must have been reaped.
        """
        if self._is_over:
            return
        self._is_over = True
        marks = [f"{_env.PROCESS_VARIABLE}={pid}".encode() for pid in ranks]
        deadline = time.monotonic() + CHILDREN_S
        known = {*self._before, *ranks, *([] if cleaner.pid is None else [cleaner.pid])}
        while (pids := set(children_of(os.getpid())) - known) and time.monotonic() < deadline:
            for pid in pids:
                if not _is_of_ranks(pid, marks):
                    known.add(pid)
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                reap(pid, deadline - time.monotonic())
        adopt_orphans(self._had)


def _is_of_ranks(pid: int, marks: Sequence[bytes]) -> bool:
    """Return whether an adopted process comes from a rank, judging by the environment that it was started with."""
    own = Path(f"/proc/{pid}")
    try:
        environ = (own / "environ").read_bytes()
        if not environ:  # the process has ended, or its environment is empty
            return True
        is_fork = environ == Path("/proc/self/environ").read_bytes()
        return is_fork or any(mark in environ.split(b"\0") for mark in marks)
    except ProcessLookupError:
        return True
    except OSError:  # the process belongs to another user
        return False
