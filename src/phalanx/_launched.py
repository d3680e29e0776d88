"""What a rank knows of the launch that started it: how many ranks it has, where they meet, and which have ended.

Written by whoever starts ranks (``phalanx run``, `phalanx.spawn`) and read by ranks that wait for one another. The
notes, one a line, lie in memory that the launcher holds, opened through ``/proc``: a full disk does not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from typing import Any, NamedTuple

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class End(NamedTuple):
    """How a rank has ended.

    Attributes:
        how: ``"exited with code 0"``, and the first line of its exception if one ended it.
    """

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    how: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """One attempt of a launcher, all of whose ranks are on this host.

    Attributes:
        launcher: Name of the launcher for users: ``phalanx run`` or ``phalanx.spawn``.
        notes: The file in which the launcher notes each rank that has ended, and ranks that they wait for rank 0.
        rank: That this process was given, whatever it calls itself.
    """

    launcher: str
    notes: str
    rank: int
    world_size: int
    master_addr: str
    master_port: int

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, text: str) -> Launch | None:
        """Return what `to_text` wrote; None if the text is nothing of the kind."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(**json.loads(text))
        return None

    def meets_at(self, host: str, port: int) -> bool:
        """Whether this is where the launcher has its ranks meet; nobody else can be expected there."""
        same = host == self.master_addr or (host in _LOOPBACK and self.master_addr in _LOOPBACK)
        return same and port == self.master_port

    def ended(self) -> list[End]:
        """Return the ranks that have ended; none if that can't be told."""
        return [End(*facts) for kind, facts in self._read() if kind == "ended"]

    def note_wait(self, rank: int, where: str) -> None:
        """Let the others know that this process waits, as `rank`, for a rank 0 to open the store; negative: no more."""
        with contextlib.suppress(OSError), open(self.notes, "ab", buffering=0) as file:
            file.write(_line("waits", (self.rank, rank, where)))

    def waiting(self) -> dict[int, tuple[int, str]]:
        """Return as which rank, and where in the script, those wait who do, by the ranks that they were given."""
        waits = {facts[0]: (facts[1], facts[2]) for kind, facts in self._read() if kind == "waits"}
        return {given: wait for given, wait in waits.items() if wait[0] >= 0}

    def _read(self) -> list[Any]:
        with contextlib.suppress(OSError, ValueError), open(self.notes) as file:
            return [json.loads(line) for line in file.read().splitlines()]
        return []


def note_progress(launch: str) -> None:
    """Let the launcher, if one started this process, know that it has come so far that a restart may be worth it.

    Args:
        launch: Text from the launcher, see `Launch.to_text`; may be empty.
    """
    if started := Launch.of(launch):
        with contextlib.suppress(OSError), open(started.notes, "ab", buffering=0) as file:
            file.write(_line("progress", (started.rank,)))


class Notes:
    """The launcher's side: the memory, and the notes of which ranks have ended."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("phalanx-notes")
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        """Forget the ranks of the attempt before."""
        os.ftruncate(self._fd, 0)

    def note_end(self, rank: int, pid: int, returncode: int, why: str = "") -> None:
        """Let the ranks that live know of an end.

        Args:
            returncode: Exit code, or minus the signal.
            why: First line of the exception, if one ended it.
        """
        if self._fd < 0:
            return
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"exited with code {returncode}"
        code, signal = (None, -returncode) if returncode < 0 else (returncode, None)
        os.write(self._fd, _line("ended", End(rank, pid, code, signal, f"{how} ({why})" if why else how)))

    @property
    def has_progress(self) -> bool:
        """Whether a rank has noted progress since `clear`."""
        size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        return size > 0 and any(json.loads(line)[0] == "progress" for line in os.pread(self._fd, size, 0).splitlines())

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _line(kind: str, facts: tuple[Any, ...]) -> bytes:
    return (json.dumps([kind, facts]) + "\n").encode()
