"""How what the hosts of a job have told is judged."""

from __future__ import annotations

import pytest

from phalanx.doctor.exercise import ABANDONED
from phalanx.doctor.hosts import job

VERSIONS = {"torch": "2.15.0", "phalanx": "0.1.0", "python": "3.11.7"}


def host(rank, **versions):
    return {"host": rank, "address": f"10.0.0.{rank}", "port": 4000, "versions": {**VERSIONS, **versions}}


def link(rate=1.2e9, trip=1e-4, ahead=0.0):
    return {"round_trip_s": trip, "clock_ahead_s": ahead, "bytes_per_s": rate}


def judge(links, gloo=None, num=2):
    measured = {rank: {"links": links.get(rank, {}), "gloo": (gloo or {}).get(rank, [])} for rank in range(num)}
    return {finding.topic: finding for finding in job.judge([host(rank) for rank in range(num)], measured)}


@pytest.mark.parametrize(
    ("other", "levels"),
    [
        ({}, ["ok"]),
        ({"torch": "2.14.0"}, ["problem"]),
        ({"python": "3.11.9"}, ["note"]),
        ({"python": "3.12.1", "phalanx": "0.2.0"}, ["problem", "problem"]),
    ],
)
def test_software_that_differs_between_hosts_is_told(other, levels):
    findings = job.compare_versions([host(0), host(1, **other), host(2)])
    assert [finding.level for finding in findings] == levels
    for name, version in other.items():
        assert any(
            f"{name} differs: {VERSIONS[name]} on hosts 0 and 2; {version} on host 1" in f.found for f in findings
        )


def test_links_that_are_well_are_ok():
    found = judge({0: {1: link()}, 1: {"0": link()}}, {0: [{"interface": "", "seconds": 0.01}]})
    assert {topic: finding.level for topic, finding in found.items()} == dict.fromkeys(
        ("reach", "bandwidth", "clocks", "all_reduce"), "ok"
    )


def test_a_way_that_is_closed_is_named_with_its_ends():
    found = judge({0: {1: {"error": "no answer (timeout)", "todo": "the firewall"}}, 1: {0: link()}})
    assert "reach" in found
    findings = job.judge([host(0), host(1)], {0: {"links": {1: {"error": "no answer", "todo": "the firewall"}}}, 1: {}})
    assert findings[0].found == "host 0 can't reach host 1 at 10.0.0.1:4000: no answer"
    assert (findings[0].level, findings[0].todo) == ("problem", "the firewall")


def test_a_host_that_fell_silent_is_named():
    findings = job.judge([host(0), host(1), host(2)], {0: {}, 1: {}})
    assert "host 2 came and did not finish" in findings[0].found


def test_a_slow_network_and_a_straggler_are_told():
    assert judge({0: {1: link(rate=2e7)}})["bandwidth"].level == "warning"
    links = {0: {1: link(), 2: link()}, 1: {0: link(), 2: link()}, 2: {0: link(rate=2e8), 1: link()}}
    finding = judge(links, num=3)["bandwidth"]
    assert finding.level == "warning"
    assert "host 2 to host 0 is a straggler" in finding.found


@pytest.mark.parametrize(("ahead", "level"), [(0.001, "ok"), (0.5, "note"), (-7.0, "warning")])
def test_wall_clocks_are_compared(ahead, level):
    finding = judge({0: {1: link(ahead=ahead)}, 1: {0: link(ahead=-ahead)}})["clocks"]
    assert finding.level == level
    if ahead == -7.0:
        assert "host 1 is 7 s behind host 0" in finding.found


def test_gloo_that_needs_an_interface_is_told_which():
    gloo = {
        0: [{"interface": "", "error": ABANDONED}, {"interface": "eth0", "seconds": 0.01}],
        1: [{"interface": "", "error": "refused"}, {"interface": "ib0", "seconds": 0.02}],
    }
    findings = job.judge([host(0), host(1)], {rank: {"gloo": tries} for rank, tries in gloo.items()})
    assert [finding.level for finding in findings] == ["problem", "ok"]
    assert "host 1: refused" in findings[0].found
    assert "GLOO_SOCKET_IFNAME=eth0 on host 0, ib0 on host 1" in findings[0].todo


def test_gloo_that_fails_in_any_case_is_a_problem():
    tries = [{"interface": "", "error": "refused"}, {"interface": "eth0", "error": "timed out"}]
    (finding,) = job.judge([host(0), host(1)], {0: {"gloo": tries}, 1: {"gloo": tries}})
    assert finding.level == "problem"
    assert "timed out" in finding.found
