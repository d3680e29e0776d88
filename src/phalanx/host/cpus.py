"""The CPUs, cores and GPUs that this process may use, and their division among ranks.

Everything is read from ``/proc``, ``/sys`` and ``/dev``: no program is run and no library is loaded. Tests build an
imitation of these folders and pass its path as `root`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import NamedTuple, TypeVar

from phalanx._ranges import share
from phalanx._text import counted, format_ranges
from phalanx.host import cgroups
from phalanx.host.cgroups import read, usable_cpus

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of the machine.

    Attributes:
        num_threads: Value of OMP_NUM_THREADS and similar variables, at least 1.
        used_threads: Number of threads that the rank will really have: `num_threads`, or the user's OMP_NUM_THREADS or
            thread count.
        cpus: Numbers of the CPUs to which the rank is pinned; empty if the rank is not pinned.
        is_crowded: Whether all ranks together have more threads than there are CPUs. If so, a thread that spins while
            it waits takes a CPU away from a thread that computes.
    """

    num_threads: int = 1
    used_threads: int = 1
    cpus: tuple[int, ...] = ()
    is_crowded: bool = False


class Division(NamedTuple):
    """Each rank's share, and a short note that says how the cores were divided and why ranks are not pinned."""

    shares: tuple[Share, ...]
    note: str

    @property
    def cpus(self) -> str:
        """The CPUs to which ranks are pinned, such as ``0-3 | 4-7``; empty if ranks are not pinned."""
        shown = [format_ranges(share.cpus) for share in self.shares if share.cpus]
        return " | ".join([*shown[:3], "...", shown[-1]] if len(shown) > 8 else shown)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The part of the machine that this process may use.

    Attributes:
        cores: CPUs of each physical core, in the order of their NUMA nodes.
        numa_nodes: NUMA node of each core.
        quota_cpus: CPU time that the cgroups allow, in CPUs; None if there is no limit.
        num_split_cores: Number of cores with a hardware thread that this process may not use.
    """

    cores: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[int, ...]
    quota_cpus: float | None = None
    num_split_cores: int = 0

    @property
    def num_cpus(self) -> int:
        return sum(map(len, self.cores))

    @property
    def has_short_quota(self) -> bool:
        """Whether the quota is less than the usable CPUs, so that other processes are meant to run on them, too."""
        return self.quota_cpus is not None and self.quota_cpus < self.num_cpus

    @property
    def num_cores(self) -> int:
        """Number of physical cores, or of whole CPUs in the quota if that is less; at least 1."""
        return max(1, min(len(self.cores), int(self.quota_cpus or len(self.cores))))

    @property
    def budget_cpus(self) -> float:
        """Number of CPUs that this process can keep busy at the same time."""
        return min(self.num_cpus, self.quota_cpus or self.num_cpus)

    def describe(self) -> str:
        quota = f", quota {self.quota_cpus:g} CPUs" if self.has_short_quota else ""
        return f"{counted(len(self.cores), 'physical core')}{quota}"


def read_machine(root: str = "/", usable: Sequence[int] | None = None) -> Machine:
    """Return the part of the machine that this process's affinity and cgroups allow.

    Args:
        usable: CPUs in the affinity mask; default: the mask of this process.
    """
    cpus = usable_cpus() if usable is None else sorted(usable)
    numa_node = _numa_nodes(root)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        siblings = read(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(tuple(_parse_cpus(siblings)) or (cpu,), []).append(cpu)
    num_split = sum(len(siblings) > len(usable_here) for siblings, usable_here in cores.items())
    ordered = sorted(cores.values(), key=lambda core: (numa_node.get(core[0], 0), core))
    return Machine(
        cores=tuple(map(tuple, ordered)),
        numa_nodes=tuple(numa_node.get(core[0], 0) for core in ordered),
        quota_cpus=_quota_cpus(root),
        num_split_cores=num_split,
    )


def _numa_nodes(root: str) -> dict[int, int]:
    """Return the NUMA node of each CPU."""
    folder = os.path.join(root, "sys/devices/system/node")
    numbers = [int(found[1]) for name in _names(folder) if (found := re.fullmatch(r"node(\d+)", name))]
    return {cpu: node for node in numbers for cpu in _parse_cpus(read(folder, f"node{node}/cpulist"))}


def _quota_cpus(root: str) -> float | None:
    """Return the lowest CPU quota of this process's cgroup (version 2 or 1) and its ancestors; None without a quota."""
    return min((quota for cgroup in cgroups.folders("cpu", root) if (quota := _quota_of(cgroup))), default=None)


def _quota_of(cgroup: str) -> float | None:
    fields = read(cgroup, "cpu.max").split() or [
        read(cgroup, "cpu.cfs_quota_us").strip(),
        read(cgroup, "cpu.cfs_period_us").strip(),
    ]
    with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or missing
        quota = int(fields[0]) / int(fields[1])
        return quota if quota > 0 else None
    return None


# ---------------------------------------------------------------- clocks and GPUs


def clock_governors(cpus: Iterable[int], root: str = "/") -> list[str]:
    """Return the governor of each CPU whose clock the kernel controls; an empty text if the governor can't be read."""
    folders = (os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq") for cpu in cpus)
    return [read(folder, "scaling_governor").strip() for folder in folders if os.path.exists(folder)]


def count_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Return how many GPUs this process may use; 0 if there is no driver."""
    num_nvidia = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in _names(os.path.join(root, "dev")))
    topology = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    num_amd = sum(read(topology, f"{node}/gpu_id").strip() not in ("", "0") for node in _names(topology))
    for there, variables in (
        (num_nvidia, ("CUDA_VISIBLE_DEVICES",)),
        (num_amd, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    ):
        if there:
            chosen = next((environ[name] for name in variables if name in environ), None)
            return there if chosen is None else _count_visible(chosen, there)
    return 0


def _count_visible(chosen: str, there: int) -> int:
    """Return how many GPUs a list such as CUDA_VISIBLE_DEVICES selects, up to the first entry that is no device."""
    count = 0
    for name in chosen.split(","):
        name = name.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= there):
            break
        count += 1
    return count


def torch_uses_gpus() -> bool:
    """Whether the installed torch is built for GPUs, judging by its files."""
    spec = _find_spec("torch")
    folder = os.path.join(os.path.dirname(spec.origin), "lib") if spec and spec.origin else ""
    return any(os.path.exists(os.path.join(folder, f"libtorch_{kind}.so")) for kind in ("cuda", "hip"))


def has_module(name: str, *folders: str) -> bool:
    """Whether a top-level module can be imported if `folders` come first on the path."""
    return PathFinder.find_spec(name, [*folders, *sys.path]) is not None or _find_spec(name) is not None


def _find_spec(name: str) -> ModuleSpec | None:
    if spec := PathFinder.find_spec(name):
        return spec
    from importlib.util import find_spec  # this also calls the finders of editable installs

    return find_spec(name)


# ---------------------------------------------------------------- sharing


def divide(num_ranks: int, machine: Machine, *, pin: bool, omp_num_threads: str = "", num_threads: int = 0) -> Division:
    """Divide the machine among `num_ranks`.

    Every rank gets the same number of threads. Each rank is pinned to whole cores of its own, within one NUMA node if
    the nodes divide evenly enough. Ranks are not pinned if there are fewer cores than ranks or fewer CPUs than threads.
    They are not pinned either if the quota is less than the CPUs: other processes then run on the same CPUs, and a
    pinned rank could not move away from them. A single rank is never pinned.

    Args:
        omp_num_threads: The user's value of OMP_NUM_THREADS, which stays in effect; empty if the user has not set it.
        num_threads: Number of threads of each rank; 0 for as many threads as the rank has cores.
    """
    given_threads = int(omp_num_threads) if omp_num_threads.isdigit() else num_threads
    parts = _divide_cores(num_ranks, machine)
    why_not = ""
    if num_ranks == 1:
        pass  # a single rank is never pinned
    elif not pin:
        why_not = ", not pinned"
    elif num_ranks > len(machine.cores):
        why_not = f", not pinned: {counted(len(machine.cores), 'core')}"
    elif machine.has_short_quota:
        why_not = f", not pinned: quota of {machine.quota_cpus:g} CPUs"
    elif given_threads > min(sum(map(len, cores)) for cores in parts):
        why_not = ", not pinned: more threads than CPUs"
    is_pinned = num_ranks > 1 and not why_not
    num_threads = num_threads or (min(map(len, parts)) if is_pinned else max(1, machine.num_cores // num_ranks))
    cpus = [tuple(sorted(cpu for core in cores for cpu in core)) if is_pinned else () for cores in parts]
    used_threads = given_threads or num_threads
    is_crowded = used_threads * num_ranks > machine.budget_cpus
    threads = f"OMP_NUM_THREADS={omp_num_threads}" if omp_num_threads else counted(num_threads, "thread")
    shares = tuple(
        Share(num_threads=num_threads, used_threads=used_threads, cpus=of_rank, is_crowded=is_crowded)
        for of_rank in cpus
    )
    return Division(shares, f"{counted(num_ranks, 'rank')} x {threads}{why_not}")


def _divide_cores(num_ranks: int, machine: Machine) -> list[Sequence[tuple[int, ...]]]:
    """Return the cores of each rank; every core belongs to one rank.

    If the number of ranks is a multiple of the number of NUMA nodes, each rank gets a part of one node; if it is a
    divisor, each rank gets whole nodes. Otherwise, or if the affinity mask leaves a node too few cores, the cores are
    divided into ranges of nearly equal length, regardless of nodes. If there are fewer cores than ranks, some ranks get
    none.
    """
    nodes = sorted(set(machine.numa_nodes))
    by_node = [[c for c, at in zip(machine.cores, machine.numa_nodes, strict=True) if at == node] for node in nodes]
    if len(nodes) % num_ranks == 0:
        return [[core for cores in some for core in cores] for some in _split(by_node, num_ranks)]
    if num_ranks % len(nodes) == 0:
        parts = [part for cores in by_node for part in _split(cores, num_ranks // len(nodes))]
        if all(parts):  # otherwise the affinity mask leaves a node too few cores
            return parts
    return _split(machine.cores, num_ranks)


def _split(items: Sequence[_Item], num_parts: int) -> list[Sequence[_Item]]:
    shares = (share(len(items), part, num_parts) for part in range(num_parts))
    return [items[of_part.start : of_part.stop] for of_part in shares]


def _parse_cpus(text: str) -> list[int]:
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []
