"""One attempt after another on one node: with how many ranks, on which port, and when there is no further one.

With ``--nproc-per-node MIN:MAX`` the job goes on with fewer ranks when some can't come back, and takes them back. What
counts as progress is a newer snapshot in the supervisor's memory, whole on every rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from phalanx._cgroups import count_oom_kills
from phalanx._memory import MemoryPolicy
from phalanx._snapshots import announce_restart, common_heads, forbid, last_copied, wanted_replicas
from phalanx._text import counted
from phalanx.launch.causes import is_victim
from phalanx.launch.deadlines import AT_ONCE_S
from phalanx.launch.environment import Attempt
from phalanx.launch.failure import brief_report
from phalanx.launch.job import Job
from phalanx.launch.notes import modules_file
from phalanx.launch.outcome import Outcome
from phalanx.launch.ports import ReservedPort, port_advice, port_problem
from phalanx.launch.supervisor import Supervisor


def run_on_this_node(ranks: Supervisor, job: Job) -> Outcome | None:
    """Start the ranks until they succeed or may not be started again; return the last cause, None if all went well.

    Raises:
        SystemExit: The port was taken meanwhile; that has been said.
    """
    course = Course(job, ranks.snapshots_fd)
    while True:
        num_oom_kills = count_oom_kills()
        with contextlib.closing(_reserve_port(ranks, job)) as reserved:
            attempt = Attempt(
                world_size=course.num_ranks,
                num_local_ranks=course.num_ranks,
                role=job.role,
                master_addr=job.master_addr,
                master_port=reserved.port,
                run_id=job.run_id,
                restart_count=course.num_ended,
                max_restarts=job.max_restarts,
            )
            regrow = (lambda: course.is_time_to_regrow(time.monotonic() - ranks.began_s)) if course.may_regrow else None
            culprit = ranks.run_attempt(attempt, until=regrow, may_keep=course.may_restart)
        if ranks.received is not None:
            return None
        if culprit is None:
            if not course.is_regrowing:
                return None
            ranks.say(course.regrow())
            ranks.recovery.planned(ranks.ends)
            continue
        if culprit.made_room:
            return culprit
        ends = [] if ranks.has_progress else ranks.ends
        steps = course.after_failure(culprit, lived_s=culprit.when_s - ranks.began_s, ends=ends)
        if course.is_over:
            for step in steps:
                ranks.say(step)
            return culprit
        say_failure(ranks, culprit)
        ranks.recovery.lost_rank(culprit, ranks.ends)
        if count_oom_kills() > num_oom_kills:
            ranks.dismiss_survivors()
            forbid(ranks.snapshots_fd)
            ranks.memory = MemoryPolicy(why="the kernel has killed a process because memory ran out")
            ranks.say(
                "the kernel has killed a process because memory ran out: no more snapshots are taken in memory, and "
                "freed memory is not kept"
            )
        for step in steps:
            ranks.say(step)


def say_failure(ranks: Supervisor, culprit: Outcome) -> None:
    """Say what failed, before the ranks are started again."""
    ranks.say(brief_report(culprit))


class Course:
    """Chooses the number of ranks of each attempt, and the end.

    An attempt that fails at once and without progress is followed by one with a rank fewer. One that made progress with
    fewer than MAX is followed by one with MAX; if that makes none, the number before is good enough for a while.

    Attributes:
        num_ranks: Number of ranks of the present attempt.
        num_ended: Number of attempts that have ended.
        is_regrowing: Whether the present attempt is being ended only to start MAX ranks.
        is_over: Whether there is no further attempt.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._job = job
        self._fd = snapshots_fd
        self.num_ranks: int = job.num_local_ranks
        self.num_ended: int = 0
        self.is_regrowing: bool = False
        self.is_over: bool = False
        self._num_restarts = 0  # those that count
        self._proven = 0  # ranks that made progress before we went back to MAX; 0: we did not
        self._is_trial = False  # of MAX ranks, by our own choice
        self._wait_s = job.regrow_after_s
        self._steps_before = newest_steps(self._fd)
        self._steps_seen: dict[bytes, int] | None = None  # since the wait was over

    @property
    def may_restart(self) -> bool:
        """Whether a failure of the present attempt may be followed by another attempt."""
        return self._is_trial or self._num_restarts < self._job.max_restarts

    @property
    def may_regrow(self) -> bool:
        return self.num_ranks < self._job.num_local_ranks and self._job.regrow_after_s > 0

    def is_time_to_regrow(self, lived_s: float) -> bool:
        """Whether the wait is over and a snapshot has just been taken, so that next to nothing is lost.

        If so, the ranks can know it when they are told to end, and need not ask for another job.
        """
        if lived_s < self._wait_s:
            return False
        seen, self._steps_seen = self._steps_seen, newest_steps(self._fd)
        self.is_regrowing = seen is not None and is_ahead(self._steps_seen, seen)
        if self.is_regrowing:
            announce_restart(self._fd, self.num_ended)
        return self.is_regrowing

    def regrow(self) -> str:
        """Choose MAX ranks after an attempt that was ended for it; return what is to be said."""
        before = self.num_ranks
        self._begin(self._job.num_local_ranks, proven=before)
        self._is_trial = True
        return (
            f"after {self._wait_s:g} s with {counted(before, 'rank')}: planned restart, which does not count, with "
            f"{self._note}, from the last snapshot"
        )

    def after_failure(self, culprit: Outcome, *, lived_s: float, ends: Sequence[Outcome] = ()) -> list[str]:
        """Choose what follows the failed attempt; return the lines to be said.

        Args:
            ends: Ends of all ranks, if none of them has noted progress.
        """
        job, most = self._job, self._job.num_local_ranks
        has_progress = is_ahead(newest_steps(self._fd), self._steps_before)
        failed = f"{culprit.name} failed {'again ' if self.num_ended else ''}before any progress"
        if has_progress and self.num_ranks == most:
            self._proven, self._wait_s = 0, job.regrow_after_s
        elif self._is_trial:  # we began it, so it costs none of the restarts
            self._wait_s *= 2
            self._begin(self._proven)
            return [f"{failed}: going back to {self._note}; {most} again after {self._wait_s:g} s"]
        if self._num_restarts == job.max_restarts:
            self.is_over = True
            return []
        mistake = "" if has_progress or lived_s >= AT_ONCE_S or job.min_local_ranks < most else _common_mistake(ends)
        if mistake:
            self.is_over = True
            return [f"not started again: every rank raised {mistake}, before any progress, and would again"]
        number, proven, steps = self.num_ranks, self._proven, []
        if has_progress and self.num_ranks < most:
            number, proven = most, self.num_ranks
            steps = [
                f"{counted(proven, 'rank')} made progress: going on with {counted(number, 'rank')} of {self._bounds}"
            ]
        elif not has_progress and lived_s < AT_ONCE_S and job.min_local_ranks < most:
            if self.num_ranks == job.min_local_ranks:
                self.is_over = True
                return [f"{failed}, and {counted(self.num_ranks, 'rank')} of {self._bounds} is the minimum"]
            if proven:
                self._wait_s *= 2
            number, proven = proven or self.num_ranks - 1, 0
            steps = [f"{failed}: going on with {counted(number, 'rank')} of {self._bounds}"]
        changes = number != self.num_ranks
        self._begin(number, proven=proven)
        self._num_restarts += 1
        steps.append(f"restart {self._num_restarts} of {job.max_restarts}{f': {self._note}' if changes else ''}")
        return steps

    def _begin(self, num_ranks: int, *, proven: int = 0) -> None:
        self.num_ranks = num_ranks
        self.num_ended += 1
        self.is_regrowing = self._is_trial = False
        self._proven = proven
        self._steps_before, self._steps_seen = newest_steps(self._fd), None

    @property
    def _note(self) -> str:
        return self._job.divide(self.num_ranks).note

    @property
    def _bounds(self) -> str:
        return f"{self._job.min_local_ranks} to {self._job.num_local_ranks}"


def _common_mistake(ends: Sequence[Outcome]) -> str:
    """Return the exception, with its line, that every rank raised before it trained; nothing if they differ."""
    found = set()
    for end in ends:
        words = end.last_words
        has_trained = os.path.exists(modules_file(end.folder))
        has_ended_of_it = end.exitcode == 1 or end.ended_by_us
        if has_trained or not words.kind or not words.site or is_victim(words) or not has_ended_of_it:
            return ""
        found.add((words.name, words.site))
    if len(found) != 1:
        return ""
    kind, site = found.pop()
    return f"{kind} at {os.path.basename(site)}"


def _reserve_port(ranks: Supervisor, job: Job) -> ReservedPort:
    with contextlib.suppress(OSError):
        return ReservedPort(job.master_port)
    ranks.dismiss_survivors()  # one that was rank 0 may still listen
    try:
        return ReservedPort(job.master_port)
    except OSError:  # somebody has taken it since
        problem = port_problem(job.master_port) or f"port {job.master_port} is taken"
        ranks.say(f"{problem}; {port_advice(job)}")
        raise SystemExit(1) from None


def newest_steps(fd: int) -> dict[bytes, int]:
    """Return the newest step of which there is a whole snapshot, for each folder of checkpoints.

    One of which other hosts have other parts counts when this host's part is on another host, if it is to be there.
    """
    newest: dict[bytes, int] = {}
    copied = last_copied(fd)
    for head in common_heads(fd):
        is_copied = copied is not None and (head.attempt, head.step) <= (copied.attempt, copied.step)
        if head.is_parted and not is_copied and wanted_replicas(fd):
            continue
        newest[head.folder] = max(head.step, newest.get(head.folder, 0))
    return newest


def is_ahead(steps: dict[bytes, int], before: dict[bytes, int]) -> bool:
    return any(step > before.get(folder, -1) for folder, step in steps.items())
