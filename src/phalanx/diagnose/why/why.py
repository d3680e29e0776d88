"""``phalanx why``: says in one sentence why a job does not continue, and shows the evidence.

The command works in three stages: evidence (`evidence`, `past`), a finding (`findings`), a sentence (`wording`). The
exit code is 2 if there is no such job or run, and 0 otherwise: that a job is starting is an answer, too. With
``--brief``, the code is 1 if the answer says no more than a waiting rank already knows.
"""

from __future__ import annotations

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
from phalanx._text import broken, complain, duration, enumerated, is_terminal, listed, plural
from phalanx.diagnose.subject import Run, ended_ago_s, subject_of, told_newest
from phalanx.diagnose.why import workers
from phalanx.diagnose.why.activity import activity_of
from phalanx.diagnose.why.clauses import clause, ranks
from phalanx.diagnose.why.evidence import Evidence, RankSeen, gather, group_alike, with_native
from phalanx.diagnose.why.findings import Finding, conclude
from phalanx.diagnose.why.other_hosts import OtherHosts
from phalanx.diagnose.why.past import evidence_of
from phalanx.diagnose.why.wording import answer, caution, thread_lines, why_no_record, words_of_loss

_MOST_FRAMES = 8
_TIME_S = 1.7  # time for the evidence; with the start and the printing, the command takes at most two seconds
_LONG_AGO_S = 60.0  # if a run ended longer ago, the user may mean another run
_PASSED_OVER = ("phalanx", "torch")  # their frames are left out for a rank that waits in one of their operations


def main(args: Sequence[str]) -> int:
    """Run the command; return 2 if there is no such job."""
    parser = Parser(
        "phalanx why",
        "phalanx why [JOB | PID | RUN]",
        "Say in one sentence why a job does not go on, or why it ended: which rank, at which line, since when. Then "
        "show what proves it: ranks grouped by equal stacks, outliers first. Any job of this user on this host can "
        "be asked about, whoever started it and on any backend. Exit code: 2 if there is no such job or run.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB | PID | RUN",
        help="script of a job that runs or has run, one of its processes, a run's folder, or a "
        "Trainer's (default: the job or the last run of this folder, or the one job of this host)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="print the sentence alone; of a job that runs, exit with 1 if no stack can be read or no rank is missing",
    )
    try:
        given = parser.parse_args(args)
        evidence, finding = examine(given.job)
    except UsageError as error:
        return parser.refuse(error, args)
    except (LookupError, OSError) as error:
        words = error.args[0] if isinstance(error, LookupError) else error
        complain(printable(f"phalanx why: {words}", keep="\n"))
        return 2
    if given.brief:
        print("\n".join(broken([printable(answer(evidence, finding))])))
        return 0 if _tells_more(evidence, finding) else 1
    if given.json:
        print(as_json(evidence, finding))
    else:
        is_by_name = not os.path.isdir(given.job)
        print("\n".join(cropped(broken(map(printable, lines_of(evidence, finding, is_by_name))))))
    return 0


def examine(wanted: str) -> tuple[Evidence, Finding]:
    """Return the evidence about what a user asks for, and the finding.

    Raises:
        LookupError: There is no such job or run.
    """
    deadline_s = time.monotonic() + _TIME_S
    subject = subject_of(wanted)
    if note := told_newest(wanted) or (subject.passed_over if isinstance(subject, Run) else ""):
        complain(printable(f"phalanx why: {note}"))
    if isinstance(subject, Run):
        evidence = evidence_of(subject)
        return evidence, conclude(evidence)
    evidence = gather(subject, OtherHosts(subject).answers)
    finding = conclude(evidence)
    return with_native(evidence, finding.culprits, max(deadline_s - time.monotonic(), 0.0)), finding


def _tells_more(evidence: Evidence, finding: Finding) -> bool:
    """Whether the answer is news to a rank that asks about its own job."""
    seen = any(one.look.stacks.threads for one in evidence.seen if one.doing.rank in finding.culprits)
    return seen or finding.kind in ("elsewhere", "starting") or evidence.job.has_ended


def as_json(evidence: Evidence, finding: Finding) -> str:
    """Return the answer as JSON."""
    document = {
        "sentence": answer(evidence, finding),
        "ended_by": evidence.ended_by,
        "asked": evidence.asked,
        "losses": [loss.as_document() for loss in evidence.losses],
        **dataclasses.asdict(finding),
        "job": {
            name: getattr(evidence.job, name) for name in ("name", "launcher", "launcher_pid", "world_size", "folder")
        },
        "ranks": [
            {
                **dataclasses.asdict(one.doing),
                "threads": [dataclasses.asdict(thread) for thread in one.native or one.look.stacks.threads],
                "problem": one.look.stacks.problem,
            }
            for one in evidence.seen
        ],
    }
    return json.dumps(document, indent=2)


def lines_of(evidence: Evidence, finding: Finding, is_by_name: bool = False) -> Iterator[str]:
    """Yield the answer, then the evidence for it, with the ranks that differ from the others first.

    Args:
        is_by_name: Whether the user gave no folder of a run, so that another job of that name may be meant.
    """
    job = evidence.job
    if job.has_ended:
        ago_s = ended_ago_s(Path(job.folder))
        ago = f", {duration(ago_s)} ago" * (ago_s >= _LONG_AGO_S)
        if evidence.has_record:
            yield f"{job.folder} has ended{ago}{evidence.ended_by and f': {evidence.ended_by}'}. When it did:"
            yield answer(evidence, finding)
        else:
            head = f"{job.folder} has ended{ago}{',' * bool(ago)} without a record: {why_no_record(evidence)}"
            yield f"{head}. Its logs are in {job.folder}."
        if ago and is_by_name:
            yield "A job that phalanx run has not started, such as one of torchrun, leaves no record when it ends."
    else:
        if words := caution(finding):  # shown first, because a caution means that there is probably no trouble
            yield words
        yield answer(evidence, finding)
        if job.is_elsewhere:
            yield f"It runs in {job.cwd}."
    if evidence.asked:
        yield f"While it ran: {evidence.asked}"
    yield from map(words_of_loss, evidence.losses)
    for group in group_alike(evidence.seen, finding.culprits) if evidence.has_record else ():
        yield ""
        yield from _group(group, finding.culprits)


def _group(group: Sequence[RankSeen], culprits: Sequence[int]) -> Iterator[str]:
    """Yield what ranks with equal stacks do, then the stacks and the child processes of the first of these ranks."""
    first = group[0]
    pids = [one.doing.pid for one in group if one.doing.pid and not one.doing.host]
    named = ranks([one.doing.rank for one in group]) + f" ({plural(len(pids), 'pid')} {listed(pids, 6)})" * bool(pids)
    hosts = sorted({one.doing.host for one in group if one.doing.host})
    there = f" ({'also ' * bool(pids)}on {plural(len(hosts), 'host')} {listed(hosts, 6)})" * bool(hosts)
    doing = dataclasses.replace(first.doing, host="")
    if doing.how == "raised" and doing.rank in culprits[:3]:  # the answer contains its message
        doing = dataclasses.replace(doing, detail=doing.detail.partition(":")[0])
    yield f"{named}{there}: {'each ' * (len(group) > 1)}{clause(doing)}"
    yield from thread_lines(
        first.native or first.look.stacks.threads, first.doing.pid, _MOST_FRAMES, without=_passed_over(first)
    )
    is_puzzling = first.needs_native or (first.doing.how == "asleep" and not first.doing.within)
    if is_puzzling and first.doing.rank in culprits and not first.doing.host and not first.native:
        early = f", which would end its {call} early" if (call := first.interruptible_call) else ""
        yield f"  native frames: phalanx stacks --native {first.doing.pid}{early}"
    yield from _helpers(first)
    for problem in dict.fromkeys(filter(None, (first.look.stacks.problem, first.look.box_problem))):
        yield f"  {problem}"


def _passed_over(one: RankSeen) -> Collection[str]:
    """Return the owners whose innermost frames are left out, because the line above the frames says as much."""
    if one.doing.how == "breakpoint":
        return {frame.owner for thread in one.look.stacks.threads for frame in thread.frames if frame.owner}
    return _PASSED_OVER if one.doing.call is not None else ()


def _helpers(one: RankSeen) -> Iterator[str]:
    """Yield a line for each process below a rank, with its stacks, and one line for all idle loader workers."""
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
    """Return the lines that fit the terminal, so that the answer stays on the screen; without a terminal, all lines."""
    rows = max(shutil.get_terminal_size().lines - 2, 2)
    if not is_terminal(sys.stdout) or len(lines) <= rows:
        return lines
    return [*lines[: rows - 1], f"... {len(lines) - rows + 1} more lines: phalanx stacks shows all"]
