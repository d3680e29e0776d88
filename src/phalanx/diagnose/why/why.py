"""``phalanx why``: why a job does not go on, in one sentence, and what shows it.

The exit code is 2 where there is no such job, and 1 where it has no rank that can be asked. A job that is starting is
an answer, so `why` and `top` exit with 0 for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from phalanx._command_line import Parser, UsageError
from phalanx._errors import printable
from phalanx._text import broken, complain, duration, enumerated, listed, plural
from phalanx.diagnose.jobs import NO_JOB, Job, NoJob, SeveralJobs, find_job, find_jobs, runs_in
from phalanx.diagnose.why import workers
from phalanx.diagnose.why.activity import activity_of
from phalanx.diagnose.why.answer import Answer, RankSeen, examine, group_alike, halt_ends, left_record, needs_native
from phalanx.diagnose.why.clauses import clause, ranks
from phalanx.diagnose.why.findings import Finding
from phalanx.diagnose.why.other_hosts import OtherHosts
from phalanx.diagnose.why.past import ended_ago_s, examine_newest, examine_run, is_run, last_run_of, own_run, record_of
from phalanx.diagnose.why.wording import caution, sentence, thread_lines, words_of_loss
from phalanx.host.processes import command_of, off_limits

RIGHT_CALL = "phalanx why [JOB | PID | RUN]"
_MOST_FRAMES = 8
_BEGINS_S = 1.0
_LONG_AGO_S = 60.0  # another job of that name may have run since
_PASSED_OVER = ("phalanx", "torch")  # who waits in an operation of these is told so


def main(args: Sequence[str]) -> int:
    """Run the command; return 2 if there is no such job."""
    parser = Parser(
        "phalanx why",
        RIGHT_CALL,
        "Say in one sentence why a job does not go on, or why it ended: which rank, at which line, since when. Then "
        "show what proves it: ranks by equal stacks, whoever is different first. Any job of this user on this host can "
        "be asked about, whoever started it and on any backend. Exit code: 2 if there is no such job or run.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB | PID | RUN",
        help="script of a job that runs or has run, one of its processes, a run's folder, or a "
        "Trainer's (default: the one job, or the last run)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # another host asks: ask it not again
    parser.add_argument(
        "--brief",
        action="store_true",
        help="print the sentence alone; of a job that runs, exit with 1 if no stack can be read or no rank is missing",
    )
    try:
        given = parser.parse_args(args)
        answer = _answer(given.job, given.here)
    except UsageError as error:
        return parser.refuse(error)
    except (LookupError, OSError) as error:
        words = error.args[0] if isinstance(error, LookupError) else error
        complain(printable(f"phalanx why: {words}", keep="\n"))
        return 2
    if given.brief:
        return _brief(answer)
    print(
        as_json(answer)
        if given.json
        else "\n".join(cropped(broken(map(printable, lines_of(answer, not os.path.isdir(given.job))))))
    )
    return 0


def _brief(answer: Answer) -> int:
    """Print the sentence; return 1 if it says no more than a rank knows that asks by itself."""
    seen = [one.look.stacks.threads for one in answer.seen if one.doing.rank in answer.finding.culprits]
    tells_more = any(seen) or answer.finding.kind in ("elsewhere", "starting") or answer.job.has_ended
    print("\n".join(broken([printable(_sentence(answer))])))
    return 0 if tells_more else 1


def _sentence(answer: Answer) -> str:
    if answer.finding.kind == "starting":
        return answer.job.waits
    if answer.job.launcher == NO_JOB:
        (one,) = answer.seen
        is_none = off_limits(one.doing.pid) or "is no rank of a job"
        return f"process {one.doing.pid} ({answer.job.name}) {is_none}; it {clause(one.doing)}"
    said = sentence(answer.finding, [one.doing for one in answer.seen])
    return said if _has_record(answer) else f"{said}: {_why_no_record(answer)}"


def _has_record(answer: Answer) -> bool:
    return not answer.job.has_ended or left_record(answer.seen)


def _why_no_record(answer: Answer) -> str:
    return answer.ended_by or "phalanx run itself was probably killed"


def _answer(wanted: str, is_asked_by_other: bool) -> Answer:
    """Return the answer about a running job, else about a run that has ended.

    Args:
        is_asked_by_other: Whether another host asks, so that only this one is looked at.

    Raises:
        LookupError: There is neither.
    """
    if os.path.isdir(wanted) and not is_run(Path(wanted)):
        # A job that starts has not told of itself in the Trainer's folder yet.
        wanted = runs_in(wanted) or str(record_of(Path(wanted)))
    try:
        job = find_job(wanted)
        is_meant = wanted.isdecimal() or job.script == os.path.realpath(wanted)
        own = None if is_meant else own_run(wanted, [job])
        return _examine(job, is_asked_by_other) if own is None else examine_run(own)
    except SeveralJobs as error:
        own = own_run(wanted, error.jobs)
        if own is None:
            raise
        return examine_run(own)
    except NoJob:
        folder = Path(wanted)
        if wanted and is_run(folder):
            return examine_run(folder)
        last = last_run_of(wanted)
        if last is None or (not wanted and find_jobs()):
            raise
        if (begun := _begins(last, wanted)) is not None:
            return _examine(begun, is_asked_by_other)
        return examine_newest(last)


def _begins(run: Path, wanted: str) -> Job | None:
    """Return the job of a run whose launcher has made its folder and is about to tell of itself; None: it has ended."""
    pid = run.name.rpartition("-")[2]
    deadline_s = time.monotonic() + _BEGINS_S
    while pid.isdecimal() and "run" in command_of(int(pid)) and time.monotonic() < deadline_s:
        with contextlib.suppress(NoJob):
            return find_job(wanted)
        time.sleep(0.02)
    return None


def _examine(job: Job, is_asked_by_other: bool) -> Answer:
    if not job.ranks:
        return Answer(job, Finding("starting"), ())
    return examine(job) if is_asked_by_other else examine(job, others=OtherHosts(job).answers)


def as_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    document = {
        "sentence": _sentence(answer),
        "ended_by": answer.ended_by,
        "asked": answer.asked,
        "losses": [dataclasses.asdict(loss) for loss in answer.losses],
        **dataclasses.asdict(answer.finding),
        "job": {
            name: getattr(answer.job, name) for name in ("name", "launcher", "launcher_pid", "world_size", "folder")
        },
        "ranks": [
            {
                **dataclasses.asdict(one.doing),
                "threads": [dataclasses.asdict(thread) for thread in one.native or one.look.stacks.threads],
                "problem": one.look.stacks.problem,
            }
            for one in answer.seen
        ],
    }
    return json.dumps(document, indent=2)


def lines_of(answer: Answer, is_by_name: bool = False) -> Iterator[str]:
    """Yield the answer, then what shows it: whoever is different first.

    Args:
        is_by_name: Whether no folder of a run was asked about, so that another job of that name may be meant.
    """
    has_record = _has_record(answer)
    if answer.job.has_ended:
        ago_s = ended_ago_s(Path(answer.job.folder))
        ago = f", {duration(ago_s)} ago" * (ago_s >= _LONG_AGO_S)
        if has_record:
            yield f"{answer.job.folder} has ended{ago}{answer.ended_by and f': {answer.ended_by}'}. When it did:"
            yield _sentence(answer)
        else:
            head = f"{answer.job.folder} has ended{ago}{',' * bool(ago)} without a record: {_why_no_record(answer)}"
            yield f"{head}. Its logs are in {answer.job.folder}."
        if ago and is_by_name:
            yield "A job that phalanx run has not started, such as one of torchrun, leaves no record when it ends."
    else:
        if words := caution(answer.finding):  # first, for what follows is then probably no trouble
            yield words
        yield _sentence(answer)
    if not answer.job.has_ended and answer.job.is_elsewhere:
        yield f"It runs in {answer.job.cwd}."
    if answer.asked:
        yield f"While it ran: {answer.asked}"
    yield from map(words_of_loss, answer.losses)
    for group in group_alike(answer.seen, answer.finding.culprits) if has_record else ():
        yield ""
        yield from _group(group, answer.finding.culprits)


def _group(group: Sequence[RankSeen], culprits: Sequence[int]) -> Iterator[str]:
    """Yield what ranks with equal stacks do, with the stacks and the processes of the first of them."""
    first = group[0]
    pids = [one.doing.pid for one in group if one.doing.pid and not one.doing.host]
    named = ranks([one.doing.rank for one in group]) + f" ({plural(len(pids), 'pid')} {listed(pids, 6)})" * bool(pids)
    hosts = sorted({one.doing.host for one in group if one.doing.host})
    there = f" ({'also ' * bool(pids)}on {plural(len(hosts), 'host')} {listed(hosts, 6)})" * bool(hosts)
    doing = dataclasses.replace(first.doing, host="")
    if doing.how == "raised" and doing.rank in culprits[:3]:  # its message stands in the sentence
        doing = dataclasses.replace(doing, detail=doing.detail.partition(":")[0])
    yield f"{named}{there}: {'each ' * (len(group) > 1)}{clause(doing)}"
    yield from thread_lines(
        first.native or first.look.stacks.threads, first.doing.pid, _MOST_FRAMES, without=_passed_over(first)
    )
    is_puzzling = needs_native(first) or (first.doing.how == "asleep" and not first.doing.within)
    if is_puzzling and first.doing.rank in culprits and not first.doing.host and not first.native:
        early = f", which would end its {call} early" if (call := halt_ends(first)) else ""
        yield f"  native frames: phalanx stacks --native {first.doing.pid}{early}"
    yield from _helpers(first)
    for problem in dict.fromkeys(filter(None, (first.look.stacks.problem, first.look.box_problem))):
        yield f"  {problem}"


def _passed_over(one: RankSeen) -> Collection[str]:
    """Return the owners of the innermost frames that say no more than the line above them."""
    if one.doing.how == "breakpoint":
        return {frame.owner for thread in one.look.stacks.threads for frame in thread.frames if frame.owner}
    return _PASSED_OVER if one.doing.call is not None else ()


def _helpers(one: RankSeen) -> Iterator[str]:
    """Yield what the processes below a rank do; those that have nothing to do together."""
    idle = []
    for helper in one.helpers:
        doing = activity_of(one.doing.rank, helper)
        if doing.how == "idle":
            idle.append(helper.pid)
        elif any(thread.own_frames for thread in helper.stacks.threads) or not helper.stacks.threads:
            name = f" ({helper.process.name})" if helper.process else ""
            yield f"  process {helper.pid}{name}: {clause(doing)}"
            yield from thread_lines(workers.own_part(helper.stacks).threads, helper.pid, _MOST_FRAMES)
    if idle:
        yield f"  {enumerated('process', idle, 6)}: idle, with no batch of the data loader to prepare"


def cropped(lines: Sequence[str]) -> Sequence[str]:
    """Return as many lines as the terminal has, so that the answer stays on the screen; all of them elsewhere."""
    rows = max(shutil.get_terminal_size().lines - 2, 2)
    if sys.stdout is None or not sys.stdout.isatty() or len(lines) <= rows:
        return lines
    return [*lines[: rows - 1], f"... {len(lines) - rows + 1} more lines: phalanx stacks shows all"]
