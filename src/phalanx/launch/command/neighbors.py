"""Launchers of one user on one machine find each other in a folder, and the last to start warns of too few cores.

The warning only says what to set: each launcher still takes all cores that it may use. Launchers do not divide the
cores among themselves, for three reasons: the numbers of ranks and threads decide the result, to the bit; a running job
can't change these numbers; and nobody knows which job ends first. On two cores, a step of a small model with two
threads took 0.29 ms in a job that ran alone. In two jobs at once, it took 7 and 14 ms. With OMP_NUM_THREADS=1, it took
0.98 ms in both jobs; with threads that sleep while they wait, it took 1.7 ms. If only the second job was limited to one
thread, only the second job was fast. With two ranks in each job, a step took 1.7 ms in two jobs at once, and 0.58 ms in
one job alone.

Each launcher keeps a file in its user's folder, and holds a record lock on it. The lock ends with the process, and no
child inherits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping, Sequence

from phalanx import _env
from phalanx._text import counted, joined
from phalanx.host.cpus import Share, read_machine
from phalanx.wire.messages import understand
from phalanx.wire.places import make_folder

RUN, SPAWN, TUNE = "phalanx run", "phalanx.spawn", "phalanx tune"
_KIND = "launcher-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The part of a machine that a launcher uses.

    Attributes:
        launcher: Name of the launcher for users, such as ``phalanx run``.
        cpus: CPUs that the launcher may use.
        num_ranks: Number of its ranks on this machine.
        num_threads: Number of threads of all ranks.
        job: Identity that all nodes of the launcher's job share; empty if the job has only this node.
    """

    launcher: str
    cpus: tuple[int, ...]
    num_ranks: int
    num_threads: int
    job: str = ""

    @classmethod
    def of(cls, launcher: str, shares: Sequence[Share], job: str = "") -> Claim:
        """Return the claim of a launcher with these shares on this process's CPUs."""
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        num_threads = sum(share.used_threads for share in shares)
        return cls(launcher=launcher, cpus=cpus, num_ranks=len(shares), num_threads=num_threads, job=job)


class Presence:
    """Shows a claim to other launchers until `close`.

    Attributes:
        others: Claims of the launchers that were already running, by pid.

    Two kinds of launchers take no part: launchers that a rank has started, since they use the rank's cores, and trials
    of ``phalanx tune``, since they run one at a time. If the folder can't be made, `others` is empty.

    Source: POSIX record locks. These locks end with their process, whatever ends the process, and are not inherited by
    fork.
    """

    def __init__(self, claim: Claim) -> None:
        self._path, self._fd = "", -1
        self.others: dict[int, Claim] = {}
        environ = _env.environment()
        if "LOCAL_RANK" in environ or _env.TRIAL_VARIABLE in environ:
            return
        with contextlib.suppress(OSError):
            folder = make_folder()
            self._announce(folder, claim)  # before looking: if two launchers start at once, at least one sees the other
            self.others = _claims_in(folder)

    def _announce(self, folder: str, claim: Claim) -> None:
        name = f"{_KIND}{os.getpid()}-{os.urandom(4).hex()}"
        hidden, path = os.path.join(folder, f".{name}"), os.path.join(folder, name)
        self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(self._fd, json.dumps(dataclasses.asdict(claim)).encode())
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            os.rename(hidden, path)  # only after locking: other launchers remove unlocked files
        except OSError:
            os.unlink(hidden)
            raise
        self._path = path

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd = "", -1


def _claims_in(folder: str) -> dict[int, Claim]:
    """Return the claims of other living launchers, by pid; remove the claims of launchers that were killed."""
    claims = {}
    for name in os.listdir(folder):
        pid = name.removeprefix(_KIND).partition("-")[0]
        if not name.startswith(_KIND) or pid == str(os.getpid()):  # closing our own file would release its lock
            continue
        with (
            contextlib.suppress(OSError, ValueError, TypeError, KeyError),
            open(os.path.join(folder, name), "rb") as file,
        ):
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers must not lock each other out
            except OSError:
                claims[int(pid)] = understand(file.read(), Claim)
            else:
                os.unlink(file.name)
    return claims


def crowding(own: Claim, others: Mapping[int, Claim]) -> list[str]:
    """If our cores are too few for all jobs that use them, return lines that name the other jobs and say what to set.

    Several nodes of one job on one machine imitate a cluster. These nodes may have more ranks than there are cores, as
    long as each rank has only one thread.
    """
    sharing = {pid: other for pid, other in others.items() if set(other.cpus) & set(own.cpus)}
    everyone = [own, *sharing.values()]
    machine = read_machine(usable=sorted({cpu for claim in everyone for cpu in claim.cpus}))
    num_cores, num_ranks = machine.num_cores, sum(claim.num_ranks for claim in everyone)
    num_threads = sum(claim.num_threads for claim in everyone)
    is_one_job = own.job != "" and all(claim.job == own.job for claim in everyone)
    if not sharing or num_threads <= max(num_cores, num_ranks if is_one_job else 0):
        return []
    names = joined([f"{_name(other, own)} (pid {pid})" for pid, other in sorted(sharing.items())])
    verb, cores = "uses" if len(sharing) == 1 else "use", counted(num_cores, "core")
    found = f"{names} {verb} these {cores}: {counted(num_threads, 'thread')} in all"
    per_launcher = num_cores // len(everyone)
    if any(claim.launcher == TUNE for claim in everyone):
        return [found, "run one after another: what is measured now is not how fast the script is"]
    if is_one_job or num_ranks <= num_cores:
        return [found, f"each needs OMP_NUM_THREADS={max(1, num_cores // num_ranks)} to be fast"]
    if per_launcher == 0:
        return [found, "run one after another: there is not a core for each"]
    ranks = f"nprocs={per_launcher}" if own.launcher == SPAWN else f"--nproc-per-node {per_launcher}"
    return [found, f"each needs OMP_NUM_THREADS=1 and {ranks} to be fast"]


def _name(other: Claim, own: Claim) -> str:
    if own.job and own.job == other.job:
        return "a node of this job"
    return f"another {other.launcher}" if other.launcher == own.launcher else other.launcher
