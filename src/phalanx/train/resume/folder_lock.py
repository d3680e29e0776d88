"""`FolderLock`: a run folder belongs to one job at a time.

Rank 0 holds a lock on the file ``.lock``. The kernel drops the lock when the process of rank 0 ends. The file names the
job that holds the lock, so that the errors of other jobs can name this job. Once the first attempt of a job was
admitted to the folder, restarts of that job are never refused, even if their settings are drawn at random. The file
identifies the admitted job, by its id or by the folder of its logs. `phalanx.checkpoint.disk.claim` does the work.
"""

from __future__ import annotations

import dataclasses
import os

from phalanx._errors import PhalanxError
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.claim import Claim, Note, claimant, is_other_side, other_side
from phalanx.train.resume import restarts
from phalanx.wire.rank_group import RankGroup

_PATIENCE_S = 1.0  # a killed holder releases the lock only once its memory is freed
_PATIENCE_IN_RESTART_S = 10.0


class FolderLock:
    """While open, keeps other jobs out of a run's folder; rank 0 holds the claim, which ends with its process.

    If the file system can't lock, `problem` says so, and other jobs are kept out only while rank 0 renews its claim.

    Args:
        folder: Folder of the run; made if missing.
        ranks: All ranks of the job.

    Attributes:
        problem: Reason why there is no lock; empty if there is one.
        was_ours: Whether an earlier attempt of this job was admitted to the folder: see `settle`.
        is_first: Whether no earlier attempt of this job was in the folder; False if a restart can't tell.

    Raises:
        PhalanxError: On entering, on every rank: another job holds the folder, or the folder can't be made.
    """

    def __init__(self, folder: str, ranks: RankGroup) -> None:
        self._folder, self._ranks = folder, ranks
        self._claim: Claim | None = None
        self.problem: str = ""
        self.was_ours: bool = False
        self.is_first: bool = not restarts.is_restart()

    def __enter__(self) -> FolderLock:
        holder: Note | None = None
        unmade = ""
        if self._ranks.rank == 0:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                unmade = error.strerror or str(error)
            holder = None if unmade else self._take()
        facts = (holder, self.was_ours, self.is_first, unmade)
        holder, self.was_ours, self.is_first, unmade = self._ranks.gather(facts)[0]
        if unmade:
            raise PhalanxError(
                f"rank {self._ranks.rank}: Trainer.fit: the run folder {os.path.abspath(self._folder)} can't be made: "
                f"{unmade}. Give the run another one (folder=... or PHALANX_RUN_FOLDER)",
                op="fit",
                entry="run-folder",
            )
        if holder is not None and is_other_side(holder):
            raise other_side(self._folder, holder, f"rank {self._ranks.rank}: Trainer.fit: ")
        if holder is not None:
            raise PhalanxError(
                f"rank {self._ranks.rank}: Trainer.fit: another job is training in {self._folder}: {holder.who}. "
                "Wait until it has ended, end it, or give this one another folder (folder=... or PHALANX_RUN_FOLDER)",
                op="fit",
                entry="folder-in-use",
                holder=dataclasses.asdict(holder),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._claim is not None:
            self._claim.release()

    def settle(self) -> None:
        """Record that this job was admitted, so its restarts are admitted, too, whatever the folder then holds."""
        if self._claim is not None and not self.was_ours:
            self._claim.settle(is_settled=True)

    def check(self) -> None:
        """Check that the folder is still this job's.

        Raises:
            OtherSide: A newer attempt, or another job, has taken the folder; on rank 0.
        """
        if self._claim is not None:
            self._claim.check()

    def _take(self) -> Note | None:
        """Claim the folder; return the note of another job if that job holds the folder."""
        claim = Claim(self._folder, patience_s=_PATIENCE_IN_RESTART_S if restarts.is_restart() else _PATIENCE_S)
        try:
            holder = claim.take()
        except OSError as error:
            claim.problem = error.strerror or str(error)
        else:
            if holder is not None:
                return holder
            self._claim = claim
        if claim.problem:
            self.problem = f"{self._folder} can't be locked ({claim.problem}): make sure that no other job trains in it"
        note, ours = claim.before, claimant()
        self.was_ours = restarts.is_restart() and bool(ours.job) and note.job == ours.job and note.is_settled
        # If the note is from another host, rank 0 of an earlier attempt of this job may have run there.
        if ours.job and (ours.name or note.host in ("", os.uname().nodename)):
            self.is_first = not self.was_ours
        if self._claim is not None:
            claim.settle(is_settled=self.was_ours)
            folders.sweep(os.path.join(self._folder, "checkpoints"))  # leftovers of older attempts
        return None
