"""Examines the limits on memory and processes; tests that shared memory and watching processes really work."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from phalanx._text import in_units
from phalanx.doctor.finding import Finding, note, ok, problem, warning
from phalanx.host import cgroups
from phalanx.host.block_pool import choose, huge_pages
from phalanx.host.network import infiniband_cards
from phalanx.host.processes import process_of
from phalanx.host.shared_blocks import unnamed_file
from phalanx.launch.warm import starter

_RANK_BYTES = 512 << 20  # memory of a rank with torch and a small model
_LEAST_BYTES = 256 << 20  # memory that importing torch takes, approximately
_SEGMENT_BYTES = 4 << 20  # size of the segment to try: enough for the groups of up to four ranks
_END_MS = 3000  # time limit for a process to end
_LITTLE_SWAP_BYTES = 64 << 20  # swap in use even on an idle host, by pages that no process has touched since boot
_DOCKER_SHM_BYTES = 64 << 20  # size of /dev/shm in a Docker container by default


class Limit(NamedTuple):
    """A resource limit; None means unlimited."""

    soft: int | None
    hard: int | None


def read_limits() -> dict[str, Limit]:
    """Return this process's resource limits AS, MEMLOCK, NOFILE and NPROC, by name."""
    limits = {}
    for name in ("AS", "MEMLOCK", "NOFILE", "NPROC"):
        values = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        limits[name] = Limit(*(None if value == resource.RLIM_INFINITY else value for value in values))
    return limits


def examine_memory(num_ranks: int, root: str = "/") -> list[Finding]:
    """Compare the memory that the host and this process's cgroups have left with the needs of `num_ranks` ranks."""
    host = cgroups.host_memory(root)
    total, available = host.limit_bytes, host.left_bytes
    limited = min(cgroups.cgroup_memory(root), default=host, key=lambda memory: memory.left_bytes)
    facts = {"total_bytes": total, "available_bytes": available, "num_ranks": num_ranks}
    found = f"{in_units(total)}, {in_units(available)} available"
    if limited.limit_bytes < total or limited.left_bytes < available:
        limit, used = limited
        available = min(available, limited.left_bytes)
        found += f"; cgroup limit {in_units(limit)}, {in_units(used)} of it used"
        facts |= {"cgroup_limit_bytes": limit, "cgroup_used_bytes": used}
    todo = "free memory, raise the container's limit, or start fewer ranks (--nproc-per-node)"
    if not total:
        return [note("memory", "/proc/meminfo can't be read")]
    if available < _LEAST_BYTES:
        return [problem("memory", f"{found}: less than importing torch takes", todo, **facts)]
    if available < _RANK_BYTES * num_ranks:
        return [warning("memory", f"{found}: little for {num_ranks} ranks", todo, **facts)]
    return [ok("memory", found, **facts)]


def examine_freed_memory(num_ranks: int, environ: Mapping[str, str], root: str = "/") -> list[Finding]:
    """Report whether ranks would keep the memory that they free, and whether this memory is in huge pages."""
    policy = choose(environ, num_ranks=num_ranks, root=root)
    facts = {"keeps": policy.keeps, "huge_pages": policy.huge_pages}
    if policy.huge_pages:
        return [ok("freed memory", str(policy), **facts)]
    if policy.keeps:
        mode = huge_pages(root) or "not there"
        found = f"kept, in small pages: the kernel's huge pages are {mode}"
        return [note("freed memory", found, policy.todo, **facts)]
    return [note("freed memory", f"{policy}: steps are slower without", policy.todo, **facts)]


def examine_swap(root: str = "/") -> list[Finding]:
    """Report how much memory is swapped out, because a rank that needs swapped-out memory waits for the disk."""
    sizes = cgroups.read_sizes(root)
    total, in_use = sizes.get("SwapTotal", 0), sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    facts = {"swap_bytes": total, "swap_used_bytes": in_use}
    if in_use < max(_LITTLE_SWAP_BYTES, total // 100):
        return [ok("swap", "none in use" if total else "none", **facts)]
    found = f"{in_units(in_use)} of {in_units(total)} in use: a rank that needs it back waits for the disk"
    return [note("swap", found, "free memory, or start fewer ranks; as root: swapoff -a && swapon -a", **facts)]


def examine_limits(
    num_ranks: int, world_size: int, limits: Mapping[str, Limit], root: str = "/", num_threads: int = 0
) -> list[Finding]:
    """Find the resource limits (ulimit) that are too small for the ranks.

    Args:
        num_ranks: Number of ranks on this host.
        world_size: Number of ranks in the job.
        limits: Limits as `read_limits` returns them.
        root: Root of the file system.
        num_threads: Number of threads that this user already has; they count against NPROC.
    """
    space, files, tasks, locked = (limits[name] for name in ("AS", "NOFILE", "NPROC", "MEMLOCK"))
    wanted = []  # pairs of a finding and the advice for it
    if space.soft is not None:
        found = (
            f"RLIMIT_AS: the address space is limited to {in_units(space.soft)}; torch, its threads and CUDA reserve "
            "far more than they use"
        )
        wanted.append((found, "ulimit -v unlimited; limit memory by the container or the job instead"))
    num_files = 256 + 4 * world_size  # 256 for libraries, logs and loader workers; 4 for each rank of the job
    if files.soft is not None and files.soft < num_files:
        found = f"RLIMIT_NOFILE: {files.soft} open files a process, and some {num_files} may be needed"
        more = "" if files.hard is None or files.hard >= num_files else f" (the hard limit is {files.hard}: ask root)"
        wanted.append((found, f"ulimit -n {max(4096, num_files)}{more}"))
    num_tasks = num_threads + 32 * num_ranks
    if tasks.soft is not None and tasks.soft < num_tasks:
        found = f"RLIMIT_NPROC: {tasks.soft} processes and threads of this user, and some {num_tasks} may be needed"
        wanted.append((found, f"ulimit -u {max(4096, num_tasks)}"))
    if locked.soft is not None and infiniband_cards(root):
        card = "this host's InfiniBand or RoCE card"
        found = f"RLIMIT_MEMLOCK: {in_units(locked.soft)}; NCCL and MPI pin memory for {card}"
        wanted.append((found, "ulimit -l unlimited (in a container: --ulimit memlock=-1)"))
    facts = {name.lower(): limit.soft for name, limit in limits.items()}
    if wanted:
        return [warning("limits", found, todo, **facts) for found, todo in wanted]
    shown = "unlimited" if files.soft is None else str(files.soft)
    return [ok("limits", f"open files {shown}; address space unlimited", **facts)]


def examine_warm_start(num_ranks: int, environ: Mapping[str, str]) -> list[Finding]:
    """Report whether ``phalanx run --warm`` would fork a job from a process that already runs."""
    words = ["--warm", "--nproc-per-node", str(num_ranks), "-m", "phalanx"]
    found = starter.start_in_words("run", words, environ)
    if not found.startswith(starter.NOT_WARM):
        return [ok("warm start", f"phalanx run --warm: {found}")]
    return [note("warm start", found, "phalanx run --warm imports torch for each job")]


def try_shared_memory(size_bytes: int = _SEGMENT_BYTES) -> list[Finding]:
    """Create, fill, map and seal an unnamed segment, as the ranks of a host do."""
    began_s = time.monotonic()
    facts = {"size_bytes": size_bytes}
    try:
        fd = unnamed_file("phalanx-doctor", can_seal=True)
    except (OSError, AttributeError) as error:
        todo = "Linux 3.17 or newer, and a container whose seccomp profile allows memfd_create"
        return [problem("shared memory", f"memfd_create: {error}", todo, **facts)]
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with mmap.mmap(fd, size_bytes) as mapped:
            mapped[size_bytes - 1] = 1
    except OSError as error:
        todo = "free memory, or raise the container's limit; ulimit -f and -v must not forbid it"
        found = f"a segment of {in_units(size_bytes)} can't be allocated: {error.strerror or error}"
        return [problem("shared memory", found, todo, **facts)]
    finally:
        os.close(fd)
    took_s = time.monotonic() - began_s
    found = f"a segment of {in_units(size_bytes)} made, filled, mapped and sealed"
    return [ok("shared memory", found, **facts, seconds=took_s)]


def try_watching() -> list[Finding]:
    """Test how ranks can watch each other: whether pidfd, or at least /proc, shows that a process has ended."""
    todo = "Linux 5.3 or newer, and a container whose seccomp profile allows pidfd_open"
    sleeper = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            found = f"pidfd_open: {error.strerror}"
            if process_of(child.pid) is None:
                found += ", and /proc does not show processes: the death of a rank is noticed only at the timeout"
                return [problem("liveness", found, f"{todo}; or mount /proc", errno=error.errno)]
            found += ": the death of a rank is noticed through /proc, often without its exit code"
            return [warning("liveness", found, todo, errno=error.errno)]
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            lived = not poll.poll(0)
            child.stdin.close()
            ended = bool(poll.poll(_END_MS))
        finally:
            os.close(pidfd)
    if lived and ended:
        return [ok("liveness", "the end of a process is seen at once (pidfd)")]
    found = "a pidfd does not tell whether its process lives: deaths of ranks may be noticed only at the timeout"
    return [problem("liveness", found, todo, lived=lived, ended=ended)]


def examine_dev_shm(found: os.statvfs_result | None) -> list[Finding]:
    """Rate the size of ``/dev/shm``; `found` is None if it does not exist."""
    todo = (
        "nothing for phalanx and phalanx.DataLoader, which do not use it; for workers of torch's own DataLoader: "
        "docker run --shm-size=8g or --ipc=host, in Kubernetes an emptyDir of medium Memory, or num_workers=0"
    )
    if found is None:
        return [warning("/dev/shm", "there is none; the workers of torch's own DataLoader need it", todo)]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text, facts = f"{in_units(size)}, {in_units(free)} free", {"size_bytes": size, "free_bytes": free}
    if size <= _DOCKER_SHM_BYTES or free < _DOCKER_SHM_BYTES // 4:
        return [warning("/dev/shm", f"{text}: little for the workers of torch's own DataLoader", todo, **facts)]
    return [ok("/dev/shm", f"{text} (for workers of torch's own DataLoader; phalanx does not use it)", **facts)]


def read_dev_shm() -> os.statvfs_result | None:
    with contextlib.suppress(OSError):
        return os.statvfs("/dev/shm")
    return None
