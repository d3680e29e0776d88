"""Attempts on one node, one after another: the port of each attempt, what ends it, and whether another follows.

**Ports.** The supervisor binds rank 0's port without listening, and holds it as long as the attempt lasts. Rank 0 can
listen on this port (both sides set SO_REUSEADDR), and the kernel gives it to no other process. Each attempt has a new
store, on a new port unless the user named one, so no rank can read an address from an earlier attempt.

**A mistake in the script is not retried.** A failure counts as a mistake if every rank raised the same exception at the
same line within 10 s, with no snapshot and no sign of training. Once one rank has raised an exception, the other ranks
get half a second to raise the same exception. Signs of training are a Trainer's step, a checkpoint, or more than 32
collectives in one group; comparing models and broadcasting their weights at the start takes fewer. Ranks note these
signs in the launcher's memory when they save and when they leave a group.

TORCHELASTIC_RESTART_COUNT counts every restart, because ranks use it to tell the snapshots of one attempt from those of
another.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from phalanx.checkpoint.memory.layout import announce_restart, forbid
from phalanx.failure.ending import Ending
from phalanx.failure.report import brief_report
from phalanx.failure.victims import is_victim
from phalanx.host.block_pool import MemoryPolicy
from phalanx.host.cgroups import count_oom_kills
from phalanx.host.ports import ReservedPort, port_advice, port_problem
from phalanx.launch.deadlines import AT_ONCE_S
from phalanx.launch.environment import Attempt
from phalanx.launch.job import Job
from phalanx.launch.processes.modules import modules_file
from phalanx.launch.run.local_size import LocalSize
from phalanx.launch.run.supervisor import Supervisor


def run_on_this_node(ranks: Supervisor, job: Job) -> Ending | None:
    """Start the ranks until they succeed or no restart is left; return the cause of the failure, None on success.

    Raises:
        SystemExit: Another process has taken the port; the console says so.
    """
    policy = RestartPolicy(job, ranks.snapshots_fd)
    size = policy.size
    while True:
        num_oom_kills = count_oom_kills()
        with contextlib.closing(_reserve_port(ranks, job)) as reserved:
            attempt = Attempt(
                world_size=size.num_ranks,
                num_local_ranks=size.num_ranks,
                role=job.role,
                master_addr=job.master_addr,
                master_port=reserved.port,
                run_id=job.run_id,
                restart_count=size.num_ended,
                max_restarts=job.max_restarts,
            )
            regrow = (lambda: policy.is_time_to_regrow(time.monotonic() - ranks.began_s)) if size.may_regrow else None
            culprit = ranks.run_attempt(attempt, until=regrow, may_keep=policy.may_restart)
        if ranks.signals.received is not None:
            return None
        if culprit is None:
            if not policy.is_regrowing:
                return None
            ranks.say(policy.regrow())
            ranks.recovery.planned(ranks.ends)
            continue
        if culprit.preempted:
            return culprit
        ends = [] if ranks.has_progress else ranks.ends
        steps = policy.after_failure(culprit, lived_s=culprit.when_s - ranks.began_s, ends=ends)
        if policy.is_over:
            for step in steps:
                ranks.say(step)
            return culprit
        ranks.say(brief_report(culprit))
        ranks.recovery.lost_rank(culprit, ranks.ends)
        if count_oom_kills() > num_oom_kills:
            give_up_memory(ranks)
        for step in steps:
            ranks.say(step)


def words_of_used_restarts(job: Job, num_restarts: int) -> str:
    """Return the message that all restarts have been used; "" if some are left or the job had none."""
    if not job.max_restarts or num_restarts < job.max_restarts:
        return ""
    return f"no restart is left of the {job.max_restarts} that --max-restarts allows; raise it"


def give_up_memory(ranks: Supervisor) -> None:
    """Make later attempts take no snapshots and keep no freed memory, because memory has run out."""
    ranks.dismiss_survivors()
    forbid(ranks.snapshots_fd)
    ranks.memory = MemoryPolicy(why="the kernel has killed a process because memory ran out")
    ranks.say(
        "the kernel has killed a process because memory ran out: no more snapshots are taken in memory, and "
        "freed memory is not kept"
    )


class RestartPolicy:
    """Decides what follows each failure of a job on one node.

    Attributes:
        size: Number of ranks of the current attempt.
        is_regrowing: Whether the current attempt is being ended only in order to start MAX ranks.
        is_over: Whether no further attempt follows.
    """

    def __init__(self, job: Job, snapshots_fd: int) -> None:
        self._job = job
        self._fd = snapshots_fd
        self.size = LocalSize(job, snapshots_fd)
        self.is_regrowing: bool = False
        self.is_over: bool = False
        self._num_restarts = 0  # restarts that count against --max-restarts

    @property
    def may_restart(self) -> bool:
        """Whether another attempt may follow a failure of the current attempt."""
        return self.size.is_trial or self._num_restarts < self._job.max_restarts

    def is_time_to_regrow(self, lived_s: float) -> bool:
        """Return whether to restart with MAX ranks now.

        If the result is True, the restart has been announced to the ranks, which then do not ask the scheduler for a
        new job.
        """
        self.is_regrowing = self.size.is_time_to_regrow(lived_s)
        if self.is_regrowing:
            announce_restart(self._fd, self.size.num_ended)
        return self.is_regrowing

    def regrow(self) -> str:
        """Choose MAX ranks after an attempt that was ended in order to grow; return the message."""
        self.is_regrowing = False
        return self.size.regrow()

    def after_failure(self, culprit: Ending, *, lived_s: float, ends: Sequence[Ending] = ()) -> list[str]:
        """Decide what follows a failed attempt; return the lines to print.

        Args:
            ends: Endings of all ranks, if no rank has recorded progress; otherwise empty.
        """
        job, size = self._job, self.size
        before, has_progress, is_free = size.num_ranks, size.has_progress, size.is_free
        self.is_regrowing = False
        why = size.after_failure(culprit, lived_s=lived_s)
        if is_free:  # the launcher itself chose to try MAX ranks, so this failure costs no restart
            return [why]
        if self._num_restarts == job.max_restarts:
            self.is_over = True
            return [*filter(None, [words_of_used_restarts(job, self._num_restarts)])]
        is_fixed = job.min_local_ranks == job.num_local_ranks
        mistake = _common_mistake(ends) if is_fixed and not has_progress and lived_s < AT_ONCE_S else ""
        if mistake:
            self.is_over = True
            return [f"not started again: every rank raised {mistake}, before any progress, and would again"]
        if not size.num_ranks:
            self.is_over = True
            return [why]
        self._num_restarts += 1
        note = f": {size.note}" if size.num_ranks != before else ""
        return [*filter(None, [why]), f"restart {self._num_restarts} of {job.max_restarts}{note}"]


def _common_mistake(ends: Sequence[Ending]) -> str:
    """Return the exception, with its line, that every rank raised before it trained; empty if there is none."""
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
    ranks.dismiss_survivors()  # a kept rank 0 may still listen on the port
    try:
        return ReservedPort(job.master_port)
    except OSError:  # another process has taken the port meanwhile
        problem = port_problem(job.master_port) or f"port {job.master_port} is taken"
        ranks.say(f"{problem}; {port_advice(job.max_nodes)}")
        raise SystemExit(1) from None
