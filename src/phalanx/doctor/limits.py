"""Memory: what there is, what limits it, and whether shared memory can really be had."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import time
from collections.abc import Mapping
from typing import NamedTuple

from phalanx.doctor.finding import Finding, in_units, note, ok, problem, warning
from phalanx.launch.cpus import cgroups

_RANK_BYTES = 512 << 20  # a process that has imported torch, and a small model
_LEAST_BYTES = 256 << 20  # less than importing torch takes
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a large number
_SEGMENT_BYTES = 4 << 20  # what the groups of a rank or four use
_DOCKER_SHM_BYTES = 64 << 20  # its /dev/shm unless told otherwise


class Limit(NamedTuple):
    """A resource limit, None where there is none."""

    soft: int | None
    hard: int | None


def read_limits() -> dict[str, Limit]:
    """Return this process's limits by name: AS, MEMLOCK, NOFILE, NPROC."""
    limits = {}
    for name in ("AS", "MEMLOCK", "NOFILE", "NPROC"):
        values = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        limits[name] = Limit(*(None if value == resource.RLIM_INFINITY else value for value in values))
    return limits


def examine_memory(num_ranks: int, root: str = "/") -> list[Finding]:
    """Say how much memory `num_ranks` ranks can have: of the machine, and of the cgroups above us."""
    sizes = _meminfo(root)
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", sizes.get("MemFree", 0))
    limited = min(((limit, used) for limit, used in _cgroup_memory(root)), default=None, key=lambda pair: _left(*pair))
    facts = {"total_bytes": total, "available_bytes": available, "num_ranks": num_ranks}
    found = f"{in_units(total)}, {in_units(available)} available"
    if limited is not None and (limited[0] < total or _left(*limited) < available):
        limit, used = limited
        available = min(available, _left(limit, used))
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


def _left(limit: int, used: int) -> int:
    return max(limit - used, 0)


def _meminfo(root: str) -> dict[str, int]:
    sizes = {}
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def _cgroup_memory(root: str) -> list[tuple[int, int]]:
    """Return limit and use of each cgroup on the way up that has a limit; use without the cache that can be dropped."""
    found = []
    for cgroup in cgroups(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(os.path.join(cgroup, limit_name))
            if limit is None or limit >= _NO_LIMIT_BYTES:
                continue
            used = _number(os.path.join(cgroup, used_name)) or 0
            fields = dict(line.split() for line in _read(os.path.join(cgroup, "memory.stat")).splitlines())
            found.append((limit, max(used - int(fields.get(cache_name, 0)), 0)))
    return found


def examine_limits(
    num_ranks: int, world_size: int, limits: Mapping[str, Limit], root: str = "/", num_threads: int = 0
) -> list[Finding]:
    """Say which resource limits (ulimit) are too small for the ranks.

    Args:
        num_threads: That this user has already, which NPROC counts.
    """
    findings = []
    facts = {name.lower(): limit.soft for name, limit in limits.items()}
    space = limits["AS"].soft
    if space is not None:
        findings.append(
            warning(
                "limits",
                f"RLIMIT_AS: the address space is limited to {in_units(space)}; torch, its threads and CUDA reserve "
                "far more than they use",
                "ulimit -v unlimited; limit memory by the container or the job instead",
                **facts,
            )
        )
    needed = 256 + 4 * world_size  # libraries, logs, the loader's workers; a connection or two to each rank
    files = limits["NOFILE"]
    if files.soft is not None and files.soft < needed:
        more = "" if files.hard is None or files.hard >= needed else f" (the hard limit is {files.hard}: ask root)"
        findings.append(
            warning(
                "limits",
                f"RLIMIT_NOFILE: {files.soft} open files a process, and some {needed} may be needed",
                f"ulimit -n {max(4096, needed)}{more}",
                **facts,
            )
        )
    tasks = limits["NPROC"].soft
    wanted = num_threads + 32 * num_ranks
    if tasks is not None and tasks < wanted:
        findings.append(
            warning(
                "limits",
                f"RLIMIT_NPROC: {tasks} processes and threads of this user, and some {wanted} may be needed",
                f"ulimit -u {max(4096, wanted)}",
                **facts,
            )
        )
    locked = limits["MEMLOCK"].soft
    if locked is not None and _names(os.path.join(root, "sys/class/infiniband")):
        findings.append(
            warning(
                "limits",
                f"RLIMIT_MEMLOCK: {in_units(locked)}; NCCL and MPI pin memory for this host's InfiniBand or RoCE card",
                "ulimit -l unlimited (in a container: --ulimit memlock=-1)",
                **facts,
            )
        )
    shown = "unlimited" if files.soft is None else str(files.soft)
    return findings or [ok("limits", f"open files {shown}; address space unlimited", **facts)]


def count_threads(root: str = "/proc") -> int:
    """Return how many threads the processes of this user have."""
    uid, total = os.getuid(), 0
    for name in filter(str.isdigit, _names(root)):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(os.path.join(root, name)).st_uid == uid:
                total += len(os.listdir(os.path.join(root, name, "task")))
    return total


def try_shared_memory(size_bytes: int = _SEGMENT_BYTES) -> list[Finding]:
    """Make, fill, map and seal an unnamed segment, as the ranks of a host do."""
    began_s = time.monotonic()
    facts = {"size_bytes": size_bytes}
    try:
        fd = os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        found = f"a segment of {in_units(size_bytes)} can't be had: {error.strerror or error}"
        return [problem("shared memory", found, todo, **facts)]
    finally:
        os.close(fd)
    took_s = time.monotonic() - began_s
    return [
        ok(
            "shared memory",
            f"a segment of {in_units(size_bytes)} made, filled, mapped and sealed",
            **facts,
            seconds=took_s,
        )
    ]


def examine_dev_shm(found: os.statvfs_result | None) -> list[Finding]:
    """Judge ``/dev/shm``; None: there is none."""
    todo = (
        "nothing for phalanx, which does not use it; for DataLoader workers: docker run --shm-size=8g or --ipc=host, "
        "in Kubernetes an emptyDir of medium Memory, or num_workers=0"
    )
    if found is None:
        return [warning("/dev/shm", "there is none; the workers of a DataLoader need it", todo)]
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text, facts = f"{in_units(size)}, {in_units(free)} free", {"size_bytes": size, "free_bytes": free}
    if size <= _DOCKER_SHM_BYTES or free < _DOCKER_SHM_BYTES // 4:
        return [warning("/dev/shm", f"{text}: little for the workers of a DataLoader", todo, **facts)]
    return [ok("/dev/shm", f"{text} (for DataLoader workers; phalanx does not use it)", **facts)]


def read_dev_shm() -> os.statvfs_result | None:
    with contextlib.suppress(OSError):
        return os.statvfs("/dev/shm")
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []
