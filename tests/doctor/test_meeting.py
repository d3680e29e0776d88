"""Hosts that meet, and hosts that do not: two network namespaces, in each a process that takes its host's part."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import subprocess

import pytest

from phalanx.doctor.examination import HostRole
from phalanx.doctor.finding import Finding, problem
from tests.clusters._machines import machines

pytestmark = pytest.mark.usefixtures("needs_hosts")
VERSIONS = {"torch": "2.15.0", "phalanx": "0.1.0", "python": "3.11.7"}


CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18  # linux/sched.h, linux/mount.h


def enter(pid, etc_hosts):
    """Move this process into a host, whose names are in the file."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(status):
        assert status == 0, os.strerror(ctypes.get_errno())

    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            must(libc.setns(namespace.fileno(), 0))
    must(libc.unshare(CLONE_NEWNS))
    must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    must(libc.mount(os.fsencode(etc_hosts), b"/etc/hosts", None, MS_BIND, None))


def take_part(rank, world_size, pids, etc_hosts, places, own_findings):
    """Enter the host of this rank and return every packet that its part in the meeting sends."""
    enter(pids[rank], etc_hosts[rank])
    from phalanx.doctor.hosts.hosts import hold

    packets = []
    facts = {"name": socket.gethostname(), "versions": VERSIONS}
    hold(places[rank], {"facts": facts, "findings": own_findings[rank]}, packets.append)
    return packets


@pytest.fixture
def meet(run_ranks, tmp_path):
    """Return a function that holds a meeting of two hosts and returns, by rank, findings and last packet."""
    with machines(tmp_path) as made:
        hosts = made.hosts

        def hold(*, places=({}, {}), names=None, prepare=lambda a, b: None, findings=((), ()), timeout_s=15.0):
            for number, host in enumerate(hosts):
                made.know(number, names(host) if names else {host.name: host.address})
            prepare(*hosts)
            given = []
            for rank, (host, changes) in enumerate(zip(hosts, places, strict=True)):
                place = HostRole(
                    num_hosts=2,
                    least_hosts=2,
                    node_rank=rank,
                    serves=rank == 0,
                    master_addr=hosts[0].address,
                    master_port=29500,
                    timeout_s=timeout_s,
                    interface="eth0",
                    address=host.address,
                )
                given.append({**dataclasses.asdict(place), **changes})
            own = [[finding.as_dict() for finding in of_host] for of_host in findings]
            pids = [host.pid for host in hosts]
            files = [str(made.etc_hosts(number)) for number in range(2)]
            told = run_ranks(take_part, 2, pids, files, given, own, backend=None, init=False, timeout_s=90)
            return [([Finding(**p["finding"]) for p in packets if "finding" in p], packets[-1]) for packets in told]

        yield hold


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def test_hosts_that_meet_are_measured_and_the_first_tells(meet):
    (first, end), (second, other_end) = meet()
    assert {finding.topic: finding.level for finding in first} == dict.fromkeys(
        ("versions", "reach", "bandwidth", "clocks", "all_reduce"), "ok"
    )
    assert second == []
    assert end["job"] == other_end["job"] == "ok"
    assert [host["name"] for host in end["hosts"]] == ["host-a", "host-b"]
    links = by_topic(first)["reach"].facts["links"]
    assert [(link["from"], link["to"]) for link in links] == [(0, 1), (1, 0)]
    assert all(0 < link["round_trip_s"] < 1 and link["bytes_per_s"] > 1e6 for link in links)
    assert by_topic(first)["all_reduce"].facts["num_hosts"] == 2


def test_what_one_host_found_the_first_tells_too(meet):
    (first, end), (_, other_end) = meet(findings=((), (problem("memory", "none left", "buy"),)))
    assert (first[0].topic, first[0].host) == ("memory", 1)
    assert end["job"] == other_end["job"] == "problem"


def test_a_name_that_leads_to_loopback_breaks_gloo_and_the_cure_is_tried(meet):
    findings = meet(names=lambda host: {host.name: "127.0.1.1"})[0][0]  # as Debian does
    broken, cured = [finding for finding in findings if finding.topic == "all_reduce"]
    assert broken.level == "problem"
    assert "127.0.1.1" in broken.found
    assert "GLOO_SOCKET_IFNAME=eth0 on all" in broken.todo
    assert cured.level == "ok"


def test_ports_that_a_firewall_drops_are_told_with_both_ends(meet):
    def open_the_masters_port_only(first, second):
        first.run("sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40999")
        second.run("sysctl", "-qw", "net.ipv4.ip_local_port_range=50000 50999")
        second.run("ip", "rule", "add", "pref", "10", "lookup", "local")
        second.run("ip", "rule", "del", "pref", "0")
        ports = ["ipproto", "tcp", "sport", "40000-40999", "dport", "50000-50999"]
        second.run("ip", "rule", "add", "pref", "5", "iif", "eth0", *ports, "blackhole")

    findings, end = meet(prepare=open_the_masters_port_only)[0]
    closed = [finding for finding in findings if finding.level == "problem"]
    assert end["job"] == "problem"
    assert [(finding.facts["from"], finding.facts["to"]) for finding in closed] == [(0, 1), (1, 0)]
    assert all("no answer (timeout)" in finding.found and "firewall" in finding.todo for finding in closed)
    assert "all_reduce" not in by_topic(findings)  # Gloo would only fail after a while


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"master_port": 29501}, "29501 was not reached within 1 s: connection refused"),
        ({"master_addr": "10.99.0.1"}, "no route (Network is unreachable)"),
        ({"master_addr": "nobody.invalid"}, "the name does not resolve"),
    ],
)
def test_a_host_that_does_not_reach_the_first_says_why_and_the_first_says_who_is_missing(meet, changes, said):
    (first, end), (second, other_end) = meet(places=({}, changes), timeout_s=1.0)
    assert said in second[0].found
    assert second[0].todo
    assert "host 1 did not come to 10.77.0.1:29500 within 1 s" in by_topic(first)["meeting"].found
    assert end["job"] == other_end["job"] == "problem"


def test_packets_that_nobody_answers_are_a_timeout(meet):
    def lead_nowhere(first, second):
        second.run("ip", "neigh", "add", "10.77.0.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")

    second = meet(places=({}, {"master_addr": "10.77.0.77"}), prepare=lead_nowhere, timeout_s=1.0)[1][0]
    assert "no answer (timeout)" in second[0].found
    assert "firewall" in second[0].todo


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_rank": 0}, "node rank 0 was given to several hosts, host-b among them"),
        ({"num_hosts": 3}, "host-b was started with --nnodes 3, and host 0 with 2"),
    ],
)
def test_flags_that_contradict_each_other_are_told_on_both_hosts(meet, changes, said):
    (first, _), (second, _) = meet(places=({}, changes), timeout_s=2.0)
    assert said in second[0].found
    assert said in first[0].found


def test_hosts_without_ranks_get_them_as_they_come_and_not_all_need_come(meet):
    counted = {"is_counted": True, "num_hosts": 3, "least_hosts": 1}
    (first, end), (_, other_end) = meet(places=(counted, counted), timeout_s=3.0)
    assert (end["rank"], other_end["rank"]) == (0, 1)
    assert "meeting" not in by_topic(first)
    assert end["job"] == "ok"


def test_a_port_that_is_taken_is_refused_with_its_owner(meet, tmp_path):
    def occupy(first, second):
        program = "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True); time.sleep(60)"
        occupied.append(first.start(["python3", "-c", program], stdout=subprocess.PIPE, text=True))
        assert occupied[0].stdout.readline() == "1\n"

    occupied = []
    try:
        (first, _), (second, _) = meet(prepare=occupy, timeout_s=1.0)
    finally:
        occupied[0].kill()
        occupied[0].communicate()
    assert "port 29500 is taken by pid" in first[0].found
    assert "is not the doctor of host 0" in second[0].found
