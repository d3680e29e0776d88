"""``phalanx trace``: writes one trace of what all ranks of an ended run or of a running job did."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx._command_line import Parser, UsageError
from phalanx._errors import printable
from phalanx._text import broken, complain, counted, in_units
from phalanx.diagnose.jobs import NO_JOB, NO_RANK, Job, NoRank, running_in, told_where
from phalanx.diagnose.subject import Run, newest_run, record_of, subject_of, told_newest
from phalanx.diagnose.trace.perfetto import merged, write_trace
from phalanx.host.processes import off_limits
from phalanx.record.box import SUFFIX, Box, Tail, load_boxes, open_box
from phalanx.record.clocks import Ahead, load_clocks

_LOOK_S = 0.25  # time between two reads of a running job's boxes; a rank takes longer to fill its box
_MOST_S = 3600.0
_BY = {"heartbeats": "the launchers' heartbeats", "collectives": "collectives", "time of day": "time of day"}


def main(args: Sequence[str]) -> int:
    """Run the command; return 1 for a job that records nothing, 2 if there is no such run or job."""
    parser = Parser(
        "phalanx trace",
        "phalanx trace [RUN | JOB | PID]",
        "Write one trace of all ranks on one clock: steps, phases, collectives and who waited for whom. Open it at "
        "ui.perfetto.dev, which uploads nothing. For a finished run, it shows what its black boxes hold, some 8,000 "
        "events of each rank; for a running job, the same and the next seconds. Exit code: 1 if no rank "
        "runs yet or none records anything, 2 if there is no such run or job.",
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="RUN | JOB | PID",
        help="folder of a run or of a Trainer, or several, one from each host; a job's name or any of its process ids "
        "(default: the job or the last run of this folder, or the one job of this host)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="time to keep recording a running job (default: 5); Ctrl-C ends it early",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write; compressed if it ends in .gz (default: trace.json.gz, or "
        "trace-2.json.gz and so on if that exists)",
    )
    try:
        given = parser.parse_args(args)
        boxes, measured = _boxes(given.what, given.seconds)
    except UsageError as error:
        return parser.refuse(error, args)
    except NoRank as error:
        return _refuse(str(error), 1)
    except (LookupError, ValueError, OSError) as error:
        return _refuse(str(error.args[0] if isinstance(error, LookupError) else error))
    path = Path(given.out) if given.out else _free_path()
    try:
        about = write_trace(boxes, path, measured)
    except OSError as error:
        return _refuse(f"can't write {str(path)!r}: {error.strerror}; name another file with --out")
    _show(path, about)
    return 0


def _free_path() -> Path:
    """Return the first default name that is free, so that no earlier trace is overwritten."""
    names = itertools.chain(["trace.json.gz"], (f"trace-{number}.json.gz" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not os.path.lexists(path))


def _say(words: str) -> None:
    complain(printable(f"phalanx trace: {words}", keep="\n"))


def _refuse(words: str, code: int = 2) -> int:
    _say(words)
    return code


def _show(path: Path, about: dict[str, Any]) -> None:
    size = in_units(path.stat().st_size)
    found = f"{counted(about['ranks'], 'rank')}, {counted(about['slices'], 'slice')}, {counted(about['flows'], 'flow')}"
    lines = [f"{printable(str(path))}: {found}, {size}; open it at https://ui.perfetto.dev"]
    for clock in about["clocks"][1:]:
        if clock["within_us"] is None:
            lines.append(
                f"host {clock['host']}: its times are shifted by the time of day; no collective bounds the error"
            )
        else:
            within = f"{clock['within_us']:,.0f} us"
            lines.append(f"host {clock['host']}: its times are right to within {within}, by {_BY[clock['by']]}")
    print("\n".join(broken(lines)))


def _boxes(what: Sequence[str], seconds: float | None) -> tuple[list[Box], dict[str, Ahead]]:
    """Return the boxes that the user means, and the clock offsets that their hosts have measured."""
    if seconds is not None and not 0 < seconds <= _MOST_S:
        raise UsageError(f"--seconds must be more than 0 and at most {_MOST_S:,.0f}, got {seconds:g}")
    folders = [record_of(Path(one)) for one in what if os.path.isdir(one)]
    if not folders:
        if len(what) > 1:
            raise UsageError(f"{what[0]!r} is not a run's folder; several arguments must all be folders")
        return _named("".join(what), seconds)
    for line in filter(None, map(told_newest, what)):
        _say(line)
    if len(folders) < len(what):
        raise UsageError(f"{next(one for one in what if not os.path.isdir(one))!r} is not a run's folder")
    if len(what) == 1 and (running := running_in(str(folders[0]))) is not None:
        return _of_job(running, seconds)
    return _saved(folders, seconds)


def _named(wanted: str, seconds: float | None) -> tuple[list[Box], dict[str, Ahead]]:
    """Return the boxes of a running job that a user names, else of the last run of that script in this folder."""
    subject = subject_of(wanted)
    if isinstance(subject, Run):
        saved = _saved([subject.folder], seconds)
        here = f"no {repr(wanted) if wanted else 'job'} is running; this is the last run here, {subject.folder}"
        _say(subject.passed_over or here)
        return saved
    if where := told_where(subject, wanted):
        _say(where)
    return _of_job(subject, seconds)


def _of_job(job: Job, seconds: float | None) -> tuple[list[Box], dict[str, Ahead]]:
    """Return the boxes of a running job; if no rank records anything yet, the boxes of an earlier attempt."""
    try:
        return _running(job, 5.0 if seconds is None else seconds), {}
    except NoRank as error:
        if seconds is None and job.folder:
            with contextlib.suppress(LookupError):
                attempt = _newest_attempt(Path(job.folder))
                _say(f"{error}; so this is {attempt}")
                return _saved([attempt], seconds)
        raise


def _saved(folders: Sequence[Path], seconds: float | None) -> tuple[list[Box], dict[str, Ahead]]:
    """Return the boxes saved in the folders of runs."""
    if seconds is not None:
        raise UsageError("--seconds is for running jobs; of this folder none runs, and it holds what has been saved")
    boxes: dict[int, Box] = {}
    measured = {}
    for folder in folders:
        attempt = _newest_attempt(folder)
        for box in _readable(attempt):
            if box.rank in boxes:
                raise UsageError(f"rank {box.rank} is in two of the folders; give those of one job's hosts")
            boxes[box.rank] = box
            measured[box.host] = load_clocks(attempt)
    return [boxes[rank] for rank in sorted(boxes)], measured


def _readable(attempt: Path) -> Sequence[Box]:
    """Return the boxes of an attempt; unusable boxes are reported and left out.

    Raises:
        ValueError: There are boxes, and none can be used.
    """
    loaded = load_boxes(attempt)
    problems = [*loaded.problems.values()]
    if problems and not loaded.boxes:
        raise ValueError(problems[0])
    for problem in problems:
        _say(f"{problem}; the trace lacks it")
    return loaded.boxes


def _newest_attempt(folder: Path) -> Path:
    """Return the folder with the boxes of a run's newest attempt.

    Args:
        folder: Folder of one attempt, of a run, or of all runs of one or several scripts. Of several runs, the newest
            with boxes counts; if a newer run has none, a line on stderr says so.

    Raises:
        LookupError: There are no boxes.
    """
    for pattern in ("", "attempt_*", "blackbox/attempt_*", "*/blackbox/attempt_*", "*/*/blackbox/attempt_*"):
        found = [path for path in (folder.glob(pattern) if pattern else [folder]) if any(path.glob(f"*{SUFFIX}"))]
        if found:
            newest = max(found, key=_age)
            if pattern.startswith("*/"):
                _tell_which(newest.parent.parent, folder, {path.parent.parent for path in found})
            return newest
    raise LookupError(f"no black box in {str(folder)!r}: they are saved when an attempt of phalanx run is over")


def _tell_which(taken: Path, folder: Path, others: Collection[Path]) -> None:
    """Say which of several runs is used. A newer run has no record if it still runs or its launcher was killed."""
    newest = newest_run(folder)
    if newest is not None and newest.name > taken.name:
        _say(f"{newest} has no record, so this is {taken}")
    elif len(others) > 1:
        _say(f"{str(folder)!r} holds {counted(len(others), 'run')}; this is the newest, {taken}")


def _age(attempt: Path) -> tuple[float, int]:
    newest = max(path.stat().st_mtime for path in attempt.glob(f"*{SUFFIX}"))
    number = attempt.name.rpartition("_")[2]
    return newest, int(number) if number.isdecimal() else 0


def _running(job: Job, seconds: float) -> list[Box]:
    """Return the recent events of a running job's ranks, and those of the next seconds.

    Raises:
        NoRank: No rank runs, or no rank records anything.
    """
    if not job.ranks:
        raise NoRank(job.waits)
    with contextlib.ExitStack() as stack:
        tails = []
        for rank in job.ranks:
            place = open_box(rank.pid) if rank.process is not None and rank.rank != NO_RANK else None
            if place is not None:
                stack.callback(os.close, place[0])
                tails.append(Tail(*place))
        if not tails:
            if job.launcher == NO_JOB:
                is_none = off_limits(job.launcher_pid) or "is no rank of a job, and records nothing"
                raise NoRank(f"process {job.launcher_pid} ({job.name}) {is_none}")
            who = "ranks of the backend phalanx do, and those of Gloo under phalanx run"
            raise NoRank(f"{job.name} ({job.launcher}) records nothing: {who}")
        return merged(_looks(tails, seconds))


def _looks(tails: Sequence[Tail], seconds: float) -> Iterator[list[Box]]:
    end_s = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            yield [box for tail in tails if (box := tail.read()) is not None]
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, _LOOK_S))
