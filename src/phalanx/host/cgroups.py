"""The limits on memory and processors for this process: those of its cgroups (version 2 or 1), and those of the host.

Everything is read from ``/proc`` and ``/sys``. Tests build an imitation of both in a folder and pass the folder as
`root`. Other files of this package also use the general readers here: `read` for a file's text, and `read_numbers`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as a large number
# For versions 2 and 1: the files with limits, the file with the usage, and the line of memory.stat with the part of the
# usage that is cache and can be dropped. Above memory.high, processes are throttled rather than killed.
_MEMORY_FILES = (
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


class Memory(NamedTuple):
    """A memory limit in bytes, and the bytes in use, without cache that can be dropped."""

    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use, in order; if unknown, return those of all CPUs."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def folders(controller: str, root: str = "/") -> Iterator[str]:
    """Yield the folders of this process's cgroup and its visible ancestors, nearest first; some may not exist."""
    mounts = _mounts(controller, root)
    for line in read(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for top, point in mounts["cgroup" if controllers else "cgroup2"]:
            # In a container, the mount may show only the container's part of the tree, whereas the path is relative to
            # the host's root.
            below = path.removeprefix(top.rstrip("/")) if f"{path}/".startswith(f"{top.rstrip('/')}/") else ""
            below = "" if "/.." in below else below.strip("/")
            while below:
                yield os.path.join(point, below)
                below = os.path.dirname(below)
            yield point


def _mounts(controller: str, root: str) -> dict[str, list[tuple[str, str]]]:
    """Return, for each version, pairs of a mounted part of the cgroup tree and the folder where it is mounted."""
    found: dict[str, list[tuple[str, str]]] = {"cgroup": [], "cgroup2": []}
    for line in read(root, "proc/self/mountinfo").splitlines():
        fields, _, rest = (part.split() for part in line.partition(" - "))
        if rest[0] == "cgroup2" or (rest[0] == "cgroup" and controller in rest[2].split(",")):
            top, point = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), name) for name in fields[3:5])
            found[rest[0]].append((top, os.path.join(root, point.lstrip("/"))))
    return found


def host_memory(root: str = "/") -> Memory:
    """Return the host's memory; its limit is 0 if ``/proc/meminfo`` can't be read."""
    sizes = read_sizes(root)
    total = sizes.get("MemTotal", 0)
    return Memory(total, total - sizes.get("MemAvailable", sizes.get("MemFree", 0)))


def read_sizes(root: str = "/") -> dict[str, int]:
    """Return the sizes in ``/proc/meminfo``, in bytes, by name; empty if the file can't be read."""
    found = re.findall(r"^(\S+): +(\d+) kB$", read(root, "proc/meminfo"), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


class Gauge(NamedTuple):
    """The files that contain a cgroup's memory usage, and the cgroup's limit, which was read once."""

    limit_bytes: int
    folder: str
    used_name: str
    cache_name: str

    def read(self) -> Memory:
        used = _number(self.folder, self.used_name) or 0
        cache = read_numbers(self.folder, "memory.stat").get(self.cache_name, 0)
        return Memory(self.limit_bytes, max(used - cache, 0))


def memory_gauges(root: str = "/") -> list[Gauge]:
    """Return the gauge of each of this process's cgroups that has a limit."""
    found = []
    for folder in folders("memory", root):
        for limit_names, used_name, cache_name in _MEMORY_FILES:
            # In version 1, memory.stat also reports limits of ancestors whose folders are not visible here.
            limits = [
                *(_number(folder, name) for name in limit_names),
                read_numbers(folder, "memory.stat").get("hierarchical_memory_limit"),
            ]
            limit = min((number for number in limits if number is not None), default=_NO_LIMIT_BYTES)
            if limit < _NO_LIMIT_BYTES and _number(folder, used_name) is not None:
                found.append(Gauge(limit, folder, used_name, cache_name))
    return found


def cgroup_memory(root: str = "/") -> list[Memory]:
    """Return the memory of each of this process's cgroups that has a limit."""
    return [gauge.read() for gauge in memory_gauges(root)]


def known_memory() -> list[Memory]:
    """Return the memory of the host, if known, and of each of this process's cgroups that has a limit."""
    return [memory for memory in (host_memory(), *cgroup_memory()) if memory.limit_bytes]


def unreadable(root: str = "/") -> str:
    """Return the path of a file about memory limits or usage that exists but can't be read; empty if there is none."""
    names = {name for limits, used, _ in _MEMORY_FILES for name in (*limits, used, "memory.stat")}
    paths = [os.path.join(root, "proc", name) for name in ("meminfo", "self/cgroup", "self/mountinfo")]
    paths += [os.path.join(folder, name) for folder in folders("memory", root) for name in sorted(names)]
    for path in paths:
        try:
            with open(path) as file:
                file.read(1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return path
    return ""


def count_oom_kills(root: str = "/") -> int:
    """Return how many processes the OOM killer has killed in this cgroup or, without a cgroup, on the host."""
    for folder in folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (number := read_numbers(folder, name).get("oom_kill")) is not None:
                return number
    return read_numbers(root, "proc/vmstat").get("oom_kill", 0)


def cpu_throttling(root: str = "/") -> tuple[int, int]:
    """Return the number of periods of the CPU quota of this process's cgroup, and in how many the quota ran out."""
    for folder in folders("cpu", root):
        if "nr_periods" in (numbers := read_numbers(folder, "cpu.stat")):
            return numbers["nr_periods"], numbers.get("nr_throttled", 0)
    return 0, 0


def read_numbers(folder: str, name: str) -> dict[str, int]:
    """Return the numbers, by name, in a file with a name and a number on each line; empty if the file can't be read."""
    pairs = (line.split() for line in read(folder, name).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(folder: str, name: str) -> int | None:
    text = read(folder, name).strip()
    return int(text) if text.isdigit() else None


def read(folder: str, name: str) -> str:
    """Return the text of a file; empty if the file can't be read."""
    with contextlib.suppress(OSError), open(os.path.join(folder, name)) as file:
        return file.read()
    return ""
