"""Ends the ranks of an attempt; decides when, with which signal, when SIGKILL follows, and which processes are kept.

**Who gets the signal.** The supervisor signals the ranks, not the processes that they have started. torch treats the
death of a loader's worker as a failure of the rank, which then saves nothing. And a logger's process is needed until
its rank has ended. SIGKILL goes to whole process groups. With ``--no-python``, every signal goes to whole process
groups, because a wrapper may not forward signals. `phalanx._torch.shield` explains how workers survive a signal that
somebody sends to every process.

**Preemption.** A rank that was asked to end and can resume exits with 75 (EX_TEMPFAIL). It has saved its state, unless
weights are not finite. The supervisor gives the other ranks their grace period, restarts nothing, and exits with 75
itself.

**A lost Ctrl-C.** If a KeyboardInterrupt is raised in a callback, for instance during an import, Python prints it and
continues. The supervisor recognizes the message on the rank's stderr, hides it, and sends SIGINT again. While the
launcher itself is being imported, SIGINT has its default action.

**The reader of the output is gone.** If the reader ends (``phalanx run train.py | head``, a killed ``tee``), the job
ends as after a signal: SIGTERM to the ranks, their grace period, exit code 141. If the job continued unseen, this would
surprise the user who closed the output, and an immediate kill would lose what a Trainer can save. After Ctrl-C, which
also ends the reader, the job is ending anyway.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from phalanx._env import PREEMPTED_CODE
from phalanx._text import named, signal_name
from phalanx.failure.ending import find_culprit
from phalanx.launch.deadlines import CAUSE_S, KILL_S, LATE_S, SAME_S, STOP_S
from phalanx.launch.job import Job
from phalanx.launch.processes.forkers import Forkers
from phalanx.launch.run.survivors import Survivors
from phalanx.launch.screen.events import EventLoop
from phalanx.launch.screen.ranks import Rank

PREEMPTED = f"all ranks have ended as asked; exit code {PREEMPTED_CODE}, run the same command again to continue"
"""Message about a job whose ranks were asked to end and can resume; the rank's own line says what was saved."""


class Shutdown:
    """Ends ranks once one of them has failed, or on request.

    Args:
        ranks: Ranks of the current attempt; the supervisor changes this list.
        on_end: Function to call before ranks are told to end.

    Attributes:
        by: Signal with which ranks are being ended; None: they are not being ended.
        has_failure: Whether a rank of this attempt has failed.
    """

    def __init__(
        self,
        job: Job,
        ranks: Sequence[Rank],
        events: EventLoop,
        forkers: Forkers,
        survivors: Survivors,
        *,
        say: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._job, self._ranks, self._events = job, ranks, events
        self._forkers, self._survivors, self._say, self._on_end = forkers, survivors, say, on_end
        self.by: int | None = None
        self._first_failure_s: float | None = None
        self._may_keep = False
        self._stopping: list[Rank] = []  # ranks that were told to leave their groups, in order to be kept
        self._late_at_s: float | None = None  # time at which to report the ranks that have not ended

    def begin(self, *, may_keep: bool) -> None:
        """Begin another attempt.

        Args:
            may_keep: Whether another attempt may follow this one, for which processes can be kept.
        """
        self.by = self._first_failure_s = None
        self._may_keep = may_keep

    @property
    def has_failure(self) -> bool:
        return self._first_failure_s is not None

    def note_failure(self, when_s: float) -> None:
        """Record that a rank has failed; deadlines count from the first failure."""
        if self._first_failure_s is None:
            self._first_failure_s = when_s

    def judge(self) -> None:
        """End the other ranks once the cause of a failure is known, or has had enough time to appear."""
        if self._first_failure_s is None or self.by is not None:
            return
        culprit = find_culprit([end for rank in self._ranks if (end := rank.end or rank.pause)])
        assert culprit is not None
        running = [rank for rank in self._ranks if rank.is_running]
        if culprit.is_victim:
            awaited = bool(running)
        else:  # wait if this rank gave no reason, but another rank has printed a reason and is dying
            silent = not culprit.signal and not culprit.last_words.kind
            awaited = silent and any(rank.said_why for rank in running)
        give_up_s = self._first_failure_s + CAUSE_S
        if self._job.max_restarts and culprit.raised and not awaited:  # others may soon raise this error
            awaited, give_up_s = bool(running), self._first_failure_s + SAME_S
        if culprit.preempted or culprit.ended_for_restart:  # the other ranks end on their own, too
            awaited, give_up_s = True, self._first_failure_s + self._job.grace_s
        if awaited and time.monotonic() < give_up_s:
            self._events.deadline = give_up_s
        else:
            self.stop(keeps=True)

    def stop(self, *, keeps: bool = False) -> None:
        """End the ranks, unless they are already being ended.

        Args:
            keeps: Whether to keep processes for the next attempt, if possible.
        """
        if self.by is not None:
            return
        running = [rank for rank in self._ranks if rank.is_running]
        stopping = [rank for rank in running if keeps and self._may_keep and self._survivors.has(rank.pid)]
        self.end(signal.SIGTERM, [rank for rank in running if rank not in stopping])
        for rank in stopping:
            rank.asked_to_end = True
            self._survivors.stop(rank.pid)
        if stopping:
            self._stopping = stopping
            self._events.deadline = time.monotonic() + min(STOP_S, self._job.grace_s)

    def kill(self) -> None:
        """Kill the ranks at once, because they must not take another step."""
        if any(rank.end is None for rank in self._ranks) and self.by != signal.SIGKILL:
            self.end(signal.SIGKILL)

    def end(self, sig: int, ranks: Sequence[Rank] | None = None) -> None:
        """Signal ranks, by default all that are alive; SIGKILL follows after the grace period."""
        self._on_end()
        living = [rank for rank in self._ranks if rank.end is None] if ranks is None else ranks
        for rank in living:
            rank.asked_to_end, rank.pause = True, None
            rank.was_killed |= sig == signal.SIGKILL
        if self.by is None:
            self._late_at_s = time.monotonic() + LATE_S
        self.by = sig
        self._stopping = []
        wait_s = KILL_S if sig == signal.SIGKILL else self._job.grace_s
        self._events.deadline = time.monotonic() + wait_s
        self._forkers.end(sig, [rank.pid for rank in living if rank.pid])

    def catch_up(self, pid: int) -> None:
        """End a rank that was forked after the other ranks were told to end."""
        if self.by is not None:
            self._forkers.end(self.by, [pid])

    def refuse(self, rank: Rank) -> None:
        """End a rank that was supposed to be kept but can't be kept."""
        if rank in self._stopping:
            self._stopping.remove(rank)
            self._forkers.end(signal.SIGTERM, [rank.pid])

    def postpone(self, stopped_s: float) -> None:
        """Postpone all deadlines by the time for which the ranks were suspended."""
        if self._events.deadline is not None:
            self._events.deadline += stopped_s
        if self._late_at_s is not None:
            self._late_at_s += stopped_s
        if self._first_failure_s is not None:
            self._first_failure_s += stopped_s

    def keep_deadline(self) -> None:
        """Once the deadline has passed, take a harder step: SIGTERM to ranks still in their groups, or SIGKILL."""
        if self.by is None or not self._events.is_late:
            return
        running = [rank for rank in self._ranks if rank.is_running]
        if late := [rank.rank for rank in self._stopping if rank.is_running]:
            they = "it is" if len(late) == 1 else "they are"
            why = f"no collective or snapshot within {STOP_S:g} s, so {they} started anew"
            self._say(f"{named('rank', late)} can't be kept: {why} (phalanx explain rank-not-kept)")
            self.end(signal.SIGTERM, running)
        elif self._stopping:  # all ranks to keep have left their groups; the others get their grace period
            self._stopping, self._events.deadline = [], time.monotonic() + self._job.grace_s
        elif self.by == signal.SIGKILL:
            self._forkers.kill()
            self.end(signal.SIGKILL)
        else:
            self.end(signal.SIGKILL, running or None)

    def within(self, timeout_s: float | None) -> float | None:
        """Return the supervisor's timeout, shortened to the time until `say_who_is_late` must be called."""
        if self._late_at_s is None:
            return timeout_s
        left_s = max(0.0, self._late_at_s - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def say_who_is_late(self) -> None:
        """Report, once, which ranks are still running `LATE_S` after they were told to end."""
        if self._late_at_s is None or time.monotonic() < self._late_at_s:
            return
        self._late_at_s = None
        late = [rank for rank in self._ranks if rank.is_running]
        if self.by is None or not late:
            return
        who = named("rank", [rank.rank for rank in late]) + (f" (pid {late[0].pid})" if len(late) == 1 else "")
        left_s = max(0.0, (self._events.deadline or 0.0) - time.monotonic())
        then = f"; SIGKILL follows in {left_s:.0f} s" if self.by != signal.SIGKILL else ""
        has = "has" if len(late) == 1 else "have"
        self._say(f"{who} {has} not ended within {LATE_S:g} s of {signal_name(self.by)}{then}")

    def repeat_lost_interrupts(self) -> None:
        """Send SIGINT again to ranks in which Python printed and dropped the KeyboardInterrupt, as in a callback."""
        if self.by == signal.SIGINT:
            lost = [rank.pid for rank in self._ranks if rank.end is None and rank.stderr.lost_interrupt()]
            if lost:
                self._forkers.end(signal.SIGINT, lost)

    def has_ended(self) -> None:
        """Record that all ranks that were told to end have ended."""
        self.by = self._events.deadline = None
