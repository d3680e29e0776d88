"""Rates the hosts of a job together: versions, links, clocks and Gloo. All functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._text import in_units, measured, named
from phalanx.doctor.exercise import ABANDONED, SIZE_BYTES
from phalanx.doctor.finding import Finding, note, ok, problem, warning

_CLOCK_NOTE_S, _CLOCK_WARNING_S = 0.1, 2.0
_SLOW_LINK_BYTES_PER_S = 0.1e9  # below this rate, a link is slower than Ethernet at 1 Gbit/s usually is
_STRAGGLER = 0.5  # a link below this fraction of the median of all links is a straggler
_COMPARED = ("torch", "phalanx", "python")


def compare_versions(hosts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Find software whose version differs between hosts."""
    findings = []
    for name in _COMPARED:
        by_version: dict[str, list[int]] = {}
        for host in hosts:
            by_version.setdefault(host["versions"].get(name, "none"), []).append(host["host"])
        if len(by_version) == 1:
            continue
        said = "; ".join(f"{version} on {named('host', ranks)}" for version, ranks in by_version.items())
        minor = {".".join(version.split(".")[:2]) for version in by_version}
        is_patch = name == "python" and len(minor) == 1
        todo = "the same environment on all hosts: a shared folder, one container image, or one lock file"
        level = note if is_patch else problem
        findings.append(level("versions", f"{name} differs: {said}", todo, **{name: by_version}))
    same = ", ".join(f"{name} {hosts[0]['versions'].get(name, 'none')}" for name in _COMPARED)
    return findings or [ok("versions", f"the same on all: {same}")]


def judge(hosts: Sequence[Mapping[str, Any]], measured: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Rate the links between the hosts, and Gloo over all of them.

    Args:
        hosts: Facts of the hosts, in the order of their ranks.
        measured: Measurements of each host, by its rank: ``links`` by the other host's rank, and ``gloo``, a list of
            attempts. Hosts that did not finish are missing.
    """
    silent = [host["host"] for host in hosts if host["host"] not in measured]
    findings = []
    if silent:
        todo = "see what phalanx doctor says there"
        findings.append(problem("meeting", f"{named('host', silent)} came and did not finish", todo, silent=silent))
    links = {
        (rank, int(other)): link for rank, told in measured.items() for other, link in told.get("links", {}).items()
    }
    findings += _judge_reach(hosts, links)
    findings += _judge_clocks(links)
    return [*findings, *_judge_gloo({rank: told.get("gloo", []) for rank, told in measured.items()})]


def _judge_reach(
    hosts: Sequence[Mapping[str, Any]], links: Mapping[tuple[int, int], Mapping[str, Any]]
) -> list[Finding]:
    at = {host["host"]: f"{host['address']}:{host['port']}" for host in hosts}
    findings = []
    for (here, there), link in links.items():
        if "error" in link:
            found = f"host {here} can't reach host {there} at {at[there]}: {link['error']}"
            findings.append(problem("reach", found, link["todo"], **{"from": here, "to": there}))
        elif "stream_error" in link:
            found = (
                f"from host {here} to host {there} small messages pass and a stream does not: {link['stream_error']}"
            )
            todo = "the MTU may be larger than the path takes: ping -M do -s 1472, ip link set mtu"
            findings.append(problem("reach", found, todo, **{"from": here, "to": there}))
    trips = {pair: link["round_trip_s"] for pair, link in links.items() if "round_trip_s" in link}
    if trips:
        slowest = max(trips, key=lambda pair: trips[pair])
        found = f"{len(trips)} ways tried; a message there and back in {measured(min(trips.values()))}"
        if len(trips) > 1:
            found += f" to {measured(trips[slowest])} ({_way(slowest)})"
        facts = [{"from": here, "to": there, **links[here, there]} for here, there in trips]
        findings.append(ok("reach", found, links=facts))
    return [*findings, *_judge_streams({p: one["bytes_per_s"] for p, one in links.items() if "bytes_per_s" in one})]


def _judge_streams(streams: Mapping[tuple[int, int], float]) -> list[Finding]:
    if not streams:
        return []
    slowest = min(streams, key=lambda pair: streams[pair])
    least, middle = streams[slowest], statistics.median(streams.values())
    facts = {"least_bytes_per_s": least, "median_bytes_per_s": middle}
    found = f"{_rate(middle)} over one connection"
    if len(streams) > 1:
        found += f" (median of {len(streams)} ways), {_rate(least)} at least ({_way(slowest)})"
    if least < _STRAGGLER * middle and len(streams) > 2:
        todo = "cable, port, negotiated speed (ethtool), or other traffic there: every all_reduce waits for the slowest"
        return [warning("bandwidth", f"{_way(slowest)} is a straggler: {found}", todo, **facts)]
    if least < _SLOW_LINK_BYTES_PER_S:
        todo = "see that it is the interface meant (GLOO_SOCKET_IFNAME), and its speed (ethtool)"
        per_step = measured(2 * 100e6 / max(least, 1.0))
        text = f"{found}: averaging 100 MB of gradients takes some {per_step} a step"
        return [warning("bandwidth", text, todo, **facts)]
    return [ok("bandwidth", found, **facts)]


def _judge_clocks(links: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[Finding]:
    """Compare every host's wall clock with host 0's, as measured over the link between the two hosts."""
    ahead = {here: -link["clock_ahead_s"] for (here, to), link in links.items() if to == 0 and "clock_ahead_s" in link}
    ahead |= {
        to: link["clock_ahead_s"]
        for (here, to), link in links.items()
        if here == 0 and to not in ahead and "clock_ahead_s" in link
    }
    if not ahead:
        return []
    values = [0.0, *ahead.values()]
    apart_s = max(values) - min(values)
    farthest = max(ahead, key=lambda rank: abs(ahead[rank]))
    found = f"the hosts' wall clocks are {measured(apart_s)} apart"
    facts = {"ahead_of_host_0_s": {str(rank): value for rank, value in ahead.items()}}
    if apart_s < _CLOCK_NOTE_S:
        return [ok("clocks", found, **facts)]
    side = "ahead of" if ahead[farthest] > 0 else "behind"
    found += f"; host {farthest} is {measured(abs(ahead[farthest]))} {side} host 0"
    todo = "chronyd or ntpd on all hosts: logs can't be put in order, and files seem older or newer than they are"
    return [(warning if apart_s >= _CLOCK_WARNING_S else note)("clocks", found, todo, **facts)]


def _judge_gloo(tries: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Rate Gloo over all hosts: the try as configured and, if it failed, the try over the interface towards host 0."""
    num = max((len(of_host) for of_host in tries.values()), default=0)
    if not num:
        return []
    attempts = [{rank: of_host[i] for rank, of_host in tries.items() if len(of_host) > i} for i in range(num)]
    failed = [{rank: one["error"] for rank, one in attempt.items() if "error" in one} for attempt in attempts]
    last = attempts[-1]
    if not failed[-1]:
        seconds = max(one["seconds"] for one in last.values())
        what = f"gloo: {in_units(SIZE_BYTES)} over {len(last)} hosts in {measured(seconds)}"
        facts = {"engine": "gloo", "num_hosts": len(last), "size_bytes": SIZE_BYTES, "seconds": seconds}
        if num == 1:
            return [ok("all_reduce", what, **facts)]
        chosen = {rank: one["interface"] for rank, one in sorted(last.items())}
        names = ", ".join(f"{name} on host {rank}" for rank, name in chosen.items())
        if len(set(chosen.values())) == 1:
            names = f"{next(iter(chosen.values()))} on all"
        how = f"GLOO_SOCKET_IFNAME={names}"
        why = _first(failed[0])
        found = f"Gloo can't connect the hosts as configured ({why}), but can over the interface towards host 0"
        return [
            problem("all_reduce", found, f"{how}, or fix what each host's own name resolves to", **facts),
            ok("all_reduce", what, **facts),
        ]
    todo = "see reach, own name and network above; then the same phalanx doctor again"
    return [problem("all_reduce", f"Gloo does not connect the hosts: {_first(failed[-1])}", todo)]


def _first(errors: Mapping[int, str]) -> str:
    rank = min(errors, key=lambda rank: (errors[rank] == ABANDONED, rank))
    return f"host {rank}: {errors[rank]}"


def _way(pair: tuple[int, int]) -> str:
    return f"host {pair[0]} to host {pair[1]}"


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
