"""``phalanx stacks``: the Python stacks of all processes of a job, now."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from phalanx._command_line import Parser, UsageError
from phalanx._errors import printable
from phalanx._text import broken, complain
from phalanx.diagnose.jobs import NoRank, find_ranks, told_where
from phalanx.diagnose.why.activity import Look
from phalanx.diagnose.why.clauses import clause, ranks
from phalanx.diagnose.why.evidence import RankSeen, look_at
from phalanx.diagnose.why.wording import thread_lines

_TIME_S = 5.0  # time limit; long, because native frames need the symbols of large libraries
_ALL = 10_000


def main(args: Sequence[str]) -> int:
    """Run the command; return 1 if no rank runs or no stack can be read, 2 if there is no such job."""
    parser = Parser(
        "phalanx stacks",
        "phalanx stacks [JOB | PID]",
        "Print what each process of a job is doing, and its Python stacks. The processes keep running. Exit code: 1 "
        "if no rank runs yet or no stack can be read, 2 if there is no such job.",
    )
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB | PID", help="script or process (default: the one job)"
    )
    parser.add_argument(
        "--native", action="store_true", help="show native frames too, which halts each process for a moment"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    try:
        given = parser.parse_args(args)
        job = find_ranks(given.job)
        if where := told_where(job, given.job):
            complain(f"phalanx stacks: {where}")
        seen = look_at(job, _TIME_S, native=given.native)
        text = as_json(seen) if given.json else "\n".join(map(printable, lines_of(seen)))
    except UsageError as error:
        return parser.refuse(error, args)
    except (LookupError, OSError) as error:
        complain(f"phalanx stacks: {error}")
        return 1 if isinstance(error, NoRank) else 2
    print(text if given.json else "\n".join(broken(text.splitlines())))
    return 0 if any(one.look.stacks.threads for one in seen) else 1


def as_json(seen: Sequence[RankSeen]) -> str:
    """Return the processes with their threads as JSON."""
    return json.dumps([_process(look, one.doing.rank) for one in seen for look in (one.look, *one.helpers)], indent=2)


def _process(look: Look, rank: int) -> dict[str, object]:
    threads = [dataclasses.asdict(thread) for thread in look.stacks.threads]
    return {"rank": rank, "pid": look.pid, "threads": threads, "problem": look.stacks.problem}


def lines_of(seen: Sequence[RankSeen]) -> Iterator[str]:
    """Yield each rank, then the processes below it, with all frames."""
    for one in seen:
        if one is not seen[0]:
            yield ""
        yield f"{ranks([one.doing.rank])} (pid {one.doing.pid}): {clause(one.doing)}"
        yield from thread_lines(one.look.stacks.threads, one.doing.pid, _ALL)
        if one.look.stacks.problem:
            yield f"  {one.look.stacks.problem}"
        for helper in one.helpers:
            yield f"  process {helper.pid} ({helper.process.name if helper.process else 'ended'})"
            yield from thread_lines(helper.stacks.threads, helper.pid, _ALL)
            if helper.stacks.problem:
                yield f"    {helper.stacks.problem}"
