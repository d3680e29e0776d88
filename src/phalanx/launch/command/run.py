"""Runs a whole job: rejects a job that can't work, makes attempts, and ends with a report and an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx import _env
from phalanx._text import complain, filled
from phalanx.failure.hints import hint_for
from phalanx.failure.report import report, words_of_resuming
from phalanx.host.cgroups import count_oom_kills
from phalanx.host.descriptors import descriptor_problem, open_streams
from phalanx.host.ports import port_advice, port_problem
from phalanx.launch.command.flag_parser import hint_for_flags
from phalanx.launch.command.neighbors import RUN, Claim, Presence, crowding
from phalanx.launch.job import MESSAGE_COLUMNS, Job
from phalanx.launch.run.attempts import run_on_this_node
from phalanx.launch.run.metrics import listening_problem, serving_metrics
from phalanx.launch.run.shutdown import PREEMPTED
from phalanx.launch.run.supervisor import Supervisor
from phalanx.record.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.failure.ending import Ending
    from phalanx.launch.processes.spare import Spare


def run(job: Job, spare: Spare | None = None) -> int:
    """Run `job` and return the exit code for the shell.

    The code is 0 if every rank exits with 0. Otherwise, it is the exit code of the rank that caused the failure, or 128
    plus the signal that ended that rank. If the supervisor itself receives a signal to end while ranks are alive, the
    code is 128 plus that signal; if the process that reads the supervisor's output ends, that counts as SIGPIPE. If the
    ranks have ended because they were preempted, the code is `_env.PREEMPTED_CODE`. When this function returns, no
    process that the job has started is alive, and signals are blocked, because the outcome is decided.

    Args:
        spare: Process that becomes the first forker in a warm start.
    """
    if job.served_port and (problem := port_problem(job.served_port)):
        complain(f"phalanx run: {problem}; {port_advice(job.max_nodes)}")
        return 1
    if job.metrics and (problem := listening_problem("--metrics", job.metrics)):
        complain(f"phalanx run: {problem}")
        return 1
    open_streams()
    if problem := descriptor_problem(job.num_local_ranks):
        complain(f"phalanx run: {problem}")
        return 1
    try:
        folder = RunFolder(job.log_dir, job.command)
    except OSError as error:
        complain(f"phalanx run: can't write to --log-dir {job.log_dir!r}: {error.strerror}")
        return 2
    claim = _claim(job)
    with Supervisor(job, folder, spare) as supervisor, Presence(claim) as presence:
        for line in job.opening(f"logs in {folder.path}", *filter(None, [folder.note])):
            supervisor.say(line)
        for line in filled(crowding(claim, presence.others), MESSAGE_COLUMNS):
            supervisor.say(line)
        with serving_metrics(supervisor, job.metrics):
            return _run_attempts(supervisor, job)


def _claim(job: Job) -> Claim:
    shares = job.divide(job.num_local_ranks).shares
    return Claim.of(RUN, shares, f"{job.run_id} {job.rdzv_endpoint}" if job.max_nodes > 1 else "")


def _run_attempts(supervisor: Supervisor, job: Job) -> int:
    num_oom_kills = count_oom_kills()
    if job.remark:
        supervisor.say(job.remark)
    if job.max_nodes > 1:
        from phalanx.launch.nodes.joint_attempts import run_with_other_nodes

        culprit = run_with_other_nodes(supervisor, job)
    else:
        culprit = run_on_this_node(supervisor, job)
    if supervisor.was_preempted:
        supervisor.keep_reason("asked the ranks to save and exit, and all have ended")
        supervisor.say(PREEMPTED)
        return _env.PREEMPTED_CODE
    if culprit is None and supervisor.have_trained_solo:
        supervisor.say("the ranks made no process group, so each has trained on its own;")
        supervisor.say("use a Trainer, or phalanx.init() and DistributedDataParallel")
    elif culprit is None and supervisor.have_trained_apart:
        supervisor.say("the ranks exchanged no gradients, so each has trained on its own;")
        supervisor.say("use a Trainer, or call what DistributedDataParallel(model) returns")
    if supervisor.signals.received is not None:
        cause = supervisor.signals.cause_before
        culprit = cause if cause is not None and cause.raised and not cause.is_victim else None
    if culprit is not None:
        num_oom_kills = count_oom_kills() - num_oom_kills
        hint = _hint_for_usage(culprit, job) or hint_for(
            culprit, supervisor.ends, num_oom_kills=num_oom_kills, command=job.command
        )
        resume = words_of_resuming(culprit, supervisor.ends) if not job.max_restarts else ""
        supervisor.say_last(report(culprit, supervisor.ends, hint=hint, resume=resume))
    if supervisor.signals.received is not None:
        return 128 + supervisor.signals.received
    return culprit.exit_code if culprit is not None else 0


def _hint_for_usage(culprit: Ending, job: Job) -> str:
    """If a script has ended because it was given one of our flags, return advice; otherwise ""."""
    words = culprit.last_words
    if culprit.signal or words.name not in ("", "SystemExit"):
        return ""
    return hint_for_flags("\n".join([*words.lines, words.summary]), job.command, job.typed)
