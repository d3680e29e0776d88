"""Finds the running job, or the ended run, that a user has named on the command line."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from phalanx._errors import printable
from phalanx._text import counted
from phalanx.diagnose.jobs import Job, match_jobs, running_in
from phalanx.failure.ends import load_reason
from phalanx.host.processes import command_of
from phalanx.record.run_folder import logs_beside, logs_of, name_of
from phalanx.wire.files import open_regular
from phalanx.wire.messages import parse_json
from phalanx.wire.waiting import wait_until

_METRICS = "metrics.jsonl"  # in a Trainer's folder
_BEGINS_S, _LOOK_EVERY_S = 1.0, 0.02
_TAIL_BYTES = 256 << 10


class Run(NamedTuple):
    """A run of ``phalanx run`` that has ended.

    Attributes:
        is_newest: Whether the run was chosen because it is the newest, rather than named by the user.
        passed_over: Line that names the jobs that run in other folders; empty if no such job fits.
    """

    folder: Path
    is_newest: bool
    passed_over: str = ""


def subject_of(wanted: str) -> Job | Run:
    """Return the running job that a user means, or else the ended run.

    If the jobs that fit run in other folders, and a run that fits has ended in this folder, the ended run is meant.

    Args:
        wanted: Script, module, pid or folder as the user has typed it; empty for any.

    Raises:
        LookupError: Nothing fits, or several jobs do.
    """
    if os.path.isdir(wanted) and not is_run(Path(wanted)):
        # A job that has just started is not yet named in the Trainer's folder.
        if not _trainers_in(Path(wanted)) and (running := running_in(wanted)) is not None:
            return running
        wanted = str(record_of(Path(wanted)))
    found = match_jobs(wanted)
    job = None if found.problem else found.jobs[0]
    if job is not None and (wanted.isdecimal() or job.script == os.path.realpath(wanted)):
        return job
    if (own := _own_run(wanted, found.jobs)) is not None:
        return Run(own, is_newest=True, passed_over=_passed_over(own, wanted, found.jobs))
    if job is None and not found.jobs:
        if wanted and is_run(Path(wanted)):
            return Run(Path(wanted), is_newest=False)
        if (last := last_run_of(wanted)) is not None:
            return _beginning(last, wanted) or Run(last, is_newest=True)
    if job is None:
        raise LookupError(found.problem if found.jobs else _say_missing(wanted, found.problem))
    return job


def _say_missing(wanted: str, no_job: str) -> str:
    """Return the message that nothing fits; it has `no_job`, which lists other jobs, unless `wanted` is a folder."""
    if os.sep in wanted and not wanted.endswith(".py"):
        return f"there is no run in {wanted!r}" + ", and no such folder" * (not os.path.isdir(wanted))
    if wanted.isdecimal():
        return no_job
    return f"{no_job}\nThere is no run in {logs_of(name_of([wanted]) if wanted else '')!r} either."


def _beginning(run: Path, wanted: str) -> Job | None:
    """Return the job of a run whose launcher has made its folder but not yet its notes; None if the run has ended."""
    pid = run.name.rpartition("-")[2]

    def look() -> tuple[Job, ...] | None:
        if not pid.isdecimal() or "run" not in command_of(int(pid)):
            return ()
        found = match_jobs(wanted)
        return None if found.problem else found.jobs[:1]

    found = wait_until(look, time.monotonic() + _BEGINS_S, least_s=_LOOK_EVERY_S, most_s=_LOOK_EVERY_S)
    return found[0] if found else None


def newest_run(of_script: Path | None = None) -> Path | None:
    """Return the folder of the newest run; None if there is none.

    Args:
        of_script: Folder with the runs of one script or of several; None for the folder ``logs``.
    """
    above = Path(logs_of("")) if of_script is None else of_script
    if not os.path.isdir(above):  # also for a name that is too long for a path
        return None
    return max(filter(is_run, [*above.glob("*"), *above.glob("*/*")]), key=lambda path: path.name, default=None)


def last_run_of(wanted: str) -> Path | None:
    """Return the newest run of a script, or the newest run in a folder; None if there is none.

    Args:
        wanted: Script or folder as the user has typed it; empty for any script.
    """
    if not wanted or os.path.isdir(wanted):
        return newest_run(Path(wanted) if wanted else None)
    here, beside = (Path(logs_of(name_of([wanted]), folder)) for folder in ("", os.path.dirname(wanted)))
    return newest_run(beside if os.path.isdir(beside) else here)


def _own_run(wanted: str, jobs: Sequence[Job]) -> Path | None:
    """Return the last run of a script in this folder if jobs of that name run, but only in other folders; else None.

    Args:
        wanted: Script; empty for any script.
    """
    if not jobs or not all(job.is_elsewhere for job in jobs):
        return None
    own = last_run_of(wanted)
    is_theirs = own is not None and os.path.realpath(own) in [os.path.realpath(job.folder) for job in jobs]
    return None if is_theirs else own


def _passed_over(own: Path, wanted: str, jobs: Sequence[Job]) -> str:
    """Return a line that says why the ended run `own` is examined, and which running jobs were passed over for it."""
    elsewhere = f"{counted(len(jobs), 'job')} of other folders: phalanx top shows them"
    if len(jobs) == 1 and jobs[0].pids:
        elsewhere = f"{jobs[0].name} (pid {jobs[0].pid}) runs in {jobs[0].cwd}"
    what = repr(wanted) if wanted else "job"
    return f"no {what} of this folder is running; this is its last run, {own}; {elsewhere}"


def told_newest(wanted: str) -> str:
    """Return a line that names the newest of several Trainers' folders in a folder; empty if it holds none."""
    if not os.path.isdir(wanted) or not (found := _trainers_in(Path(wanted))):
        return ""
    return f"{wanted!r} holds {counted(len(found), 'run')}; this is the newest, {found[-1]}"


def _trainers_in(folder: Path) -> list[Path]:
    """Return the Trainers' folders in a folder, the last written last; none if it is itself a Trainer's or a run's."""
    if is_run(folder) or (folder / _METRICS).exists():
        return []
    return [path.parent for path in sorted(folder.glob(f"*/{_METRICS}"), key=lambda path: path.stat().st_mtime)]


def is_run(path: Path) -> bool:
    """Whether a folder is the folder of a run of ``phalanx run``."""
    if not os.path.isdir(path):  # also for a name that is too long for a path
        return False
    return any(map(os.path.isdir, path.glob("attempt_*/rank_*"))) or bool(load_reason(path / "blackbox"))


def ended_ago_s(folder: Path) -> float:
    """Return the seconds since the last write to a run's files."""
    left = [folder, *folder.glob("launch.log"), *folder.glob("blackbox/attempt_*/*"), *folder.glob("attempt_*/*/*")]
    return max(time.time() - max(path.lstat().st_mtime for path in left), 0.0)


def record_of(folder: Path) -> Path:
    """Return the folder of the run, or of the runs, that belong to a Trainer's folder; else `folder`.

    If `folder` holds several Trainers' folders, the newest is meant.
    The last start in the Trainer's metrics names the run. If the metrics record no start, the script is assumed to have
    the folder's name.

    Raises:
        LookupError: The run is not here, because the job ran in another file system.
    """
    if is_run(folder):
        return folder
    folder = next(reversed(_trainers_in(folder)), folder)
    if (launch := _launch_of_run(folder)) is not None:
        return launch
    beside = Path(logs_beside(str(folder)))
    return beside if newest_run(folder) is None and os.path.isdir(beside) else folder


def _launch_of_run(folder: Path) -> Path | None:
    """Return the run of the job that trained last in a Trainer's folder; None if that is unknown.

    Raises:
        LookupError: The run is not here, because the job ran in another file system.
    """
    logs = host = ""
    with contextlib.suppress(OSError), open_regular(folder / _METRICS) as file:
        for line in _lines_backwards(file):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if b'"start"' in line and (told := parse_json(line))["kind"] == "start":
                    logs, host = str(told["origin"]["logs"]), str(told["origin"]["hosts"])
                    break
    if not logs:
        return None
    found = Path(os.path.normpath(folder / logs))
    if not is_run(found):
        raise LookupError(
            f"the job that trained in {str(folder)!r} ran on {printable(host)!r}; ask there: it left no record here"
        )
    return found


def _lines_backwards(file: FileIO) -> Iterator[bytes]:
    """Yield the lines of a file, last first, reading only as much as needed; huge lines are cut."""
    at, line = file.seek(0, os.SEEK_END), b""
    while at > 0:
        begin = max(at - _TAIL_BYTES, 0)
        line, *lines = (os.pread(file.fileno(), at - begin, begin) + line[:_TAIL_BYTES]).split(b"\n")
        yield from reversed(lines)
        at = begin
    yield line
