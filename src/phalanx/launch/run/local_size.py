"""The number of ranks with which a node takes part in each attempt.

With ``--nproc-per-node MIN:MAX`` a node continues with fewer ranks when some can't come back, and takes them back.
What counts is progress: a newer snapshot, whole on every rank of the node, in the supervisor's memory.

- **Shrinking.** An attempt that fails within 10 s and without progress is followed by one with a rank fewer. At MIN
  the job ends, because the same start would fail again.
- **Growing.** An attempt with fewer ranks that made progress is followed by MAX. After ``--regrow-after`` seconds, at
  the moment when the next snapshot is whole, the supervisor ends the ranks as at the end of a job and starts MAX: no
  more than the step under way is lost. A job without snapshots, or in which a rank has already finished, is left
  alone.
- **Not the job's fault.** That restart was our idea, so neither it nor the way back counts against ``--max-restarts``;
  each time that MAX makes no progress, the wait doubles.
- **Threads** and CPUs are divided anew. If the number of threads changes, so does the forker, because torch sized its
  pools when it was imported: such a restart takes one more import of torch.

On several nodes, each applies these rules for itself, see `nodes.joint_attempts`. Progress is then a snapshot with a
newer attempt than any image that was here before. A newer step will not do: a snapshot of the previous attempt may
reach its replica only now, and would count for an attempt that made none.
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

    An attempt that fails at once and without progress is followed by one with a rank fewer. One that made progress with
    fewer than MAX is followed by one with MAX; if that makes none, the number before is good enough for a while.

    Attributes:
        num_ranks: Number of ranks of the present attempt; 0: there is none, since MIN ranks have failed, too.
        num_ended: Number of attempts that have ended.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._job = job
        self._fd = snapshots_fd
        self.num_ranks: int = job.num_local_ranks
        self.num_ended: int = 0
        self._proven = 0  # ranks that made progress before we went back to MAX; 0: we did not
        self._is_trial = False  # of MAX ranks, by our own choice
        self._wait_s = job.regrow_after_s
        self._attempt_before = newest_attempt(self._fd)  # also of others: what is copied only now is no progress
        self._steps_seen: dict[bytes, int] | None = None  # since the wait was over

    @property
    def has_progress(self) -> bool:
        """Whether a snapshot of the present attempt is whole."""
        return any(head.attempt > self._attempt_before for head in _heads_that_count(self._fd))

    @property
    def is_trial(self) -> bool:
        """Whether the present attempt has MAX ranks by our own choice, so that its failure costs no restart."""
        return self._is_trial

    @property
    def may_regrow(self) -> bool:
        return self.num_ranks < self._job.num_local_ranks and self._job.regrow_after_s > 0

    @property
    def note(self) -> str:
        """Ranks and threads of the present attempt, in words."""
        return self._job.divide(self.num_ranks).note

    @property
    def bounds(self) -> str:
        return f"{self._job.min_local_ranks} to {self._job.num_local_ranks}"

    def is_time_to_regrow(self, lived_s: float) -> bool:
        """Whether the wait is over and a snapshot has just been taken, so that next to nothing is lost."""
        if lived_s < self._wait_s:
            return False
        seen, self._steps_seen = self._steps_seen, newest_steps(self._fd)
        return seen is not None and is_ahead(self._steps_seen, seen)

    def regrow(self) -> str:
        """Choose MAX ranks after an attempt that was ended for it; return what is to be said."""
        before = self.num_ranks
        self._begin(self._job.num_local_ranks, proven=before, is_trial=True)
        return (
            f"after {self._wait_s:g} s with {counted(before, 'rank')}: planned restart, which does not count, with "
            f"{self.note}, from the last snapshot"
        )

    def after_failure(self, culprit: Ending, *, lived_s: float) -> str:
        """Choose the number after a failure of this node's; return why it changes, nothing if it does not."""
        least, most, before = self._job.min_local_ranks, self._job.num_local_ranks, self.num_ranks
        has_progress = self.has_progress
        failed = f"{culprit.name} failed {'again ' if self.num_ended else ''}before any progress"
        if has_progress and before == most:
            self._proven, self._wait_s = 0, self._job.regrow_after_s
        elif self._is_trial:
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
        """Take in that another attempt has begun for a reason that is not this node's."""
        is_trial, proven = self._is_trial, self._proven
        if self.has_progress and self.num_ranks == self._job.num_local_ranks:
            is_trial, proven, self._wait_s = False, 0, self._job.regrow_after_s
        self._begin(num_ranks, proven=proven, is_trial=is_trial)

    def _begin(self, num_ranks: int, *, proven: int = 0, is_trial: bool = False) -> None:
        self.num_ranks = num_ranks
        self.num_ended += 1
        self._is_trial, self._proven = is_trial, proven
        self._attempt_before, self._steps_seen = newest_attempt(self._fd), None


class SharedSize:
    """The number of ranks of a node among several: what it offers to the others, and what they have agreed on.

    Only the node with the rank that was the cause of a failure changes its number, and the nodes agree on the cause
    after each has told of its own failure. So a node tells with it what it would do about it.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._most = job.num_local_ranks
        self._now = LocalSize(job, snapshots_fd)
        self._blamed: tuple[Ending, LocalSize, str] | None = None  # what follows if this node's failure is the cause
        self._has_begun = False
        self._has_asked = False  # for MAX ranks

    @property
    def is_trial(self) -> bool:
        return self._now.is_trial

    def after_failure(self, culprit: Ending, *, lived_s: float, may_leave: bool) -> dict[str, Any]:
        """Return what is told with a failure: the number of ranks if it is the cause, and whether it costs a restart.

        Args:
            may_leave: Whether this node may leave the job; if not, the job ends anyway.
        """
        if culprit.is_victim or culprit.preempted:
            return {}
        then = copy.copy(self._now)
        why = then.after_failure(culprit, lived_s=lived_s)
        if not then.num_ranks and not may_leave:
            return {}
        self._blamed = culprit, then, why
        return {"num_ranks": then.num_ranks, "is_free": self._now.is_trial and not self._now.has_progress}

    def begin(self, num_ranks: int, cause: Cause | None) -> str:
        """Take in the number of ranks for the next attempt; return why it is another one, nothing if it is not.

        Args:
            cause: Cause of the failure of the attempt before; None: it did not fail.
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
        """Return why this node leaves the job, if it does because of `cause`; nothing if it does not."""
        return self._blamed[2] if self._blamed and not cause.num_ranks and self._is_blamed_for(cause) else ""

    def _is_blamed_for(self, cause: Cause | None) -> bool:
        if self._blamed is None or cause is None:
            return False
        culprit = self._blamed[0]
        return (culprit.rank, culprit.pid) == cause.of_process

    def is_to_be_asked_for(self, lived_s: float) -> int:
        """Return MAX once, when the wait with fewer ranks is over and a snapshot has just been taken; else 0."""
        if self._has_asked or not self._now.may_regrow or not self._now.is_time_to_regrow(lived_s):
            return 0
        self._has_asked = True
        return self._most

    def wanted_after(self, culprit: Ending | None) -> int:
        """Return MAX where an attempt with fewer made progress and another node has ended it; 0: as many as now.

        All ranks start again anyway, so trying MAX costs nothing.

        Args:
            culprit: Rank of this node that failed; None: none has.
        """
        is_mine = culprit is not None and not culprit.is_victim
        return 0 if is_mine or self._now.num_ranks == self._most or not self._now.has_progress else self._most


def newest_steps(fd: int) -> dict[bytes, int]:
    """Return the newest step of which there is a whole snapshot that counts, for each folder of checkpoints."""
    newest: dict[bytes, int] = {}
    for head in _heads_that_count(fd):
        newest[head.folder] = max(head.step, newest.get(head.folder, 0))
    return newest


def _heads_that_count(fd: int) -> list[Head]:
    """Return the heads of whole snapshots.

    One of which other hosts have other parts counts when this host's part is on another host, if it is to be there.
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
