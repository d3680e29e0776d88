"""One attempt of one job at a time may write to a folder: the one that has claimed the folder's newest epoch.

    .lock            the holder's note, as JSON; the holder keeps it locked, and renews it every second
    .epoch-13        created with O_EXCL to claim epoch 13, so that only one process can claim it

A process that is started again while it is cut off from its job can't know that the job still runs, and begins a new
job if the flags allow it. No vote can prevent that, but the new job can be refused the folder. The Trainer's lock is
built on this module. In other scripts, `checkpoint.save` claims the folder that it writes to if the job has several
hosts.

- **Epochs** grow by one with each attempt that is admitted, whichever job it belongs to. O_EXCL, rather than a lock,
  decides between claims of one epoch, because not every file system locks across hosts. ``PHALANX_EPOCH`` holds the job
  and the attempt of a rank: a newer attempt of the same job takes the folder at once, an older attempt never takes it.
- **The lock of a process that died on this kernel is free at once**, so a job that starts again on the same host does
  not wait. The note of a holder on another host counts as abandoned after 4 s without a renewal. A renewal changes a
  counter, and the reader measures the time between changes with its own monotonic clock: no wall clocks are compared.
- **Publishing** checks the epoch last, just before the rename. After a process has taken a folder, and before it saves,
  it renames all drafts in that folder. So a rank that was suspended between its check and its rename finds no draft to
  rename. One gap remains: a rank that is suspended between its check and a write can still append a line to
  metrics.jsonl.
- **The younger job yields.** When the folder refuses the younger job, or the younger job's agent meets the older job,
  the younger job ends its ranks. Its agent then re-executes itself with another id and without the right to begin a
  job. Durations decide which job is younger, not the keys of the jobs' views, because a job that fails often has larger
  keys.

**Not built: a claim that lets the second of two hosts continue when the first loses power.** The second would have to
know that the first no longer trains. A claim shows only that it is not being renewed, which is also true of a host that
has lost its storage, continues to train, and may still write elsewhere. A folder alone can keep both sides from
publishing twice, but not from training twice.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from io import FileIO
from typing import Annotated

from phalanx import _env
from phalanx._errors import CheckpointError, printable
from phalanx.host.network import boot_id
from phalanx.wire.files import lock_within, open_regular, read_json
from phalanx.wire.messages import GarbledError, between, read_value, understand
from phalanx.wire.waiting import wait_until

BEAT_S = 1.0
SILENCE_S = 4.0
"""If a note from another host does not change for this long, the job that wrote it counts as ended."""
_STALE_S = 2.0  # if the last renewal is older, the folder is checked again
_LOOK_EVERY_S = 0.02
_NAME = ".lock"
_CLAIM = re.compile(r"\.epoch-([0-9]{1,18})")
_NUM_CLAIMS_KEPT = 8
_MOST_EPOCHS = 10**17
_NOTE_BYTES = 4096  # fixed size: the file is overwritten and never truncated, so readers see the old or the new note


class OtherSide(CheckpointError):
    """A newer attempt, or the other side of a split job, holds the folder: this process's state is out of date."""

    entry = "folder-in-use"


@dataclasses.dataclass(frozen=True)
class Claimant:
    """This attempt of this job, as its launcher describes it.

    Attributes:
        job: Name that all attempts of the job share; empty if the job has no launcher.
        attempt: Number of the attempt, greater than those of earlier attempts.
        name: Name that all jobs with the same rendezvous share; empty if the job has only one host.
    """

    job: str = ""
    attempt: tuple[int, ...] = ()
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Note:
    """The note of a folder's holder.

    Attributes:
        boot: Boot id of the holder's kernel; it changes when that host restarts.
        beat: Number of times that the holder has renewed the note.
        is_open: Whether the holder has not yet released the folder.
        is_settled: Whether the holder's job was admitted to the folder.
    """

    host: str = ""
    pid: int = 0
    since: str = ""
    boot: str = ""
    job: str = ""
    attempt: tuple[int, ...] = ()
    name: str = ""
    epoch: Annotated[int, between(0, _MOST_EPOCHS - 1)] = 0
    beat: int = 0
    is_open: bool = False
    is_settled: bool = False

    @property
    def who(self) -> str:
        return printable(f"process {self.pid} on {self.host}, since {self.since}")


@dataclasses.dataclass(frozen=True)
class Fence:
    """The right to write to a folder, which every rank of the job can check."""

    folder: str
    epoch: int

    def check(self) -> None:
        """Check that no newer epoch of the folder has been claimed.

        Raises:
            OtherSide: A newer epoch has been claimed.
        """
        note = read_note(self.folder)
        if note.epoch > self.epoch or os.path.exists(_claim_path(self.folder, self.epoch + 1)):
            raise OtherSide(
                f"{self.folder} has been taken over by {note.who}: epoch {max(note.epoch, self.epoch + 1)}, and this "
                f"one has {self.epoch}. Nothing more is written here; this job was cut off or stopped for a while"
            )


class Claim:
    """One process's claim of a folder, which ends with `release` or with the process.

    Args:
        folder: Existing folder.
        patience_s: Seconds to wait for a holder that is about to end.

    Attributes:
        problem: Reason why the file system can't lock; empty if it can.
        before: Note of the previous holder.
    """

    def __init__(self, folder: str, *, patience_s: float) -> None:
        self._folder, self._patience_s = os.path.abspath(folder), patience_s
        self._claimant = claimant()
        self._file: FileIO | None = None
        self._is_over = threading.Event()
        self._guard = threading.Lock()
        self._beats: threading.Thread | None = None
        self._renewed_s = 0.0
        self._lost: OtherSide | None = None
        self.problem: str = ""
        self.before: Note = Note()
        self._note = Note()

    def take(self) -> Note | None:
        """Take the folder; return the note of its holder if it can't be taken.

        Raises:
            OSError: The claim's files can't be written, or belong to another program.
        """
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open_regular(self._path, os.O_RDWR | os.O_CREAT))
            is_locked = self._lock()
            self.before = note = read_note(self._folder)
            if not self._may_take(note, is_locked=is_locked) or not self._claim_next(note):
                self._file = None
                return read_note(self._folder)
            stack.pop_all()
        _claimed[self._folder] = self
        self._beats = threading.Thread(target=self._renew_until_over, name="phalanx-claim", daemon=True)
        self._beats.start()
        return None

    def settle(self, *, is_settled: bool) -> None:
        """Record whether this job was admitted to the folder."""
        with self._guard:
            self._write(dataclasses.replace(self._note, is_settled=is_settled))

    def check(self) -> None:
        """Check that the folder is still ours. This reads files only if the process was suspended for a while.

        Raises:
            OtherSide: Another process has taken the folder.
        """
        if self._lost is None and time.monotonic() - self._renewed_s > _STALE_S:
            self._renew()
        if self._lost is not None:
            raise self._lost

    @property
    def fence(self) -> Fence:
        return Fence(self._folder, self._note.epoch)

    def release(self) -> None:
        """Release the folder to others. Idempotent."""
        self._is_over.set()
        if self._beats is not None:
            self._beats.join()
        if self._file is not None:
            if self._lost is None:
                with self._guard:
                    self._write(dataclasses.replace(self._note, is_open=False))
            self.unlock()

    def unlock(self) -> None:
        """Close the file, which releases the lock."""
        if self._file is not None:
            self._file.close()
        self._file = None
        _claimed.pop(self._folder, None)

    # ------------------------------------------------------------ taking it

    @property
    def _path(self) -> str:
        return os.path.join(self._folder, _NAME)

    def _lock(self) -> bool:
        """Return whether this process has locked the note; if the file system can't lock, set `problem`."""
        assert self._file is not None
        try:
            return lock_within(self._patience_s, self._file, fcntl.LOCK_EX)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False

    def _may_take(self, note: Note, *, is_locked: bool) -> bool:
        ours = self._claimant
        if ours.job and note.job == ours.job and note.attempt != ours.attempt:
            return note.attempt < ours.attempt
        if not is_locked and not self.problem:
            return False
        if not note.is_open or (is_locked and note.boot in ("", _boot())):
            return True  # released, or left by an ended process of this host: a live process would have the lock
        return self._is_silent(note)

    def _is_silent(self, note: Note) -> bool:
        def has_changed() -> bool | None:
            return read_note(self._folder) != note or None

        ends_s = time.monotonic() + SILENCE_S
        return wait_until(has_changed, ends_s, least_s=_LOOK_EVERY_S, most_s=_LOOK_EVERY_S) is None

    def _claim_next(self, note: Note) -> bool:
        """Claim the next epoch; return False if another process was faster."""
        newest = max(_claims(self._folder), default=0)
        if newest > note.epoch and not self._is_silent(note):
            return False
        epoch = max(newest, note.epoch) + 1
        if epoch >= _MOST_EPOCHS:  # readers ignore larger numbers
            name = _claim_path(self._folder, epoch - 1)
            raise OSError(errno.EOVERFLOW, f"{name} was made by another program: remove it")
        try:
            os.close(os.open(_claim_path(self._folder, epoch), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        since, ours = time.strftime("%Y-%m-%d %H:%M:%S %z"), self._claimant
        place = (os.uname().nodename, os.getpid(), since, _boot())
        self._write(Note(*place, ours.job, ours.attempt, ours.name, epoch, is_open=True))
        for old in _claims(self._folder):
            if old <= epoch - _NUM_CLAIMS_KEPT:
                with contextlib.suppress(OSError):
                    os.unlink(_claim_path(self._folder, old))
        return not os.path.exists(_claim_path(self._folder, epoch + 1))  # no newer claim has been made meanwhile

    # ------------------------------------------------------------ keeping it

    def _renew_until_over(self) -> None:
        while not self._is_over.wait(BEAT_S) and self._lost is None:
            self._renew()

    def _renew(self) -> None:
        with self._guard:
            if self._file is None:
                return
            try:
                self.fence.check()
            except OtherSide as error:
                self._lost = error
                return
            with contextlib.suppress(OSError):  # fails while an older attempt of our job still has the lock
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(dataclasses.replace(self._note, beat=self._note.beat + 1))

    def _write(self, note: Note) -> None:
        """Overwrite the note."""
        self._note, self._renewed_s = note, time.monotonic()
        text = json.dumps(dataclasses.asdict(note)).encode()[: _NOTE_BYTES - 1]
        # Opened and closed each time, because a network file system shows other hosts a change only once the file is
        # closed. If the disk is full, the lock still holds.
        with contextlib.suppress(OSError), open_regular(self._path, os.O_RDWR) as file:
            file.write(text.ljust(_NOTE_BYTES - 1) + b"\n")


_claimed: dict[str, Claim] = {}  # claims of this process, by folder


def fence_for(folder: str) -> Fence | None:
    """Return the fence of the checkpoints in `folder`; None if they need no fence.

    The fence of a Trainer's checkpoints belongs to the claim on the run's folder. Other scripts claim the folder of the
    checkpoints itself if their job has several hosts, because a host that was cut off may have started the job a second
    time.

    Raises:
        OtherSide: Another side of the job holds the folder.
    """
    for path in (folder, os.path.dirname(folder)):
        if (claim := _claimed.get(os.path.abspath(path))) is not None:
            return claim.fence
    if not claimant().name:
        return None
    claim = Claim(folder, patience_s=BEAT_S)
    if (holder := claim.take()) is not None:
        raise other_side(folder, holder)
    atexit.register(claim.release)
    return claim.fence


def other_side(folder: str, holder: Note, prefix: str = "") -> OtherSide:
    return OtherSide(
        f"{prefix}another side of this job trains in {folder}: {holder.who}, epoch {holder.epoch}. This host was cut "
        "off from it, or was started a second time. It writes nothing there, and joins the other side when it can "
        "reach it",
        op="fit",
        holder=dataclasses.asdict(holder),
    )


def is_other_side(holder: Note) -> bool:
    """Return whether a folder's holder is another side of this job: an attempt of it, or a job with its rendezvous."""
    ours = claimant()
    return bool(ours.job) and (holder.job == ours.job or (ours.name != "" and holder.name == ours.name))


def claimant() -> Claimant:
    """Return the attempt for which this process claims folders, as its launcher describes it."""
    environ = _env.environment()
    with contextlib.suppress(GarbledError):
        return understand(environ.get(_env.EPOCH_VARIABLE, ""), Claimant)
    before, number, _ = environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition(f"{os.sep}attempt_")
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return Claimant(before if number else "", (int(count) if count.isdigit() else 0,))


def read_note(folder: str) -> Note:
    """Return the note of a folder's holder; an empty note if the file is missing or invalid."""
    with contextlib.suppress(OSError, ValueError):
        return read_value(read_json(os.path.join(folder, _NAME)), Note)
    return Note()


def _claims(folder: str) -> Iterator[int]:
    for name in os.listdir(folder):
        if found := _CLAIM.fullmatch(name):
            yield int(found[1])


def _claim_path(folder: str, epoch: int) -> str:
    return os.path.join(folder, f".epoch-{epoch}")


def _boot() -> str:
    with contextlib.suppress(OSError):  # systems other than Linux have no boot id
        return boot_id()
    return ""


def _unlock_in_child() -> None:
    for claim in [*_claimed.values()]:  # a forked child, such as a data loader's worker, must not hold the lock
        claim.unlock()


os.register_at_fork(after_in_child=_unlock_in_child)
