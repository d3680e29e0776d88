"""Runs all tests of one host in order, each with a deadline; then meets the other hosts of the job."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx._env import REPLACE_VARIABLE
from phalanx.doctor import engines, limits, network, processors
from phalanx.doctor.deadline import UnansweredError, within
from phalanx.doctor.finding import LEVELS, Finding, warning, worst
from phalanx.doctor.torch_process import Say, TorchProcess
from phalanx.host.cpus import count_gpus, read_machine
from phalanx.host.network import Interface, interfaces
from phalanx.host.processes import count_threads

_TEST_S = 5.0  # time limit of one test of the host
_MPI_S = 8.0
# added to the time for which hosts wait for each other; the meeting has shorter deadlines of its own
_MEETING_SLACK_S = 90.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRole:
    """This host's role in the job.

    Attributes:
        num_hosts: Number of hosts in the job; with ``--nnodes MIN:MAX``, the maximum.
        least_hosts: Number of hosts with which the job can begin.
        node_rank: Number of this host; meaningless before the meeting if `is_counted`.
        is_counted: Whether node ranks are assigned in the order in which hosts arrive (c10d).
        serves: Whether this is host 0, to which the other hosts connect.
        master_addr: Host or address of host 0.
        master_port: Port on which host 0 listens.
        timeout_s: Seconds that hosts wait for each other.
        num_local_ranks: Number of ranks that the job would start here.
        tries_engines: Whether to run an all_reduce with each engine on local ranks.
        interface: Network interface towards the master; empty if none was found.
        address: Address of this host on that interface.
    """

    num_hosts: int = 1
    least_hosts: int = 1
    node_rank: int = 0
    is_counted: bool = False
    serves: bool = True
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    timeout_s: float = 30.0
    num_local_ranks: int = 1
    tries_engines: bool = True
    interface: str = ""
    address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        findings: Findings of this host in the order of the tests; on host 0, followed by those of other hosts and of
            the job.
        hosts: Facts of all hosts.
        level: Worst level of the whole job, which may be worse than that of `findings`.
        role: Role of this host, with its final node rank.
        is_told_by_first: Whether host 0 prints this host's findings, so that this host does not.
        seconds: Duration of the examination.
    """

    findings: Sequence[Finding]
    hosts: Sequence[Mapping[str, Any]]
    level: str
    role: HostRole
    is_told_by_first: bool
    seconds: float


def examine(role: HostRole, environ: Mapping[str, str], say: Say) -> Diagnosis:
    """Run every test and return the diagnosis.

    Args:
        role: Role of this host.
        environ: Environment to examine.
        say: Function that prints a line about hosts that are still missing.
    """
    began_s = time.monotonic()
    if role.num_hosts > 1:
        role, on_master = _look_towards_master(role)
    else:
        on_master = []
    with TorchProcess(dataclasses.asdict(role)) as torch_process:
        findings = [*_examine_host(role, environ), *on_master]
        told = torch_process.examine()
        findings += _judge_torch(told, role, environ)
        if role.tries_engines:
            findings += _guarded("MPI", lambda: engines.examine_mpi(environ, _MPI_S), _MPI_S + _TEST_S)
        facts = {"name": socket.gethostname(), "versions": told.get("torch", {})}
        hosts: Sequence[Mapping[str, Any]] = [
            {"host": role.node_rank, **facts, "address": role.address, "interface": role.interface}
        ]
        level, from_job = "ok", []
        if role.num_hosts > 1:
            go = {"facts": facts, "findings": [finding.as_dict() for finding in findings]}
            met = torch_process.meet(go, role.timeout_s + _MEETING_SLACK_S, say)
            role = dataclasses.replace(role, node_rank=met.rank if met.rank is not None else role.node_rank)
            from_job, hosts, level = met.findings, met.hosts or hosts, met.level
    findings = [dataclasses.replace(finding, host=role.node_rank) for finding in findings]
    return Diagnosis(
        findings=[*findings, *from_job],
        hosts=hosts,
        level=max(level, worst([*findings, *from_job]), key=LEVELS.index),
        role=role,
        is_told_by_first=role.num_hosts > 1 and not role.serves and not from_job,
        seconds=time.monotonic() - began_s,
    )


def _look_towards_master(role: HostRole) -> tuple[HostRole, list[Finding]]:
    """Return the role, completed with the interface towards the master, and the findings about the master."""
    towards: list[Interface] = []

    def look() -> list[Finding]:
        rank = 0 if role.serves else 1
        findings, found = network.examine_master(role.master_addr, role.master_port, rank, role.num_hosts)
        towards.extend([found] if found else [])
        return findings

    findings = _guarded("master", look)
    if not towards:  # use any address, because the other hosts may still reach this host at it
        towards = [one for one in interfaces() if one.is_up and not one.is_loopback and one.address]
    if not towards:
        return role, findings
    return dataclasses.replace(role, interface=towards[0].name, address=towards[0].address), findings


def _examine_host(role: HostRole, environ: Mapping[str, str]) -> list[Finding]:
    """Run the tests that need no torch."""
    num_ranks, num_hosts = role.num_local_ranks, role.num_hosts
    world_size = num_ranks * num_hosts
    machine = read_machine()
    tests: dict[str, Callable[[], list[Finding]]] = {
        "memory": lambda: limits.examine_memory(num_ranks),
        "freed memory": lambda: limits.examine_freed_memory(num_ranks, environ),
        "limits": lambda: limits.examine_limits(
            num_ranks, world_size, limits.read_limits(), num_threads=count_threads(os.getuid())
        ),
        "shared memory": limits.try_shared_memory,
        "liveness": limits.try_watching,
        "/dev/shm": lambda: limits.examine_dev_shm(limits.read_dev_shm()),
        "warm start": lambda: limits.examine_warm_start(num_ranks, environ),
        "CPUs": lambda: processors.examine_cpus(machine, num_ranks, os.cpu_count()),
        "places": lambda: processors.examine_places(machine),
        "swap": limits.examine_swap,
        "network": lambda: network.examine_interfaces(environ, num_hosts),
        "own name": lambda: network.examine_own_name(environ, num_hosts),
    }
    if num_hosts == 1 and (host := environ.get("MASTER_ADDR")):
        tests["master"] = lambda: network.examine_master(host, 0, 0, 1)[0]
    return [finding for topic, test in tests.items() for finding in _guarded(topic, test)]


def _judge_torch(told: Mapping[str, Any], role: HostRole, environ: Mapping[str, str]) -> list[Finding]:
    """Rate the facts from the process that has torch."""
    versions = told.get("torch")
    findings = engines.judge_torch(versions, told["died"])
    is_there = versions is not None and "error" not in versions
    num_threads = versions["num_threads"] if versions and is_there else None
    findings += processors.examine_threads(
        read_machine(), role.num_local_ranks, environ.get("OMP_NUM_THREADS", ""), num_threads
    )
    if not versions or not is_there:
        return findings
    findings.append(engines.judge_replacement(versions, environ.get(REPLACE_VARIABLE, "")))
    findings += engines.judge_gpus(told.get("gpus", {}), versions, count_gpus(environ))
    findings += [engines.judge_engine(result) for result in told["engines"]]
    if told["died"]:
        findings.append(engines.judge_death(told["died"], told.get("begins", "")))
    return findings


def _guarded(topic: str, test: Callable[[], list[Finding]], deadline_s: float = _TEST_S) -> list[Finding]:
    """Return the findings of a test; if it hangs or raises, return a finding that says so."""
    try:
        return within(deadline_s, test)
    except UnansweredError:
        todo = "what it waits for does not answer: a name server, a file system, a driver"
        return [warning(topic, f"the test did not end within {deadline_s:g} s", todo)]
    except Exception as error:
        todo = "this is a bug in phalanx doctor: please report it"
        return [warning(topic, f"the test itself failed: {type(error).__name__}: {error}", todo)]
