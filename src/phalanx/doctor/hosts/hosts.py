"""The hosts of a job meet, probe each other and try Gloo; host 0 gathers the results.

This runs in the process that has torch. Host 0 decides which hosts take part: all hosts that have arrived are measured,
even if other hosts are missing. Every wait has a deadline. Hosts that have not arrived after ``--timeout`` seconds are
named, and the examination continues without them.

Gloo is first tried as configured, as in a job. If this fails, Gloo is tried over the interface towards host 0. If the
second try works, the network is open, and the reason for the failure is the usual one: a host's own name resolves to
loopback. If Gloo fails at once on one host, Gloo on the other hosts still waits for five times its timeout. So a host
notes its failure in the store, and the other hosts then abandon the try.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from phalanx import _env
from phalanx._text import named
from phalanx.doctor.exercise import all_reduce_by_gloo, answered, brief_error
from phalanx.doctor.finding import Finding, problem, worst
from phalanx.doctor.hosts import job, links, messages
from phalanx.doctor.hosts.bulletin import (
    PATIENCE_S,
    POLL_S,
    STAGE_S,
    NotMetError,
    Send,
    come_to_bulletin,
    open_bulletin,
)
from phalanx.wire.messages import GarbledError
from phalanx.wire.waiting import wait_until

_MOST_REFUSED = 20
_SLACK_S = 45.0  # added to the time for which other hosts wait for host 0, which may still be examining itself
_SAME_VERSION = "the same version of phalanx on all hosts, and a --master-port that no other program uses"
_SAME_FLAGS = "the same --nnodes on all hosts, and a --node-rank of its own on each"


def hold(role: dict[str, Any], go: dict[str, Any], send: Send) -> None:
    """Take part in the meeting; send each finding as a packet, then a packet with the hosts and the job's worst level.

    Args:
        role: `examination.HostRole` as a dict.
        go: Results of this host alone: ``facts``, and ``findings`` as dicts.
        send: Function that sends a packet.
    """
    examination = HostExamination(role, go, send)
    try:
        findings = examination.hold()
    except NotMetError as error:
        findings = [error.finding]
    except GarbledError as error:
        found = f"host 0 at {examination.where} sent something that this phalanx doctor does not understand: {error}"
        findings = [problem("meeting", found, _SAME_VERSION)]
    except Exception as error:  # the store is gone, because host 0, which serves it, has ended
        todo = "see what phalanx doctor says on host 0"
        findings = [problem("meeting", f"lost host 0 at {examination.where}: {brief_error(error)}", todo)]
    finally:
        examination.listener.close()
    for finding in findings:
        send({"finding": finding.as_dict()})
    send({"job": examination.level or worst(findings), "hosts": examination.hosts, "rank": examination.rank})


class HostExamination:
    """One host's part in the meeting.

    Attributes:
        rank: Node rank; with the c10d rendezvous, ranks are assigned in the order in which hosts arrive.
        where: Address at which the hosts meet.
        listener: Listener for the probes of other hosts.
        hosts: Facts of the hosts that arrived, without their findings; empty until known.
        level: Worst level of the whole job; empty until known.
    """

    def __init__(self, role: dict[str, Any], go: dict[str, Any], send: Send) -> None:
        self._role, self._go, self._send = role, go, send
        self.rank: int = role["node_rank"]
        self._num: int = role["num_hosts"]
        self.where: str = f"{role['master_addr']}:{role['master_port']}"
        self._ends_s = time.monotonic() + role["timeout_s"]
        self.listener: links.Listener = links.Listener()
        self.hosts: list[dict[str, Any]] = []
        self.level: str = ""
        self._garbled: dict[int, str] = {}  # by rank: why the facts of a host can't be read

    def hold(self) -> list[Finding]:
        """Take part in the meeting; return the findings to print on this host: on host 0, those of all hosts."""
        host, port = self._role["master_addr"], self._role["master_port"]
        if self._role["serves"]:
            self._bulletin = open_bulletin(port, self._num)
            self._introduce(self._num)
            return self._lead()
        self._bulletin, expected = come_to_bulletin(host, port, self._ends_s, self._send)
        self._introduce(expected)
        ends_s = self._ends_s + _SLACK_S
        members = self._bulletin.wait_for("members", messages.members, ends_s, "host 0 to count the hosts")
        self.hosts = self._bulletin.get("hosts", messages.hosts)
        if members != [host["host"] for host in self.hosts] or self.rank not in members:
            raise GarbledError(f"the hosts {members} are not those that it describes, or not this one")
        self._bulletin.set(f"done/{self.rank}", self._measure(members))
        self.level = self._bulletin.wait_for("level", messages.level, time.monotonic() + STAGE_S, "host 0 to judge")
        self._bulletin.add("bye")
        return []

    def _introduce(self, expected: int) -> None:
        """Publish this host's facts to the other hosts; raise NotMetError if its flags do not fit the other hosts'."""
        role, bulletin, name = self._role, self._bulletin, self._go["facts"]["name"]
        if role["is_counted"]:
            self.rank = 0 if role["serves"] else bulletin.add("counted")
        refused = ""
        if expected != self._num:
            refused = f"{name} was started with --nnodes {self._num}, and host 0 with {expected}"
        elif self.rank >= expected:
            refused = f"{name} came to a job that has {expected} hosts already"
        elif bulletin.add(f"came/{self.rank}") > 1:
            refused = f"node rank {self.rank} was given to several hosts, {name} among them"
        if refused:
            bulletin.set(f"refused/{bulletin.add('refused')}", refused)
            raise NotMetError(problem("meeting", refused, _SAME_FLAGS))
        mine = {
            **self._go["facts"],
            "host": self.rank,
            "address": role["address"],
            "interface": role["interface"],
            "port": self.listener.port,
            "token": self.listener.token,
            "findings": [{**found, "host": self.rank} for found in self._go["findings"]],
        }
        bulletin.set(f"facts/{self.rank}", mine)

    # ------------------------------------------------------------ host 0

    def _lead(self) -> list[Finding]:
        """Lead the meeting; return the findings of the other hosts, and the findings about several hosts."""
        bulletin, known = self._bulletin, self._gather()
        members = sorted(known)
        self.hosts = [{key: known[rank][key] for key in known[rank] if key != "findings"} for rank in members]
        bulletin.set("hosts", self.hosts)
        bulletin.set("members", members)
        findings = [Finding(**found) for rank in members if rank != self.rank for found in known[rank]["findings"]]
        findings += [problem("meeting", why, _SAME_VERSION) for why in self._garbled.values()]
        findings += self._judge_absence(members)
        if len(members) > 1:
            findings += job.compare_versions(self.hosts)
            measured = {0: self._measure(members)}
            ends_s = time.monotonic() + STAGE_S
            for rank in members[1:]:
                with contextlib.suppress(NotMetError, GarbledError):  # the host did not finish
                    measured[rank] = bulletin.wait_for(
                        f"done/{rank}", lambda told: messages.measured(told, members), ends_s, f"host {rank}"
                    )
            findings += job.judge(self.hosts, measured)
        self.level = worst([*findings, *(Finding(**found) for found in self._go["findings"])])
        bulletin.set("level", self.level)
        # This process serves the store, so it must not end before the other hosts have read the level.
        wait_until(
            lambda: bulletin.count("bye") >= len(members) - 1 or None, time.monotonic() + PATIENCE_S, most_s=POLL_S
        )
        return findings

    def _gather(self) -> dict[int, dict[str, Any]]:
        """Return the facts of the hosts, by rank, once all hosts have arrived or the time is up."""
        said_s = time.monotonic() + PATIENCE_S
        known: dict[int, dict[str, Any]] = {}

        def look() -> bool | None:
            nonlocal said_s
            for rank in self._missing({*known, *self._garbled}):
                if self._bulletin.has(f"facts/{rank}"):
                    self._read_facts(rank, known)
            if len(known) + len(self._garbled) == self._num:
                return True
            if time.monotonic() >= said_s:
                said_s = float("inf")
                self._send({"waiting": f"at {self.where} for {named('host', self._missing(known))}"})
            return None

        wait_until(look, self._ends_s, most_s=POLL_S)
        return known

    def _read_facts(self, rank: int, known: dict[int, dict[str, Any]]) -> None:
        try:
            told = self._bulletin.get(f"facts/{rank}", messages.facts)
            if told["host"] != rank:
                raise GarbledError(f"it claims to be host {told['host']}")
            known[rank] = told
        except GarbledError as error:
            self._garbled[rank] = f"host {rank} sent something that this phalanx doctor does not understand: {error}"

    def _missing(self, members: Collection[int]) -> list[int]:
        return [rank for rank in range(self._num) if rank not in members]

    def _judge_absence(self, members: Sequence[int]) -> list[Finding]:
        num_refused = self._bulletin.count("refused")
        refused = []
        for number in range(1, min(num_refused, self._num + _MOST_REFUSED) + 1):
            with contextlib.suppress(GarbledError):
                # The host may have increased the counter but not yet written the reason.
                if self._bulletin.has(f"refused/{number}"):
                    refused.append(self._bulletin.get(f"refused/{number}", messages.text))
        findings = [problem("meeting", why, _SAME_FLAGS) for why in refused]
        missing = self._missing({*members, *self._garbled})
        if missing and len(members) < self._role["least_hosts"]:  # fewer than MIN in --nnodes MIN:MAX
            found = f"{named('host', missing)} did not come to {self.where} within {self._role['timeout_s']:g} s"
            todo = f"start phalanx doctor there too; where it runs, it says why {self.where} is not reached"
            findings.append(problem("meeting", found, todo, missing=missing))
        return findings

    # ------------------------------------------------------------ all hosts

    def _measure(self, members: Sequence[int]) -> dict[str, Any]:
        """Measure this host's links to the other hosts, and try Gloo; return the results of both."""
        measured: dict[str, Any] = {"links": {}, "gloo": []}
        if len(members) < 2:
            return measured
        bulletin, known = self._bulletin, {host["host"]: host for host in self.hosts}
        bulletin.sync("trips", members)
        to: dict[int, dict[str, Any]] = {rank: _try_trip(known[rank]) for rank in members if rank != self.rank}
        measured["links"] = to
        for number, pairs in enumerate(links.schedule(len(members))):
            if not bulletin.sync(f"streams/{number}", members):
                break  # a host is gone
            for other in (members[receiver] for sender, receiver in pairs if members[sender] == self.rank):
                if "error" not in to[other]:
                    to[other].update(_try_stream(known[other], to[other]["round_trip_s"]))
        if any("error" in link for link in to.values()):
            bulletin.add("unreachable")
        if bulletin.sync("links", members) and not bulletin.count("unreachable"):
            measured["gloo"] = self._try_gloo(members)  # last, because it needs every link
        return measured

    def _try_gloo(self, members: Sequence[int]) -> list[dict[str, Any]]:
        """Try Gloo as configured; if this fails on any host, try it over the interface towards host 0."""
        tries: list[dict[str, Any]] = []
        for number, interface in enumerate(("", self._role["interface"])):
            if not self._bulletin.sync(f"gloo/{number}", members):
                break
            if interface:
                _env.withdraw(["GLOO_SOCKET_IFNAME"])
                _env.export({"GLOO_SOCKET_IFNAME": interface})
            failures = f"gloo-failed/{number}"
            result = self._run_gloo(number, members, failures)
            tries.append({"interface": interface, **result})
            if "error" in result:
                self._bulletin.add(failures)
            if not self._bulletin.sync(f"gloo-tried/{number}", members) or not self._bulletin.count(failures):
                break
        return tries

    def _run_gloo(self, number: int, members: Sequence[int], failures: str) -> dict[str, Any]:
        store = dist.PrefixStore(f"try-gloo/{number}", self._bulletin.raw)
        position = members.index(self.rank)
        # If Gloo fails at once on one host, Gloo on the other hosts waits for five times its timeout, unless they see
        # the failure in the store.
        return answered(
            lambda: all_reduce_by_gloo(store, position, len(members)), lambda: self._bulletin.count(failures) > 0
        )


def _try_trip(other: dict[str, Any]) -> dict[str, Any]:
    try:
        with links.connect(other["address"], other["port"], other["token"]) as connection:
            return dict(links.measure_trip(connection)._asdict())
    except OSError as error:
        why, todo = links.why_not(error)
        return {"error": why, "todo": todo}


def _try_stream(other: dict[str, Any], round_trip_s: float) -> dict[str, Any]:
    try:
        with links.connect(other["address"], other["port"], other["token"]) as connection:
            duration_s = min(max(0.3, 20 * round_trip_s), 1.0)
            return {"bytes_per_s": links.measure_stream(connection, duration_s)}
    except OSError as error:
        return {"stream_error": links.why_not(error)[0]}
