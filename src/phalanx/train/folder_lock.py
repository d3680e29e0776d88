"""A run folder belongs to one job at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from io import FileIO
from typing import Any

from phalanx import _env
from phalanx._errors import PhalanxError, printable
from phalanx._files import open_regular
from phalanx._rank_group import RankGroup
from phalanx.train import restarts

_NAME = ".lock"
_PATIENCE_S = 1.0  # a holder that was just killed lets go when its memory is freed
_PATIENCE_IN_RESTART_S = 10.0
_LOOK_EVERY_S = 0.02
_MAX_NOTE_BYTES = 4096

_held: set[FileIO] = set()


class FolderLock:
    """While open, keeps other jobs out of a run's folder; rank 0 holds the lock, which ends with its process.

    Where the file system can't lock, `problem` says so and nobody is kept out.

    Args:
        folder: Folder of the run; made if missing.
        ranks: All ranks of the job.

    Attributes:
        problem: Reason why there is no lock; empty if there is one.
        was_ours: Whether an earlier attempt of this job was allowed into the folder: see `settle`.
        is_first: Whether no attempt of this job was in the folder; a restart that can't tell assumes that one was.

    Raises:
        PhalanxError: On entering, on every rank: another job holds it, or the folder can't be made.
    """

    def __init__(self, folder: str, ranks: RankGroup) -> None:
        self._folder, self._ranks = folder, ranks
        self._file: FileIO | None = None
        self._job = _job()
        self.problem: str = ""
        self.was_ours: bool = False
        self.is_first: bool = not restarts.is_restart()

    def __enter__(self) -> FolderLock:
        holder: dict[str, Any] | None = None
        unmade = ""
        if self._ranks.rank == 0:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                unmade = error.strerror or str(error)
            try:
                holder = None if unmade else self._take()
            except OSError as error:
                self.problem = (
                    f"{self._folder} can't be locked ({error.strerror}): make sure that no other job trains in it"
                )
        facts = (holder, self.was_ours, self.is_first, unmade)
        holder, self.was_ours, self.is_first, unmade = self._ranks.gather(facts)[0]
        if unmade:
            raise PhalanxError(
                f"rank {self._ranks.rank}: Trainer.fit: the run folder {os.path.abspath(self._folder)} can't be made: "
                f"{unmade}. Give the run another one (folder=... or PHALANX_RUN_FOLDER)",
                op="fit",
                entry="run-folder",
            )
        if holder is not None:
            who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
            raise PhalanxError(
                f"rank {self._ranks.rank}: Trainer.fit: another job is training in {self._folder}: {printable(who)}. "
                "Wait until it has ended, end it, or give this one another folder (folder=... or PHALANX_RUN_FOLDER)",
                op="fit",
                entry="folder-in-use",
                holder=holder,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            _held.discard(self._file)
            self._file.close()

    def settle(self) -> None:
        """Note that this job was allowed into the folder: restarts of it are, whatever they find there."""
        if self._file is not None and not self.was_ours:
            self._write_note(self._job)

    def _take(self) -> dict[str, Any] | None:
        """Take the lock; return who has it, if it is not to be had.

        Raises:
            OSError: The file system can't lock, or the file can't be written.
        """
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(os.path.join(self._folder, _NAME), os.O_RDWR | os.O_CREAT))
            deadline_s = time.monotonic() + (_PATIENCE_IN_RESTART_S if restarts.is_restart() else _PATIENCE_S)
            while not _lock(file):
                if time.monotonic() > deadline_s:
                    return _read_note(file)
                time.sleep(_LOOK_EVERY_S)
            stack.pop_all()
        self._file = file
        _held.add(file)
        note = _read_note(file)
        self.was_ours = restarts.is_restart() and bool(self._job) and note.get("job") == self._job
        if self._job and note.get("host") in (None, os.uname().nodename):  # else rank 0 may have moved between hosts
            self.is_first = not self.was_ours
        self._write_note(self._job if self.was_ours else "")
        return None

    def _write_note(self, job: str) -> None:
        assert self._file is not None
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        note = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "since": since, "job": job})
        with contextlib.suppress(OSError):  # a full disk: the lock itself holds
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(f"{note}\n".encode())


def _lock(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_note(file: FileIO) -> dict[str, Any]:
    """Return what the holder has written; what is not its note counts as empty."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        file.seek(0)
        note = json.loads(file.read(_MAX_NOTE_BYTES))
        if isinstance(note, dict):
            return note
    return {}


def _job() -> str:
    """Return what all attempts of this job have in common: where the launcher keeps their logs; empty without one."""
    before, attempt, _ = _env.environment().get("TORCHELASTIC_ERROR_FILE", "").rpartition(f"{os.sep}attempt_")
    return before if attempt else ""


def _let_go_in_child() -> None:
    for file in _held:  # a loader's worker that outlives its rank must not hold the lock
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
