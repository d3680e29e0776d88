"""Compares the CPUs, their quota and NUMA nodes with the ranks and the ranks' threads."""

from __future__ import annotations

import collections

from phalanx._text import counted
from phalanx.doctor.finding import Finding, note, ok, warning
from phalanx.host import cgroups
from phalanx.host.cpus import Machine, clock_governors, divide

_OFTEN_THROTTLED = 0.05
_FASTEST = "performance"


def examine_cpus(machine: Machine, num_ranks: int, num_online: int | None, root: str = "/") -> list[Finding]:
    """Compare the usable cores with the ranks, and describe how NUMA nodes are divided among the ranks.

    Args:
        machine: Usable part of this host.
        num_ranks: Number of ranks on this host.
        num_online: Number of CPUs in the whole host; None if unknown.
        root: Root of the file system.
    """
    findings = []
    usable = f"{machine.num_cpus} of {num_online} CPUs" if num_online not in (None, machine.num_cpus) else ""
    usable = usable or counted(machine.num_cpus, "CPU")
    found = f"{usable}, {machine.describe()}"
    facts = {
        "num_cpus": machine.num_cpus,
        "num_online": num_online,
        "num_cores": len(machine.cores),
        "quota_cpus": machine.quota_cpus,
        "num_ranks": num_ranks,
    }
    if machine.num_cores < num_ranks:
        findings.append(
            warning(
                "CPUs",
                f"{found}, for {counted(num_ranks, 'rank')}: they share cores",
                f"--nproc-per-node {machine.num_cores}, or give the container or the job more CPUs",
                **facts,
            )
        )
    else:
        findings.append(ok("CPUs", f"{found}, for {counted(num_ranks, 'rank')}", **facts))
    periods, throttled = cgroups.cpu_throttling(root)
    if periods and throttled / periods > _OFTEN_THROTTLED:
        findings.append(
            warning(
                "CPUs",
                f"the cgroup's quota has stopped its processes in {100 * throttled / periods:.0f} % of its periods",
                "fewer ranks or threads, or a larger CPU limit: a rank that is stopped holds up all the others",
                num_periods=periods,
                num_throttled=throttled,
            )
        )
    nodes = [machine.numa_nodes.count(node) for node in sorted(set(machine.numa_nodes))]
    division = divide(num_ranks, machine, pin=True)
    cores = " + ".join(map(str, nodes))
    where = f", pinned to CPUs {division.cpus}" if division.cpus else ""
    findings.append(
        ok("NUMA", f"{counted(len(nodes), 'node')} of {cores} cores; {division.note}{where}", num_nodes=len(nodes))
    )
    return findings


def examine_places(machine: Machine, root: str = "/") -> list[Finding]:
    """Report conditions that slow the ranks' CPUs: a fractional quota, shared cores, a power-saving clock.

    Args:
        machine: Usable part of this host.
        root: Root of the file system.
    """
    findings = []
    if machine.has_short_quota and machine.quota_cpus and machine.quota_cpus % 1:
        whole, num_threads = max(1, round(machine.quota_cpus)), int(machine.quota_cpus)
        effect = (
            f"{counted(num_threads, 'thread')} can't use all of it"
            if num_threads
            else "its one thread is stopped often"
        )
        findings.append(
            note(
                "quota",
                f"{machine.quota_cpus:g} CPUs: {effect}",
                f"a whole number, such as {whole} (docker run --cpus {whole}, limits.cpu)",
                quota_cpus=machine.quota_cpus,
            )
        )
    if machine.num_split_cores:
        cores = counted(machine.num_split_cores, "core")
        findings.append(
            note(
                "hyperthreads",
                f"some hardware threads of {cores} are not ours: work on them slows ours",
                "ask for whole cores (Slurm --exclusive; Kubernetes: CPU manager full-pcpus-only), or leave them idle",
                num_split_cores=machine.num_split_cores,
            )
        )
    return [*findings, _examine_clock(machine, root)]


def _examine_clock(machine: Machine, root: str) -> Finding:
    cpus = [cpu for core in machine.cores for cpu in core]
    governors = collections.Counter(clock_governors(cpus, root))
    facts = {"governors": dict(governors)}
    if not governors:
        return ok("clock", "the firmware or the hypervisor sets it", **facts)
    if set(governors) == {_FASTEST}:
        return ok("clock", f"governor {_FASTEST}", **facts)
    slow = ", ".join(f"{name or 'unreadable'} on {num}" for name, num in governors.items() if name != _FASTEST)
    found = f"governor {slow} of {counted(len(cpus), 'CPU')}: the clock may lag behind short steps"
    return note("clock", found, f"as root: cpupower frequency-set -g {_FASTEST}", **facts)


def examine_threads(machine: Machine, num_ranks: int, omp_num_threads: str, torch_threads: int | None) -> list[Finding]:
    """Compare the threads of all ranks with the CPUs.

    Args:
        machine: Usable part of this host.
        num_ranks: Number of ranks on this host.
        omp_num_threads: Value of OMP_NUM_THREADS; empty if the variable is not set.
        torch_threads: Result of ``torch.get_num_threads()`` on this host; None if unknown.
    """
    facts = {"omp_num_threads": omp_num_threads, "torch_threads": torch_threads, "num_cpus": machine.num_cpus}
    if omp_num_threads and not (omp_num_threads.isdigit() and int(omp_num_threads) > 0):
        todo = "unset OMP_NUM_THREADS, or set it to a number of at least 1"
        return [warning("threads", f"OMP_NUM_THREADS={omp_num_threads!r} is not a number of threads", todo, **facts)]
    budget = machine.num_cpus if not machine.has_short_quota else machine.num_cores
    num_all = int(omp_num_threads or 0) * num_ranks
    said = f"OMP_NUM_THREADS={omp_num_threads} in each of {counted(num_ranks, 'rank')}"
    if num_all > budget:
        return [
            warning(
                "threads",
                f"{said}, on {counted(budget, 'CPU')}",
                f"unset it, and phalanx run divides the cores; or set it to {max(1, machine.num_cores // num_ranks)}",
                **facts,
            )
        ]
    if num_all > len(machine.cores):
        return [
            note(
                "threads",
                f"{said}, on {counted(len(machine.cores), 'physical core')}: threads share a core's arithmetic",
                f"unset it, or set it to {max(1, machine.num_cores // num_ranks)}; measure which is faster",
                **facts,
            )
        ]
    if omp_num_threads:
        return [ok("threads", f"OMP_NUM_THREADS={omp_num_threads} as set", **facts)]
    each = divide(num_ranks, machine, pin=True).shares[0].num_threads
    found = f"phalanx run gives each of {counted(num_ranks, 'rank')} {counted(each, 'thread')}"
    if torch_threads is not None and torch_threads > budget:
        return [
            note(
                "threads",
                f"{found}; a plain python would take {torch_threads} on the {budget} that the quota allows",
                f"OMP_NUM_THREADS={budget} for what phalanx run does not start",
                **facts,
            )
        ]
    return [ok("threads", found, **facts)]
