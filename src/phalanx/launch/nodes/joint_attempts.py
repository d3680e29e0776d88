"""A job on several nodes: each supervisor obeys its agent, which agrees with the agents of the others.

**How many ranks.** Each node has a `LocalSize` of its own. The node of the rank that was the cause shrinks. The leader
chooses the cause, so the node can't know when its rank has failed, and the leader knows neither a node's MIN nor its
progress and patience. So a failure carries what would follow if it is the cause: the number of ranks, and whether it
costs a restart. Nothing has to be asked. The node makes the choice on a copy of its `LocalSize` (`SharedSize`), and
adopts the copy once the next view says the same. A victim of another failure offers nothing.

- ``State.num_ranks`` is the number with which a node would continue, and its view says that number unless it wants
  more. The wish comes from its supervisor, when the wait is over and a snapshot has just been taken; the leader then
  waits for its next snapshot, as for nodes that join, but without a limit. Each attempt that ends for another reason
  takes wishes along: where another node's failure ends the attempt, all ranks start again anyway, so a node that has
  made progress with fewer ranks asks for MAX before it says that its ranks have ended. A failure of that trial costs
  no restart either.
- **A node below MIN** offers 0 ranks, and leaves once it hears that its failure was the cause: from the leader's
  ``State.cause``, or from the next view, which is without it. It does not leave earlier: a script that catches every
  error and exits, or a library that aborts when a peer has gone, looks like a cause of its own, and the node would be
  lost for another node's rank.

**Endings that are not failures.**

- **A planned restart** is announced in the memory of one host. Ranks of a Trainer that are told to end agree on
  whether one of them knows of it; otherwise some would save and others would not. Such a rank leaves a note in the
  folder of its logs, since it may end before its own launcher is told: by that note its exit code 75 is no failure. It
  ends by an exception (`PlannedRestart`) that a kept process outlives like that of a failed peer, so a host that
  leaves or joins costs the others no new process.
- **A preempted job** is preempted on all nodes, whichever was asked. The cause that nodes agree on says it, comes
  before any other and ends the job without a restart. The leader waits until all ranks have ended, as long as
  ``--shutdown-timeout`` says. The node that was asked stays until it hears of the end: its early exit would count as a
  loss, and would stop ranks that still save.
- **Ctrl-C on one node** ends the job on all. Its launcher tells its agent at once and stays until it hears of the end.
  That cause comes after preemption and before any other; the leader waits until that node's ranks have ended, since
  they may save.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, NoReturn

from phalanx._env import PREEMPTED_CODE, host_name
from phalanx._text import counted, named
from phalanx.failure.ending import Ending
from phalanx.host.cgroups import count_oom_kills
from phalanx.launch.environment import Attempt
from phalanx.launch.job import Job
from phalanx.launch.nodes.agent_client import AgentClient
from phalanx.launch.nodes.causes import NODE_LOST, ending_of, is_interruption
from phalanx.launch.nodes.views import Cause
from phalanx.launch.run.attempts import give_up_memory, say_failure, words_of_used_restarts
from phalanx.launch.run.local_size import SharedSize
from phalanx.launch.run.supervisor import Supervisor
from phalanx.wire.messages import read_value

_INTERRUPTED_CODE = 128 + signal.SIGINT


def run_with_other_nodes(ranks: Supervisor, job: Job) -> Ending | None:
    """Take this node's part in `job` and return the cause of its failure, on whichever node; None if all went well.

    Raises:
        SystemExit: The nodes did not meet; what to look at has been said.
    """
    num_nodes, num_attempts, num_restarts, failure = 0, 0, 0, None
    size = SharedSize(job, ranks.snapshots_fd)
    with AgentClient(ranks, job, size) as agent:
        ranks.note_state("waiting for other nodes")
        while ranks.received is None:
            order = agent.next()
            if order is None:
                return None
            if "start" in order:
                attempt = Attempt(**order["start"])
                why = size.begin(attempt.num_local_ranks, failure)
                was_away = attempt.restart_count > num_attempts
                for line in _changes(order, num_nodes, why, failure, was_away=was_away):
                    ranks.say(line)
                if not num_nodes:
                    ranks.say(_place_of_this_node(attempt, job))
                if num_nodes and failure is None:
                    ranks.recovery.planned(ranks.ends)
                num_nodes, num_attempts, failure = attempt.num_nodes, attempt.restart_count + 1, None
                num_restarts = order["restarts"]
                agent.may_restart = num_restarts < job.max_restarts
                agent.replicate(order["replicas"])
                may_keep = agent.may_restart or size.is_trial
                num_oom_kills = count_oom_kills()
                culprit = ranks.run_attempt(attempt, until=agent.look, may_keep=may_keep)
                if culprit is not None and agent.may_restart and count_oom_kills() > num_oom_kills:
                    give_up_memory(ranks)
                agent.report(order["number"], culprit)
            elif "restart" in order:
                failure = read_value(order["restart"], Cause)
                _note_failure(ranks, failure, order["sign"])
                if not failure.is_free:
                    ranks.say(f"restart {order['number']} of {job.max_restarts}")
            elif "joins" in order:
                ranks.say(f"{order['joins']}: this node has stopped its ranks, and joins it")
                num_nodes = 0
            elif "give_up" in order:
                _give_up(ranks, job, order)
            elif "finish" in order:
                return _finish(ranks, job, size, read_value(order["finish"], Cause | None), num_restarts)
            else:
                _say_what_is_awaited(ranks, job, order)
        if ranks.was_preempted or ranks.received == signal.SIGINT:
            agent.await_end()
        return None


def _say_what_is_awaited(ranks: Supervisor, job: Job, order: Mapping[str, Any]) -> None:
    if "unresolved" in order:
        given = "--rdzv-endpoint" if job.rdzv_backend == "c10d" else "--master-addr (or --rdzv-endpoint)"
        ranks.say(f"{order['unresolved']}: waiting for it. Correct {given}, or add it to DNS or /etc/hosts")
        return
    what, left_s = order["waiting"], order.get("left_s")
    ranks.note_state(what, left_s)
    ranks.say(what if left_s is None else f"{what}; {left_s:.0f} s are left")


def _give_up(ranks: Supervisor, job: Job, order: Mapping[str, Any]) -> NoReturn:
    """Say why this node takes no part in the job any more, and what to look at."""
    why, after_s = order["give_up"], order.get("after_s")
    ranks.keep_reason(f"was not let in: {why}" if "is_refused" in order else f"gave up: {why}")
    if "is_refused" in order:
        ranks.say(f"not let in at {job.rdzv_endpoint}: {why}")
    elif after_s is not None:
        ranks.say(f"gave up after {after_s:.0f} s at {job.rdzv_endpoint}: {why}")
        ranks.say("see that all name the same --rdzv-endpoint or --master-addr and reach it")
    else:
        ranks.say(f"gave up the job at {job.rdzv_endpoint}: {why}")
    raise SystemExit(1)


def _note_failure(ranks: Supervisor, failure: Cause, sign: Mapping[str, Any] | None) -> None:
    """Say what failed, on whichever node, before the ranks are started again, and note when it did."""
    end = ending_of(failure)
    if failure.kind == NODE_LOST:
        ranks.say(failure.message)
        ranks.recovery.lost_node(failure.ending, sign, ranks.ends)
    else:
        say_failure(ranks, end)
        ranks.recovery.lost_rank(end, ranks.ends)


def _finish(ranks: Supervisor, job: Job, size: SharedSize, cause: Cause | None, num_restarts: int) -> Ending | None:
    """Return why the job ends here; None if all went well.

    Raises:
        SystemExit: Another node was lost or got Ctrl-C, or the job was preempted; the console says which.
    """
    if cause is None:
        return None
    if cause.ending.preempted and not ranks.was_preempted:
        ranks.keep_reason("ended with the job, which was preempted")
        ranks.say(f"the ranks of the job have saved; exit code {PREEMPTED_CODE}, start again to go on")
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
            ranks.say("with --max-restarts N the job goes on without it, or when it is back")
        raise SystemExit(1)
    if why := size.why_it_leaves(cause):
        ranks.say(f"{host_name()}: {why}: this node leaves the job")
    elif used := words_of_used_restarts(job, num_restarts):
        ranks.say(used)
    return ending_of(cause)


def _place_of_this_node(attempt: Attempt, job: Job) -> str:
    """Return which place this node has in its first attempt of a job."""
    first = attempt.first_rank
    own = named("rank", [*range(first, first + attempt.num_local_ranks)])
    begins = "began" if first == attempt.restart_count == 0 else "joined"
    return f"{begins} the job at {job.rdzv_endpoint} as node {attempt.node_rank} (of {attempt.num_nodes}), with {own}"


def _changes(
    order: Mapping[str, Any], num_before: int, why: str, failure: Cause | None, *, was_away: bool
) -> list[str]:
    """Return lines about what is different in an attempt: which nodes take part, and with how many ranks.

    Args:
        num_before: Number of nodes before; 0: this is the first attempt.
        why: Reason that this node has another number of ranks; empty: it has not.
        failure: Cause of the failure of the attempt before; None: it did not fail.
        was_away: Whether the others have made an attempt without this node.
    """
    num_nodes, resized, lines = order["start"]["num_nodes"], order["resized"], []
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
        elif it["now"] < it["before"]:
            reason = f": rank {failure.ending.rank} failed before any progress"
        lines.append(f"{it['host']}: going on with {counted(it['now'], 'rank')}, before {it['before']}{reason}")
    return lines
