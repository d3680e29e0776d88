"""Finds the processes of this host that are ranks of a job, whoever started them.

Three sources are used, in this order: the notes of phalanx's own launchers, which know their ranks' processes; the
black boxes that processes hold; and the environment that torchrun, mpirun, Slurm or a person gave the ranks. A launcher
is recognized by its program, so ``vim torchrun`` is not one. A torchrun without ranks counts as a job that is starting.
Users can also ask about a process that is not a rank: it counts as a job with a single rank, number -1.

The host sees the processes of a container's job under other numbers than the container does. So the numbers in the
launcher's notes and in boxes are translated by ``NSpid``; otherwise they would stand for unrelated processes of the
host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx import _env
from phalanx._errors import printable
from phalanx._text import columns, ending_of, shortened
from phalanx.diagnose.commands import BY_HAND, launcher_of, program_of, script_name, script_path
from phalanx.host.kernel import number_inside
from phalanx.host.processes import (
    Process,
    awaited_by,
    command_of,
    descendants,
    environment_of,
    is_python,
    off_limits,
    process_of,
    processes_of,
    working_folder,
)
from phalanx.host.schedulers import Placement, detect
from phalanx.launch.processes import reaper
from phalanx.record import box
from phalanx.record.run_folder import logs_beside
from phalanx.rendezvous.launched import MEMORY_NAME, read_started

NO_JOB = "no job"
"""Launcher name for a process that is not a rank of a job."""
NO_RANK = -1
"""Rank number of a process that is not a rank of a job."""

_STARTING = "starting"
_TABLE_WIDTH = 80
_SCRIPT_WIDTH = 24
_FOLDER = 2  # index of the table's column with the folder
_MOST_DIGITS = 20  # number of digits read of a typed pid; Python refuses to convert more than 4,300 digits


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of this host.

    Attributes:
        rank: Rank number; `NO_RANK` for a process that is not a rank.
        process: The process; None if it has ended.
        pid: Pid of the process, even after the process has ended.
        helpers: Descendants of the process, such as the workers of a data loader.
    """

    rank: int
    pid: int
    process: Process | None
    helpers: tuple[Process, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """The ranks of one job that run on this host.

    Attributes:
        name: Script or module that the job runs, such as ``train.py``.
        launcher: ``phalanx run``, ``phalanx.spawn``, ``torchrun``, ``mpirun``, ``srun``, ``by hand``, or ``no job``
            for a process that is not a rank.
        launcher_pid: Pid of the launcher; 0 if there is none, or if the job has ended.
        world_size: Number of ranks on all hosts; 0 if it is unknown.
        ranks: The ranks of this host, lowest first.
        folder: Folder of the run's logs; empty if it is unknown.
        notes: Path of the launcher's notes, see `rendezvous.launched`; empty if the launcher keeps none.
        state: Activity of the launcher while no rank runs here, such as ``starting``; empty if ranks run or have ended.
        straggler: Words of the launcher about a rank that slows the other ranks down; empty if there is none.
        script: Absolute path of the job's script; empty if that is unknown.
    """

    name: str
    launcher: str
    launcher_pid: int
    world_size: int
    ranks: tuple[Rank, ...]
    folder: str = ""
    notes: str = ""
    state: str = ""
    straggler: str = ""
    script: str = ""

    @property
    def has_ended(self) -> bool:
        return not self.launcher_pid and not self.ranks

    @property
    def pid(self) -> int:
        """Pid by which a user can name a job that runs: its launcher's, else its first rank's."""
        return self.launcher_pid or self.ranks[0].pid

    @property
    def waits(self) -> str:
        """Why no rank of the job runs here, as a sentence."""
        return f"no rank of {self.name} runs here yet ({self.launcher}, pid {self.launcher_pid}): {self.state}"

    @property
    def cwd(self) -> str:
        """Folder in which the job runs; empty if that is unknown."""
        pids = [*(rank.pid for rank in self.ranks[:1]), self.launcher_pid]
        return printable(next(filter(None, map(working_folder, pids)), ""))

    @property
    def is_elsewhere(self) -> bool:
        """Whether the job runs in another folder than this process, or has ended since it was found."""
        if cwd := self.cwd:
            return cwd != printable(working_folder(os.getpid()))
        return all((process := process_of(pid)) is None or process.state == "Z" for pid in self.pids)

    @property
    def is_of_this_host(self) -> bool:
        """Whether nothing suggests other hosts: no launcher started the job, and its rendezvous is on this host."""
        if self.launcher != BY_HAND or not self.ranks:
            return False
        address = environment_of(self.ranks[0].pid).get("MASTER_ADDR", "")
        return address in ("localhost", "::1", _env.host_name()) or address.startswith("127.")

    @property
    def pids(self) -> set[int]:
        """The launcher's pid and those of all ranks."""
        return {self.launcher_pid, *(rank.pid for rank in self.ranks)} - {0}


@dataclasses.dataclass(frozen=True)
class Matches:
    """The running jobs that fit what a user has typed.

    Attributes:
        jobs: Jobs that fit; exactly one if it is clear which job the user means.
        problem: Reason why it is not clear which job is meant, with the jobs to choose from; "" if it is clear.
    """

    jobs: tuple[Job, ...]
    problem: str = ""


class NoRank(LookupError):
    """The job exists, but it has no rank that can be examined."""


def find_jobs() -> list[Job]:
    """Return the jobs of this user on this host, newest last."""
    processes = processes_of(os.geteuid())
    others = {pid for pid, process in processes.items() if pid != os.getpid() and process.name != reaper.NAME}
    pythons = set(filter(is_python, others))
    jobs: list[Job] = []
    taken: set[int] = set()
    for source in (_noted, _boxed, _placed, _starting):
        for job in source(processes, pythons - taken):
            jobs.append(job)
            taken |= job.pids
            if job.world_size != 1:
                taken |= {helper.pid for rank in job.ranks for helper in rank.helpers}
    return sorted(jobs, key=lambda job: max((r.process.start_time for r in job.ranks if r.process), default=0))


def find_job(wanted: str, has_notes: bool = False) -> Job:
    """Return the one job that fits what a user has typed; see `match_jobs`.

    Raises:
        LookupError: No job fits, or several jobs do; the message lists them.
        NoRank: The pid belongs to another user's launcher.
    """
    found = match_jobs(wanted, has_notes)
    if found.problem:
        raise LookupError(found.problem)
    return found.jobs[0]


def match_jobs(wanted: str, has_notes: bool = False) -> Matches:
    """Return the jobs that a user means by a pid of any of their processes, a name or path, or the folder of a run.

    A process that is not a rank counts as a job of its own, with the launcher `NO_JOB`. If several jobs fit and exactly
    one runs in the current folder, that one is meant. A path with a slash matches no script of that name elsewhere.

    Args:
        wanted: Job as the user has typed it; empty for any job.
        has_notes: Whether only jobs started by phalanx count, unless a pid is asked for.

    Raises:
        NoRank: The pid belongs to another user's launcher.
    """
    jobs = find_jobs()
    if wanted.isdecimal():
        return _job_of(int(wanted[:_MOST_DIGITS]), wanted, jobs)
    jobs = [job for job in jobs if job.notes or not has_notes]
    found = [job for job in jobs if not wanted or _is_named(job, wanted)]
    found = found or [job for job in jobs if wanted and _is_in_or_beside(job.folder, wanted)]
    own_folder = printable(working_folder(os.getpid()))
    here = found
    if len(found) > 1:
        here = [job for job in found if job.cwd == own_folder or (wanted and job.script == os.path.realpath(wanted))]
    if len(here) == 1:
        return Matches((here[0],))
    name = f" {wanted!r}" * bool(wanted)
    whose = "that phalanx has started for this user" if has_notes else "of this user"
    if found:
        several = f"several jobs{name} {whose} are running on this host"
        example = f"{'--job ' * has_notes}{found[-1].pid}"
        return Matches(tuple(found), f"{several}; name one by its pid, such as {example}:{_table(found)}")
    others = f"; these are:{_table(jobs)}" if jobs else ""
    return Matches((), f"no job{name} {whose} is running on this host{others}")


def _is_named(job: Job, wanted: str) -> bool:
    """Whether a user means a job by the name of its script or module, or by the path of the script."""
    if os.sep not in wanted:
        return printable(wanted) in (job.name, os.path.splitext(job.name)[0])
    if job.script:
        return job.script == os.path.realpath(wanted)
    return os.path.isfile(wanted) and printable(os.path.basename(wanted)) == job.name


def _job_of(pid: int, wanted: str, jobs: Sequence[Job]) -> Matches:
    """Return the job to which a process belongs; if it belongs to none, a job of its own."""
    for job in jobs:
        if pid in job.pids:
            return Matches((job,))
    for job in jobs:  # not of a one-rank job, which may be a notebook that has started anything
        if job.world_size != 1 and any(pid == helper.pid for rank in job.ranks for helper in rank.helpers):
            return Matches((job,))
    process = process_of(pid)
    if process is None or process.is_kernel:
        return Matches((), f"{pid} is a thread of the kernel" if process else f"there is no process {wanted}")
    launcher, name = launcher_of(pid), script_name(command_of(pid)) or process.name
    if launcher != BY_HAND:  # ranks need not be children of their launcher: mpirun starts them through a daemon
        processes = processes_of(os.geteuid())
        stand_ins = awaited_by(pid)  # the processes that a warm start's client waits for
        for job in jobs:
            if job.launcher_pid in stand_ins or any(_is_below(one, {pid}, processes) for one in job.pids):
                return Matches((job,))
        name = script_name(program_of(pid)[1:]) or name
        if why_not := off_limits(pid):
            raise NoRank(f"{name} ({launcher}, pid {pid}) {why_not}")
        return Matches((Job(name, launcher, pid, 0, (), state=_STARTING),))
    number, world_size = _place_of(pid)
    rank = _rank(number, pid, {pid: process})
    if number != NO_RANK:
        return Matches((Job(name, BY_HAND, 0, world_size, (rank,)),))
    return Matches((Job(name if is_python(pid) and name != "-c" else process.name, NO_JOB, pid, 0, (rank,)),))


def _place_of(pid: int) -> tuple[int, int]:
    """Return rank and world size of a process, which may be another user's; `NO_RANK` and 0 if it is not a rank."""
    with contextlib.suppress(OSError, ValueError):
        if (recorded := box.box_of_process(pid)) is not None:
            return recorded.rank, recorded.world_size
    with contextlib.suppress(ValueError):
        if is_python(pid) and (place := detect(environment_of(pid))) is not None:
            return place.rank, place.world_size
    return NO_RANK, 0


def _table(jobs: Sequence[Job]) -> str:
    """Return a table with one line for each job, from which a user can choose.

    A folder that is too long for 80 columns keeps its end, because that is where jobs differ.
    """
    rows = []
    for job in jobs:
        process = process_of(job.pid)
        begun = time.localtime(time.time() - process.age_s) if process is not None else None
        since = time.strftime("%b %d %H:%M", begun) if begun is not None else ""
        rows.append((str(job.pid), shortened(job.name, _SCRIPT_WIDTH), job.cwd, job.launcher, since))
    titles = ("pid", "script", "folder", "started by", "since")
    taken = sum(max(map(len, column)) for at, column in enumerate(zip(titles, *rows, strict=True)) if at != _FOLDER)
    room = _TABLE_WIDTH - taken - 2 * len(titles)  # two blanks before each column
    shown = [(*row[:_FOLDER], ending_of(row[_FOLDER], room), *row[_FOLDER + 1 :]) for row in rows]
    return "".join(f"\n  {line}" for line in columns([titles, *shown]))


def told_where(job: Job, wanted: str) -> str:
    """Return a line that names a job of another folder; empty if the user has named its pid or path."""
    if wanted.isdecimal() or os.sep in wanted or not job.is_elsewhere or not job.cwd:
        return ""
    what = repr(wanted) if wanted else "job"
    return f"no {what} of this folder is running; this is {job.name} (pid {job.pid}) in {job.cwd}"


def find_ranks(wanted: str, has_notes: bool = False) -> Job:
    """Return the job that a user means, if any of its ranks runs or has run.

    Raises:
        LookupError: No job fits, or several jobs do.
        NoRank: None of the job's ranks has been started, or the job is another user's.
    """
    job = find_job(wanted, has_notes)
    if not job.ranks:
        raise NoRank(job.waits)
    return job


def running_in(folder: str) -> Job | None:
    """Return the newest running job with logs in `folder`, or beside it if it is a Trainer's folder; else None."""
    jobs = [job for job in find_jobs() if job.launcher_pid and _is_in_or_beside(job.folder, folder)]
    return jobs[-1] if jobs else None


def _is_in(folder: str, wanted: str) -> bool:
    """Whether a run's folder is the wanted folder, or lies in it as a run of a script."""
    of_script = os.path.dirname(folder)
    return bool(folder) and os.path.realpath(wanted) in map(
        os.path.realpath, (folder, of_script, os.path.dirname(of_script))
    )


def _is_in_or_beside(folder: str, wanted: str) -> bool:
    """Whether a run's folder is in `wanted`, or in the logs beside `wanted` if that is a Trainer's folder."""
    return any(_is_in(folder, one) for one in {wanted, logs_beside(wanted)} - {""})


def _noted(processes: Mapping[int, Process], pythons: set[int]) -> Iterator[Job]:
    """Yield the jobs started by phalanx. Of several processes that hold the same notes, the oldest is the launcher."""
    seen: set[tuple[int, int]] = set()
    for pid in sorted(pythons, key=lambda pid: processes[pid].start_time):
        with contextlib.suppress(OSError, ValueError):
            for path in box.memories_of(pid, MEMORY_NAME):
                memory = os.stat(path)
                started = read_started(path)
                if started is None or (memory.st_dev, memory.st_ino) in seen:
                    continue
                seen.add((memory.st_dev, memory.st_ino))
                outside = _outside(pid, processes)
                ranks = [_rank(rank, outside(of), processes) for rank, of in sorted(started.pids.items())]
                if started.state and not started.pids.keys() - started.ended.keys():
                    ranks = []  # the notes are still those of the previous attempt
                words = shlex.split(started.command)[2:] if started.command else command_of(pid)[1:]
                yield Job(
                    script_name(words), started.launcher, pid, started.world_size, tuple(ranks), started.folder, path,
                    state="" if ranks else started.state or _STARTING, straggler=started.straggler,
                    script=script_path(words, pid),
                )  # fmt: skip


def _outside(launcher: int, processes: Mapping[int, Process]) -> Callable[[int], int]:
    """Return a function that translates the pids in a launcher's notes into those of this pid namespace.

    The pids differ if the launcher runs in a container. For a process that has ended there, the function returns 0.
    """
    if number_inside(launcher) == launcher:
        return lambda pid: pid
    below = (process.pid for process in descendants(launcher, processes))
    known = {number_inside(pid): pid for pid in below}
    return lambda pid: known.get(pid, 0)


def _boxed(processes: Mapping[int, Process], pythons: set[int]) -> Iterator[Job]:
    """Yield the jobs whose ranks have black boxes, but which phalanx has not started."""
    found: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for pid in pythons:
        with contextlib.suppress(OSError, ValueError):
            if (recorded := box.box_of_process(pid)) is not None:
                key: tuple[object, ...] = (pid,)  # a job with a single rank
                if recorded.world_size > 1:
                    key = _meeting(environment_of(pid)) or (processes[pid].parent, recorded.world_size)
                found.setdefault(key, []).append((recorded.rank, pid, recorded.world_size))
    for ranks in found.values():
        yield _job(processes[ranks[0][1]].parent, ranks, processes)


def _meeting(environ: Mapping[str, str]) -> tuple[object, ...]:
    """Return the rendezvous in a rank's environment, which tells jobs apart; () if there is none."""
    place = detect(environ)
    if place is None or place.master_port is None:
        return ()
    return place.master_addr, place.master_port, place.world_size, environ.get("TORCHELASTIC_RUN_ID")


def _placed(processes: Mapping[int, Process], pythons: set[int]) -> Iterator[Job]:
    """Yield jobs whose processes have their rank in the environment."""
    found: dict[tuple[object, ...], dict[int, tuple[int, Placement]]] = {}
    for pid in sorted(pythons, key=lambda pid: processes[pid].start_time):
        environ = environment_of(pid)
        with contextlib.suppress(ValueError):
            place = detect(environ)
            if place is None:
                continue
            ranks = found.setdefault(_meeting(environ) or (place.world_size, place.scheduler), {})
            if not _is_below(
                pid, {of for of, _ in ranks.values()}, processes
            ):  # a process below a rank is no rank: it has only inherited the environment
                ranks[place.rank] = pid, place
    for ranks in found.values():
        parent = processes[next(iter(ranks.values()))[0]].parent
        yield _job(parent, [(rank, pid, place.world_size) for rank, (pid, place) in ranks.items()], processes)


def _is_below(pid: int, ancestors: set[int], processes: Mapping[int, Process]) -> bool:
    while pid in processes:
        if pid in ancestors:
            return True
        pid = processes[pid].parent
    return False


def _starting(processes: Mapping[int, Process], pythons: set[int]) -> Iterator[Job]:
    """Yield a job for each torchrun, except for newly forked children, which still have torchrun's command line."""
    for pid in pythons:
        if launcher_of(pid) == "torchrun" and launcher_of(processes[pid].parent) != "torchrun":
            words = program_of(pid)[1:]
            yield Job(script_name(words), "torchrun", pid, 0, (), state=_STARTING, script=script_path(words, pid))


def _job(parent: int, ranks: Sequence[tuple[int, int, int]], processes: Mapping[int, Process]) -> Job:
    _, first, world_size = min(ranks)
    launcher = launcher_of(parent)
    return Job(
        name=script_name(command_of(first)),
        launcher=launcher,
        launcher_pid=0 if launcher == BY_HAND else parent,  # by hand: the parent is a shell, perhaps of several jobs
        world_size=world_size,
        ranks=tuple(_rank(rank, pid, processes) for rank, pid, _ in sorted(ranks)),
        script=script_path(command_of(first), first),
    )


def _rank(rank: int, pid: int, processes: Mapping[int, Process]) -> Rank:
    return Rank(rank, pid, processes.get(pid), tuple(descendants(pid, processes)) if pid in processes else ())
