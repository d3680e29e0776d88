"""What ranks and commands know about a launch: how many ranks there are, where they meet, and which have ended.

`Notes` is the launcher's side, `Launch` is a rank's side, and `Started` is what commands such as ``phalanx why`` read.

The launcher (``phalanx run`` or `phalanx.spawn`) notes each rank that has ended, and with which exception. The notes,
one per line, lie in memory that the launcher holds and ranks open through ``/proc``, so a full disk does not matter.

**Ranks that can't arrive any more.** Waiting ranks raise `RankFailed` once fewer ranks are alive than the world needs.
They do so only if the world consists of the launch's ranks, that is, if it meets at the launcher's address: elsewhere,
a rank may meet other programs, and ranks may have other numbers. A rank also notes that it is waiting for rank 0. If
all ranks of the launch have noted this, each learns that none of them is rank 0.

A group that is being formed also reads the notes about processes that are known to be its members. The members of the
world are known from the roll call, those of other groups from the world. For a group that a program makes by hand over
a store of its own, no member is known before the ranks have said hello. When a member has ended, the group looks once
more before it raises: just before its end, the member may have said hello, or left its own error in the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

from phalanx.failure.ending import Ending
from phalanx.host.proc_stat import stat_fields
from phalanx.host.shared_blocks import path_of, unnamed_file
from phalanx.wire.messages import GarbledError, as_facts, parse_json, read_value, understand

MEMORY_NAME = "phalanx-notes"
"""Name of the memory in which the notes lie, as ``/proc/PID/fd`` shows it."""
_PF_EXITING = 0x4  # flag of linux/sched.h
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


_Processes: TypeAlias = dict[int, tuple[int, int, int]]  # by rank: pid, start time and pid namespace
_meetings: weakref.WeakKeyDictionary[Any, _Processes] = weakref.WeakKeyDictionary()


def note_meeting(store: Any, pids: dict[int, int]) -> None:
    """Note which processes of this host have met in a store, by rank."""
    _meetings[store] = {rank: (pid, 0, 0) for rank, pid in pids.items()}


def met_in(store: Any) -> _Processes:
    """Return which processes of this host are known to have met in a store, or in the store that it wraps, by rank.

    Only the pids are known; the start times and pid namespaces are 0.
    """
    while store is not None:
        if store in _meetings:
            return _meetings[store]
        store = getattr(store, "underlying_store", None)
    return {}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One attempt of a launcher, all of whose ranks are on this host.

    Attributes:
        launcher: Name of the launcher for users: ``phalanx run`` or ``phalanx.spawn``.
        notes: Path of the file in which the launcher notes the ends of ranks, and ranks note that they wait for rank 0.
        rank: Rank that the launcher gave this process; the process may claim another rank.
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
        """Return the launch that `to_text` described; None if the text is something else."""
        with contextlib.suppress(GarbledError):
            launch: Launch = understand(text, cls)
            return launch
        return None

    def meets_at(self, host: str, port: int) -> bool:
        """Whether the launcher's ranks, and no others, meet at this address."""
        same = host == self.master_addr or (host in _LOOPBACK and self.master_addr in _LOOPBACK)
        return same and port == self.master_port

    def is_world(self, rank: int, world_size: int) -> bool:
        """Whether a world of this size, in which this process has this rank, consists of the launcher's ranks.

        Ask `_env.is_rank` first: a process that a rank starts has worlds of its own.
        """
        return (rank, world_size) == (self.rank, self.world_size)

    def ended(self) -> list[Ending]:
        """Return the ranks that have ended; none if the notes can't be read."""
        with contextlib.suppress(GarbledError):
            return [read_value(facts, Ending) for kind, facts in self._read() if kind == "ended"]
        return []

    def note_wait(self, rank: int, where: str) -> None:
        """Note that this process, as `rank`, waits for rank 0 to open the store; -1 notes that it no longer waits."""
        self._note("waits", (self.rank, rank, where))

    def note_progress(self) -> None:
        """Note that this process has progressed far enough for a restart to be worthwhile."""
        self._note("progress", (self.rank,))

    def note_solo(self) -> None:
        """Note that this process has trained without meeting any other process."""
        self._note("alone", (self.rank,))

    def note_apart(self) -> None:
        """Note that this process has trained in a group, but exchanged nothing with the other ranks."""
        self._note("apart", (self.rank,))

    def waiting(self) -> dict[int, tuple[int, str]]:
        """Return the rank and the line that each waiting process claims, by the rank that the launcher gave it."""
        waits = {facts[0]: (facts[1], facts[2]) for kind, facts in self._read() if kind == "waits"}
        return {given: wait for given, wait in waits.items() if wait[0] >= 0}

    def lender_for(self, pid: int) -> str:
        """Return the socket that `note_lender` last noted for a process; "" if there is none."""
        return next((facts[1] for kind, facts in reversed(self._read()) if kind == "lends" and facts[0] == pid), "")

    def _note(self, kind: str, facts: object) -> None:
        with contextlib.suppress(OSError), open(self.notes, "ab", buffering=0) as file:
            file.write(_line(kind, facts))

    def _read(self) -> list[Any]:
        with contextlib.suppress(OSError, ValueError), open(self.notes) as file:
            return _notes_in(file.read())
        return []


def note_progress(launch: str) -> None:
    """Tell this process's launcher, if any, that the process has progressed far enough for a restart to be worthwhile.

    Args:
        launch: Text from the launcher, see `Launch.to_text`; may be empty.
    """
    if started := Launch.of(launch):
        started.note_progress()


def note_lender(notes: str, pid: int, path: str) -> None:
    """Note the socket at which the debugger of a rank's process can borrow a terminal.

    Args:
        notes: Path of the launcher's notes.
    """
    with open(notes, "ab", buffering=0) as file:
        file.write(_line("lends", (pid, path)))


@dataclasses.dataclass(frozen=True)
class Started:
    """An attempt of a launcher, as its notes describe it.

    Attributes:
        launcher: Name of the launcher for users: ``phalanx run`` or ``phalanx.spawn``.
        command: Command that the ranks run, in the syntax of a shell; empty if no user typed it.
        folder: Folder of the run's logs; empty if there is none.
        world_size: Number of ranks on all hosts; 0: not known yet.
        pids: Processes of the ranks of this host, by rank.
        ended: Ends of the ranks of this host that have ended, by rank.
        state: Activity of the launcher while none of its ranks runs, such as ``waiting for other nodes``; empty if the
            launcher has noted no activity since it started its ranks.
        straggler: The launcher's words about a rank that costs the others time; empty if there is none.
    """

    launcher: str
    command: str
    folder: str
    world_size: int
    pids: dict[int, int]
    ended: dict[int, Ending]
    state: str
    straggler: str


def read_started(path: str) -> Started | None:
    """Return the attempt that notes describe; None if there is none yet.

    Raises:
        OSError: The notes can't be read.
        ValueError: The notes are not in the form that a launcher of this version writes.
    """
    with open(path) as file:
        notes = _notes_in(file.read())
    try:
        return _started(notes)
    except (LookupError, TypeError):
        raise ValueError("notes of another version") from None


def _started(notes: Sequence[tuple[str, Any]]) -> Started | None:
    attempt = [facts for kind, facts in notes if kind == "attempt"]
    if not attempt:
        return None
    launcher, command, folder, world_size = attempt[-1]
    pids = {facts[0]: facts[1] for kind, facts in notes if kind == "started"}
    ended = {end.rank: end for kind, facts in notes if kind == "ended" for end in [read_value(facts, Ending)]}
    last = next(((kind, facts) for kind, facts in reversed(notes) if kind in ("state", "started", "ended")), None)
    state = "starting" if last is None else _words_of_state(*last[1]) if last[0] == "state" else ""
    straggler = next((facts[0] for kind, facts in reversed(notes) if kind == "straggler"), "")
    return Started(launcher, command, folder, world_size, pids, ended, state, straggler)


def _words_of_state(state: str, deadline_s: float | None = None) -> str:
    """Return what a launcher is doing, and for how much longer if that is limited."""
    return state if deadline_s is None else f"{state}; {max(0.0, deadline_s - time.monotonic()):.0f} s are left"


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, which tells it apart from others with the same pid.

    Return 0 if the process has ended or is ending.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = stat_fields(pid)
        # An exiting process counts as ended: it closes its files and sockets before it becomes a zombie.
        return 0 if fields[3] in "ZX" or int(fields[9]) & _PF_EXITING else int(fields[22])
    return 0


class Notes:
    """The launcher's side: the memory, and the notes of ranks that have started and ended."""

    def __init__(self) -> None:
        self._fd = unnamed_file(MEMORY_NAME)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self.path = path_of(self._fd)

    def clear(self) -> None:
        """Forget the ranks of the previous attempt."""
        os.ftruncate(self._fd, 0)

    def note_attempt(self, launcher: str, command: str, folder: str, world_size: int) -> None:
        """Note what the job runs, for commands that ask about it; see `Started`."""
        os.write(self._fd, _line("attempt", (launcher, command, folder, world_size)))

    def note_state(self, state: str, left_s: float | None = None) -> None:
        """Note what the launcher does while none of its ranks runs, for commands that ask; see `Started`.

        Args:
            left_s: Seconds after which the launcher stops waiting; None if it waits without a limit.
        """
        os.write(self._fd, _line("state", (state, None if left_s is None else time.monotonic() + left_s)))

    def note_straggler(self, words: str) -> None:
        """Note which rank has cost the other ranks time, for commands that ask; see `Started`."""
        os.write(self._fd, _line("straggler", (words,)))

    def note_start(self, rank: int, pid: int) -> None:
        """Note the process of a rank."""
        os.write(self._fd, _line("started", (rank, pid)))

    def note_end(self, end: Ending) -> None:
        """Tell the surviving ranks that a rank has ended."""
        if self._fd >= 0:
            os.write(self._fd, _line("ended", as_facts(end.for_others())))

    @property
    def has_progress(self) -> bool:
        """Whether a rank has noted progress since `clear`."""
        return bool(self._ranks("progress"))

    @property
    def num_solo(self) -> int:
        """The number of ranks that have noted since `clear` that they trained alone."""
        return len(self._ranks("alone"))

    @property
    def num_apart(self) -> int:
        """The number of ranks that have noted since `clear` that they trained in a group and exchanged nothing."""
        return len(self._ranks("apart"))

    def _ranks(self, kind: str) -> set[int]:
        """Return the ranks that have left a note of this kind."""
        size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        return {facts[0] for noted, facts in _notes_in(os.pread(self._fd, size, 0)) if noted == kind}

    def close(self) -> None:
        """Free the memory. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _notes_in(text: str | bytes) -> list[tuple[str, Any]]:
    """Return the kind and the content of each note; the methods that write notes show what each kind contains."""
    return [(kind, facts) for kind, facts in map(parse_json, text.splitlines())]


def _line(kind: str, facts: object) -> bytes:
    return (json.dumps([kind, facts]) + "\n").encode()
