"""The number of ranks on a node in each attempt.

With ``--nproc-per-node MIN:MAX`` a node continues with fewer ranks when some can't be restarted, and adds the missing
ranks again later. Both depend on progress. An attempt has made progress if the supervisor's memory holds a snapshot of
this attempt that is complete on every rank of the node.

- **Shrinking.** After an attempt that fails within 10 s and without progress, the next attempt has one rank fewer. If
  the failed attempt had MIN ranks, the job ends, because the same start would fail again.
- **Growing.** After the failure of an attempt that made progress with fewer ranks, the next attempt has MAX ranks. If
  no rank fails for ``--regrow-after`` seconds, the supervisor waits for the next complete snapshot, ends the ranks with
  SIGTERM and starts MAX ranks; at most the step under way is lost. A job without snapshots keeps its size, and so does
  a job in which a rank has already finished.
- **No cost.** The launcher itself decided to try MAX ranks. So neither the restart with MAX ranks nor a restart that
  goes back to fewer ranks counts against ``--max-restarts``. Each time that MAX ranks make no progress, the wait
  doubles.
- **Threads** and CPUs are divided among the new number of ranks. If the number of threads changes, the forker is
  replaced, because torch sizes its pools at import: such a restart takes one more import of torch.

On several nodes, each node applies these rules on its own, see `nodes.joint_attempts`. A snapshot counts as progress
only if it is from a newer attempt than all earlier snapshots. A newer step is not enough: the copy of a snapshot to
another node may be finished only in the next attempt, and would then count as progress of that attempt.
"""

from __future__ import annotations

import copy
from typing import Any

from phalanx._text import counted
from phalanx.checkpoint.memory.layout import Head, common_heads, last_copied, newest_attempt, wanted_replicas
from phalanx.failure.ending import Ending
from phalanx.launch.deadlines import AT_ONCE_S
from phalanx.launch.job import Job
from phalanx.launch.nodes.views import Cause


class LocalSize:
    """Chooses the number of ranks on this node for each attempt.

    Attributes:
        num_ranks: Number of ranks of the current attempt; 0: no attempt follows, because even MIN ranks failed.
        num_ended: Number of attempts that have ended.
        is_trial: Whether the launcher tries MAX ranks in the current attempt, so that its failure costs no restart.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._job = job
        self._fd = snapshots_fd
        self.num_ranks: int = job.num_local_ranks
        self.num_ended: int = 0
        self._proven = 0  # if MAX ranks are being tried: the number that made progress before; otherwise 0
        self.is_trial: bool = False
        self._wait_s = job.regrow_after_s
        self._attempt_before = newest_attempt(self._fd)  # newest attempt with snapshots here when this attempt began
        self._steps_seen: dict[bytes, int] | None = None  # newest steps at the last check, once the wait is over

    @property
    def has_progress(self) -> bool:
        """Whether a snapshot of the current attempt is complete."""
        return any(head.attempt > self._attempt_before for head in _heads_that_count(self._fd))

    @property
    def is_free(self) -> bool:
        """Whether a failure of the current attempt, at this moment, would cost no restart."""
        return self.is_trial and not self.has_progress

    @property
    def may_regrow(self) -> bool:
        return self.num_ranks < self._job.num_local_ranks and self._job.regrow_after_s > 0

    @property
    def note(self) -> str:
        """Description of the ranks and threads of the current attempt."""
        return self._job.divide(self.num_ranks).note

    @property
    def bounds(self) -> str:
        return f"{self._job.min_local_ranks} to {self._job.num_local_ranks}"

    def is_time_to_regrow(self, lived_s: float) -> bool:
        """Return whether the wait is over and a snapshot has just been taken, so that little is lost."""
        if lived_s < self._wait_s:
            return False
        seen, self._steps_seen = self._steps_seen, newest_steps(self._fd)
        return seen is not None and is_ahead(self._steps_seen, seen)

    def regrow(self) -> str:
        """Choose MAX ranks after an attempt that was ended in order to grow; return the message."""
        before = self.num_ranks
        self._begin(self._job.num_local_ranks, proven=before, is_trial=True)
        return (
            f"after {self._wait_s:g} s with {counted(before, 'rank')}: planned restart, which does not count, with "
            f"{self.note}, from the last snapshot"
        )

    def after_failure(self, culprit: Ending, *, lived_s: float) -> str:
        """Choose the number of ranks after a failure on this node; return why the number changes, empty if it stays."""
        least, most, before = self._job.min_local_ranks, self._job.num_local_ranks, self.num_ranks
        has_progress = self.has_progress
        failed = f"{culprit.name} failed {'again ' if self.num_ended else ''}before any progress"
        if has_progress and before == most:
            self._proven, self._wait_s = 0, self._job.regrow_after_s
        elif self.is_trial:
            self._wait_s *= 2
            self._begin(self._proven)
            return f"{failed}: going back to {self.note}; {most} again after {self._wait_s:g} s"
        if has_progress and before < most:
            self._begin(most, proven=before)
            going_on = f"going on with {counted(most, 'rank')} of {self.bounds}"
            return f"{counted(before, 'rank')} made progress: {going_on}"
        if has_progress or lived_s >= AT_ONCE_S or least == most:
            self._begin(before, proven=self._proven)
            return ""
        if before == least:
            self._begin(0)
            return f"{failed}, and {counted(before, 'rank')} of {self.bounds} is the minimum"
        if self._proven:
            self._wait_s *= 2
        self._begin(self._proven or before - 1)
        return f"{failed}: going on with {counted(self.num_ranks, 'rank')} of {self.bounds}"

    def go_on(self, num_ranks: int) -> None:
        """Begin the next attempt with `num_ranks`, after an attempt that ended for a reason outside this node.

        If MAX is being tried, the trial continues, unless MAX ranks have already made progress: it has then succeeded.
        """
        is_trial, proven = self.is_trial, self._proven
        if self.has_progress and self.num_ranks == self._job.num_local_ranks:
            is_trial, proven, self._wait_s = False, 0, self._job.regrow_after_s
        self._begin(num_ranks, proven=proven, is_trial=is_trial)

    def _begin(self, num_ranks: int, *, proven: int = 0, is_trial: bool = False) -> None:
        self.num_ranks = num_ranks
        self.num_ended += 1
        self.is_trial, self._proven = is_trial, proven
        self._attempt_before, self._steps_seen = newest_attempt(self._fd), None


class SharedSize:
    """This node's number of ranks in a job of several nodes: the number that the node offers, and the agreed number.

    Only the node whose rank was the cause of a failure changes its number. Nodes agree on the cause only after each
    node has reported its own failure, so the report says what the node will do if its failure is the cause.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._most = job.num_local_ranks
        self._now = LocalSize(job, snapshots_fd)
        self._blamed: tuple[Ending, LocalSize, str] | None = None  # what follows if this node is the cause
        self._has_begun = False
        self._has_asked = False  # whether this node has asked for MAX ranks

    @property
    def is_trial(self) -> bool:
        return self._now.is_trial

    def after_failure(self, culprit: Ending, *, lived_s: float, may_leave: bool) -> dict[str, Any]:
        """Return `Cause.num_ranks` and `Cause.is_free` for the report of a failure; {} if the failure changes neither.

        Args:
            may_leave: Whether the job could continue without this node if the node is left with too few ranks.
        """
        if culprit.is_victim or culprit.preempted:
            return {}
        then = copy.copy(self._now)
        why = then.after_failure(culprit, lived_s=lived_s)
        if not then.num_ranks and not may_leave:
            return {}
        self._blamed = culprit, then, why
        return {"num_ranks": then.num_ranks, "is_free": self._now.is_free}

    def begin(self, num_ranks: int, cause: Cause | None) -> str:
        """Begin an attempt with the agreed number of ranks; return why the number changes, empty if it stays.

        Args:
            cause: Cause of the previous attempt's failure; None: that attempt did not fail.
        """
        blamed, self._blamed = self._blamed if self._is_blamed_for(cause) else None, None
        has_begun, self._has_begun, self._has_asked = self._has_begun, True, False
        before = self._now.num_ranks
        if not has_begun:
            return ""
        if blamed is not None and blamed[1].num_ranks == num_ranks:
            self._now = blamed[1]
            return blamed[2]
        if num_ranks == before:
            self._now.go_on(num_ranks)
            return ""
        if num_ranks > before and cause is None:
            return self._now.regrow()
        if num_ranks > before:
            self._now.regrow()
        else:
            self._now.go_on(num_ranks)
        return f"going on with {self._now.note}, before {counted(before, 'rank')}"

    def why_it_leaves(self, cause: Cause) -> str:
        """Return why this node leaves the job because of `cause`; empty if it stays."""
        return self._blamed[2] if self._blamed and not cause.num_ranks and self._is_blamed_for(cause) else ""

    def _is_blamed_for(self, cause: Cause | None) -> bool:
        if self._blamed is None or cause is None:
            return False
        culprit = self._blamed[0]
        return (culprit.rank, culprit.pid) == cause.of_process

    def is_to_be_asked_for(self, lived_s: float) -> int:
        """Return MAX if the wait is over and a snapshot was just taken, but only once in an attempt; otherwise 0."""
        if self._has_asked or not self._now.may_regrow or not self._now.is_time_to_regrow(lived_s):
            return 0
        self._has_asked = True
        return self._most

    def wanted_after(self, culprit: Ending | None) -> int:
        """Return MAX if this node made progress with fewer ranks and another node ended the attempt; else 0.

        In that case, all ranks restart anyway, so trying MAX costs nothing.

        Args:
            culprit: Ending of the rank of this node that failed; None: no rank of this node failed.
        """
        is_mine = culprit is not None and not culprit.is_victim
        return 0 if is_mine or self._now.num_ranks == self._most or not self._now.has_progress else self._most


def newest_steps(fd: int) -> dict[bytes, int]:
    """Return the newest step with a complete snapshot that counts, for each checkpoint folder."""
    newest: dict[bytes, int] = {}
    for head in _heads_that_count(fd):
        newest[head.folder] = max(head.step, newest.get(head.folder, 0))
    return newest


def _heads_that_count(fd: int) -> list[Head]:
    """Return the heads of complete snapshots that count.

    If hosts hold different parts of a snapshot and replicas are wanted, the snapshot counts only once this host's part
    has its replicas.
    """
    copied, wants_copies = last_copied(fd), wanted_replicas(fd)
    newest_copied = (copied.attempt, copied.step) if copied is not None else (-1, -1)
    return [
        head
        for head in common_heads(fd)
        if not (head.is_parted and wants_copies) or (head.attempt, head.step) <= newest_copied
    ]


def is_ahead(steps: dict[bytes, int], before: dict[bytes, int]) -> bool:
    return any(step > before.get(folder, -1) for folder, step in steps.items())
