"""Examines this host's interfaces and names in the way in which engines between hosts will use them."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence

from phalanx._text import measured
from phalanx.doctor.finding import Finding, note, ok, problem, warning
from phalanx.host.network import Interface, NetworkError, interface_towards, interfaces, is_loopback

_SLOW_LOOKUP_S = 1.0


def examine_interfaces(
    environ: Mapping[str, str], num_hosts: int, known: Sequence[Interface] | None = None
) -> list[Finding]:
    """List the interfaces that are up, and check the interfaces that environment variables select."""
    known = interfaces() if known is None else known
    up = [one for one in known if one.is_up and one.address and not one.is_loopback]
    facts = {"interfaces": [one._asdict() for one in known]}
    listed = ", ".join(f"{one.name} {one.address}" for one in up if not one.address.startswith("fe80:"))
    findings = []
    if up:
        findings.append(ok("network", f"up: {listed or ', '.join(one.name for one in up)}", **facts))
    elif num_hosts > 1:
        todo = "ip link, ip addr: an interface that is up and has an address, towards the other hosts"
        findings.append(problem("network", "no interface but loopback is up", todo, **facts))
    else:
        findings.append(note("network", "no interface but loopback is up: enough for one host", "", **facts))
    for variable, choose in (("GLOO_SOCKET_IFNAME", _chosen_by_gloo), ("NCCL_SOCKET_IFNAME", _chosen_by_nccl)):
        if text := environ.get(variable, ""):
            findings.append(_judge_choice(variable, text, choose(text, known), known, num_hosts))
    return findings


def _judge_choice(
    variable: str, text: str, chosen: Sequence[Interface], known: Sequence[Interface], num_hosts: int
) -> Finding:
    topic, given = "network", f"{variable}={text}"
    names = sorted({one.name for one in known if one.is_up and not one.is_loopback})
    todo = f"unset it, or name one of {', '.join(names) or 'the interfaces that come up'}"
    if not chosen:
        return problem(topic, f"{given}: there is no such interface", todo)
    if not any(one.is_up for one in chosen):
        return problem(topic, f"{given}: it is down", f"ip link set {chosen[0].name} up, or {todo}")
    if not any(one.address for one in chosen):
        return problem(topic, f"{given}: it has no address", f"ip addr add, or {todo}")
    if num_hosts > 1 and all(one.is_loopback for one in chosen):
        return problem(topic, f"{given}: loopback does not reach other hosts", todo)
    return ok(topic, f"{given}: up, {next(one.address for one in chosen if one.address)}")


def _chosen_by_gloo(text: str, known: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that GLOO_SOCKET_IFNAME selects: torch splits it at commas, and all names must exist."""
    names = text.split(",")
    if not {one.name for one in known} >= set(names):
        return []
    return [one for one in known if one.name in names]


def _chosen_by_nccl(text: str, known: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects.

    Names are prefixes, or full names after ``=``; ``^`` excludes the named interfaces.

    Source: NCCL's user guide, NCCL_SOCKET_IFNAME.
    """
    exclude = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    names = text.removeprefix("=").split(",")
    return [
        one
        for one in known
        if any(one.name == name if exact else one.name.startswith(name) for name in names) is not exclude
        and (not one.is_loopback or not exclude)
    ]


def examine_own_name(environ: Mapping[str, str], num_hosts: int, name: str | None = None) -> list[Finding]:
    """Look up this host's own name, as Gloo and MPI do to find the address that they give to other hosts."""
    name = socket.gethostname() if name is None else name
    is_chosen = bool(environ.get("GLOO_SOCKET_IFNAME"))  # if this is set, Gloo does not look the host's name up
    began_s = time.monotonic()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        todo = f"a line '<address of this host> {name}' in /etc/hosts, or GLOO_SOCKET_IFNAME=<interface>"
        text = f"this host's own name {name!r} does not resolve ({error.strerror}): Gloo falls back to loopback"
        level = warning if num_hosts > 1 and not is_chosen else note
        return [level("own name", text, todo, name=name)]
    took_s = time.monotonic() - began_s
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    facts = {"name": name, "addresses": addresses, "seconds": took_s}
    findings = []
    if took_s > _SLOW_LOOKUP_S:
        todo = f"a line '{addresses[0]} {name}' in /etc/hosts, or working name servers in /etc/resolv.conf"
        findings.append(warning("own name", f"looking {name!r} up took {measured(took_s)}", todo, **facts))
    text = f"{name} is {', '.join(addresses)}"
    if not is_loopback(addresses[0]):
        return [*findings, ok("own name", text, **facts)]
    text += ", loopback: Gloo and MPI take this address, and other hosts can't reach it"
    todo = f"in /etc/hosts give {name} this host's address instead (Debian writes 127.0.1.1), or set GLOO_SOCKET_IFNAME"
    if num_hosts > 1 and not is_chosen:
        return [*findings, warning("own name", text, todo, **facts)]
    return [*findings, note("own name", text, todo if num_hosts > 1 else "", **facts)]


def examine_master(host: str, port: int, node_rank: int, num_hosts: int) -> tuple[list[Finding], Interface | None]:
    """Check to which host the master's name resolves; return findings and the interface towards that host, if any."""
    began_s = time.monotonic()
    try:
        towards = interface_towards(host, port, allow_loopback=num_hosts == 1)
    except NetworkError as error:
        found, _, todo = str(error).partition(": ")
        # Host 0's own ranks still reach each other; only the address that it gives other hosts is wrong.
        level = warning if error.kind == "loopback" and node_rank == 0 else problem
        return [level("master", found, todo or "see ip route", host=host, kind=error.kind)], None
    took_s = time.monotonic() - began_s
    facts = {"host": host, "interface": towards.name, "address": towards.address, "seconds": took_s}
    findings = []
    if took_s > _SLOW_LOOKUP_S:
        todo = f"use an address, or put {host} into /etc/hosts"
        findings.append(warning("master", f"looking {host!r} up took {measured(took_s)}", todo, **facts))
    own = {one.address for one in interfaces()}
    targets = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if node_rank == 0 and num_hosts > 1 and not targets & own:
        found = f"this is node 0, and {host} is {', '.join(sorted(targets))}, which is not an address of this host"
        todo = f"name this host ({towards.address}) on all hosts, unless the address is forwarded here"
        return [*findings, warning("master", found, todo, **facts)], towards
    return [
        *findings,
        ok("master", f"{host} is reached through {towards.name}, from {towards.address}", **facts),
    ], towards
