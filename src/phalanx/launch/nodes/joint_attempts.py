"""A job on several nodes: each supervisor follows its agent, which agrees with the other nodes' agents.

**How many ranks.** Each node has its own `LocalSize`. Only the node whose rank was the cause of a failure shrinks. The
leader chooses the cause. So when a rank of a node fails, the node does not know yet whether this failure is the cause.
The leader, in turn, knows neither the node's progress nor its MIN (of ``--nproc-per-node MIN:MAX``). So the report of a
failure also says what follows if the leader chooses this failure as the cause: the node's next number of ranks, and
whether the failure costs a restart. The node computes both on a copy of its `LocalSize` (see `SharedSize`), and adopts
the copy if the next view gives the node that number of ranks. The failure of a victim changes no number of ranks.

- ``State.num_ranks`` is the number with which a node would continue: the number in its view, unless its supervisor asks
  for more. The supervisor does so once the time of ``--regrow-after`` has passed and a snapshot has just been taken.
  The leader then waits for the next snapshot, as it does for nodes that join, but without a limit. If another node's
  failure ends the attempt, all ranks restart anyway, so a node that has made progress with fewer ranks asks for MAX
  before it reports that its ranks have ended. If the attempt with MAX ranks then fails, that failure costs no restart.
- **A node below MIN** offers 0 ranks, and leaves once it knows that its failure was the cause. It learns this from the
  leader's ``State.cause``, or from the next view, which does not include it. It does not leave earlier, because its
  failure may only look like the cause: a script may catch every error and exit, or a library may abort when a peer is
  lost. The job would then lose this node for the failure of another node's rank.

**Endings that are not failures.**

- **A planned restart** is announced in the shared memory of one host, so ranks of other hosts do not see the
  announcement. When ranks of a Trainer are told to end, they ask each other whether one of them knows of a planned
  restart. Otherwise, some would save and others would not. A rank that ends for a planned restart leaves a note in its
  log folder, which says that its exit code 75 is not a failure. The note is needed because the rank may end before its
  own launcher hears of the restart. The rank raises `PlannedRestart`, which a kept process survives in the same way as
  the failure of a peer. So when a host leaves or joins, the other hosts start no new processes.
- **A preemption** of one node preempts the job on all nodes. It takes precedence over any other cause, and ends the job
  without a restart. The leader waits until all ranks have ended, for at most ``--shutdown-timeout``. The preempted node
  stays until it hears of the job's end: an early exit would count as a loss, and would stop ranks that are still
  saving.
- **Ctrl-C on one node** ends the job on all nodes. The launcher tells its agent at once, and stays until it hears of
  the job's end. Ctrl-C takes precedence over all other causes but preemption. The leader waits until the ranks of the
  interrupted node have ended, since they may be saving.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from phalanx._env import PREEMPTED_CODE, host_name
from phalanx._text import counted, named
from phalanx.failure.ending import Ending
from phalanx.failure.report import brief_report
from phalanx.host.cgroups import count_oom_kills
from phalanx.launch.environment import Attempt
from phalanx.launch.job import Job
from phalanx.launch.nodes.agent_client import AgentClient
from phalanx.launch.nodes.causes import NODE_LOST, ending_of, is_interruption
from phalanx.launch.nodes.messages import Finish, GiveUp, Join, LossSign, Restart, Start, Waiting
from phalanx.launch.nodes.views import Cause
from phalanx.launch.run.attempts import give_up_memory, words_of_used_restarts
from phalanx.launch.run.local_size import SharedSize
from phalanx.launch.run.shutdown import PREEMPTED
from phalanx.launch.run.supervisor import Supervisor

_INTERRUPTED_CODE = 128 + signal.SIGINT


def run_with_other_nodes(ranks: Supervisor, job: Job) -> Ending | None:
    """Run this node's part of `job`; return the cause of the job's failure, on any node; None if the job succeeded.

    Raises:
        SystemExit: The nodes did not meet, or this node left the job, or the job ended because of a lost node, Ctrl-C
            or a preemption. The console names the reason.
    """
    num_nodes, num_attempts, num_restarts = 0, 0, 0
    failure: Cause | None = None
    size = SharedSize(job, ranks.snapshots_fd)
    with AgentClient(ranks, job, size) as agent:
        ranks.note_state("waiting for other nodes")
        while ranks.signals.received is None:
            match order := agent.next():
                case Start(attempt):
                    why = size.begin(attempt.num_local_ranks, failure)
                    was_away = attempt.restart_count > num_attempts
                    for line in _changes(order, num_nodes, why, failure, was_away=was_away):
                        ranks.say(line)
                    if not num_nodes:
                        ranks.say(_place_of_this_node(attempt, job))
                    elif failure is None:
                        ranks.recovery.planned(ranks.ends)
                    num_nodes, num_attempts, failure = attempt.num_nodes, attempt.restart_count + 1, None
                    num_restarts = order.restarts
                    agent.may_restart = num_restarts < job.max_restarts
                    agent.replicate(order.replicas)
                    num_oom_kills = count_oom_kills()
                    culprit = ranks.run_attempt(attempt, until=agent.look, may_keep=agent.may_restart or size.is_trial)
                    if culprit is not None and agent.may_restart and count_oom_kills() > num_oom_kills:
                        give_up_memory(ranks)
                    agent.report(order.number, culprit)
                case Restart(cause, number, sign):
                    failure = cause
                    _note_failure(ranks, cause, sign)
                    if not cause.is_free:
                        ranks.say(f"restart {number} of {job.max_restarts}")
                case Waiting(what, left_s):
                    ranks.note_state(what, left_s)
                    ranks.say(what if left_s is None else f"{what}; {left_s:.0f} s are left")
                case Join(why):
                    ranks.say(f"{why}: this node has stopped its ranks, and joins it")
                    num_nodes = 0
                case GiveUp():
                    _give_up(ranks, job, order)
                case Finish(cause):
                    return _finish(ranks, job, size, cause, num_restarts)
                case None:
                    return None
        if ranks.was_preempted or ranks.signals.received == signal.SIGINT:
            agent.await_end()
        return None


def _give_up(ranks: Supervisor, job: Job, order: GiveUp) -> NoReturn:
    """Say why this node takes no part in the job, and what to check."""
    why = order.why
    ranks.keep_reason(f"was not let in: {why}" if order.is_refused else f"gave up: {why}")
    if order.is_refused:
        ranks.say(f"not let in at {job.rdzv_endpoint}: {why}")
    elif order.after_s is not None:
        ranks.say(f"gave up after {order.after_s:.0f} s at {job.rdzv_endpoint}: {why}")
        ranks.say("check that all nodes name the same --rdzv-endpoint or --master-addr and can reach it")
    else:
        ranks.say(f"gave up the job at {job.rdzv_endpoint}: {why}")
    raise SystemExit(1)


def _note_failure(ranks: Supervisor, failure: Cause, sign: LossSign | None) -> None:
    """Before the ranks restart, report a failure on this or another node, and record when it happened."""
    end = ending_of(failure)
    if failure.kind == NODE_LOST:
        ranks.say(failure.message)
        ranks.recovery.lost_node(failure.ending, sign, ranks.ends)
    else:
        ranks.say(brief_report(end))
        ranks.recovery.lost_rank(end, ranks.ends)


def _finish(ranks: Supervisor, job: Job, size: SharedSize, cause: Cause | None, num_restarts: int) -> Ending | None:
    """Return the failure for which the job ends on this node; None if it succeeded.

    Raises:
        SystemExit: The job ends for another reason: a lost node, Ctrl-C on a node, a preemption. The console names the
            reason.
    """
    if cause is None:
        return None
    if cause.ending.preempted and not ranks.was_preempted:
        ranks.keep_reason("ended with the job, which was preempted")
        ranks.say(PREEMPTED)
        raise SystemExit(PREEMPTED_CODE)
    if is_interruption(cause):
        ranks.keep_reason(f"ended: {cause.message}")
        ranks.say(f"{cause.message}; exit code {_INTERRUPTED_CODE}")
        raise SystemExit(_INTERRUPTED_CODE)
    if cause.kind == NODE_LOST:
        used = words_of_used_restarts(job, num_restarts)
        ranks.keep_reason("; ".join(filter(None, [f"gave up: {cause.message}", used])))
        ranks.say(f"{cause.message}; exit code 1")
        if used:
            ranks.say(used)
        if not job.max_restarts:
            ranks.say("with --max-restarts N, the job would continue without that node, or once it is back")
        raise SystemExit(1)
    if why := size.why_it_leaves(cause):
        ranks.say(f"{host_name()}: {why}: this node leaves the job")
    elif used := words_of_used_restarts(job, num_restarts):
        ranks.say(used)
    return ending_of(cause)


def _place_of_this_node(attempt: Attempt, job: Job) -> str:
    """Return the message about this node's place in its first attempt."""
    first = attempt.first_rank
    own = named("rank", [*range(first, first + attempt.num_local_ranks)])
    begins = "began" if first == attempt.restart_count == 0 else "joined"
    return f"{begins} the job at {job.rdzv_endpoint} as node {attempt.node_rank} (of {attempt.num_nodes}), with {own}"


def _changes(order: Start, num_before: int, why: str, failure: Cause | None, *, was_away: bool) -> list[str]:
    """Return lines about the changes since the previous attempt: which nodes take part, and with how many ranks.

    Args:
        num_before: Number of nodes in the previous attempt; 0: this is the first attempt.
        why: Reason for this node's new number of ranks; empty: the number is the same.
        failure: Cause of the previous attempt's failure; None: the attempt did not fail.
        was_away: Whether the other nodes have made an attempt without this node.
    """
    num_nodes, resized, lines = order.attempt.num_nodes, order.resized, []
    if num_before and was_away:
        lines = [f"nodes of the job: {num_nodes}; the others went on while this one was away, and now it is back"]
    elif num_before not in (0, num_nodes):
        go_on = "the others go on" if num_nodes < num_before else "all go on together"
        lines = [f"nodes of the job: {num_nodes}, before {num_before}: {go_on}"]
    elif num_before and not (failure or resized or why):
        lines = [f"nodes of the job: {num_nodes}, as before: one was replaced, or was away for a moment"]
    if why:
        lines.append(f"{host_name()}: {why}")
    for it in resized:
        reason = ""
        if failure is None:
            reason = ": planned restart, which does not count"
        elif it.now < it.before:
            reason = f": rank {failure.ending.rank} failed before any progress"
        lines.append(f"{it.host}: going on with {counted(it.now, 'rank')}, before {it.before}{reason}")
    return lines
