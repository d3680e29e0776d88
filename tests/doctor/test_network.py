"""What the doctor says of names and interfaces, and its probes between hosts, over loopback."""

from __future__ import annotations

import contextlib
import socket

import pytest

from phalanx.doctor import network
from phalanx.doctor.hosts import links
from phalanx.host.network import Interface

ETH = Interface("eth0", "10.0.0.5")
IB = Interface("ib0", "10.1.0.5")
DOWN = Interface("eth1", "10.2.0.5", is_up=False)
BARE = Interface("eth2", "")
LO = Interface("lo", "127.0.0.1", is_loopback=True)
KNOWN = (LO, ETH, IB, DOWN, BARE)


@pytest.mark.parametrize(
    ("variable", "text", "level", "said"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok", "up, 10.0.0.5"),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", "ok", "up"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "eth0,enp1", "problem", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "eth1", "problem", "it is down"),
        ("GLOO_SOCKET_IFNAME", "eth2", "problem", "no address"),
        ("GLOO_SOCKET_IFNAME", "lo", "problem", "loopback"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok", "up, 10.0.0.5"),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem", "no such interface"),
        ("NCCL_SOCKET_IFNAME", "=ib0", "ok", "up, 10.1.0.5"),
        ("NCCL_SOCKET_IFNAME", "^eth", "ok", "up, 10.1.0.5"),
        ("NCCL_SOCKET_IFNAME", "^eth,ib", "problem", "no such interface"),
    ],
)
def test_an_interface_that_the_environment_names_must_be_usable(variable, text, level, said):
    _, finding = network.examine_interfaces({variable: text}, 2, KNOWN)
    assert finding.level == level
    assert f"{variable}={text}: " in finding.found
    assert said in finding.found


@pytest.mark.parametrize(("num_hosts", "level"), [(1, "note"), (2, "problem")])
def test_loopback_alone_is_enough_for_one_host(num_hosts, level):
    (finding,) = network.examine_interfaces({}, num_hosts, (LO, DOWN))
    assert finding.level == level


@pytest.mark.parametrize(
    ("name", "environ", "num_hosts", "level", "said"),
    [
        ("localhost", {}, 1, "note", "loopback"),
        ("localhost", {}, 2, "warning", "127.0.1.1"),
        ("localhost", {"GLOO_SOCKET_IFNAME": "eth0"}, 2, "note", "loopback"),
        ("host.invalid", {}, 1, "note", "does not resolve"),
        ("host.invalid", {}, 2, "warning", "does not resolve"),
        ("10.0.0.5", {}, 2, "ok", "10.0.0.5"),
    ],
)
def test_the_hosts_own_name_is_looked_up(name, environ, num_hosts, level, said):
    finding = network.examine_own_name(environ, num_hosts, name)[-1]
    assert finding.level == level
    assert said in finding.found + finding.todo


def test_the_master_may_be_loopback_on_one_host_only():
    findings, interface = network.examine_master("127.0.0.1", 29500, 0, 1)
    assert (findings[0].level, interface.name) == ("ok", "lo")
    findings, interface = network.examine_master("127.0.0.1", 29500, 1, 2)
    assert (findings[0].level, interface) == ("problem", None)
    assert "use " in findings[0].todo
    findings, _ = network.examine_master("127.0.0.1", 29500, 0, 2)
    assert findings[0].level == "warning"  # its own ranks reach it


# ---------------------------------------------------------------- probes


@pytest.fixture
def listener():
    with contextlib.closing(links.Listener()) as listening:
        yield listening


def test_a_trip_tells_time_and_clocks(listener):
    with links.connect("127.0.0.1", listener.port, listener.token) as connection:
        trip = links.measure_trip(connection)
    assert 0 < trip.round_trip_s < 1
    assert abs(trip.clock_ahead_s) < 0.1  # it is the same clock


def test_a_stream_tells_what_goes_through(listener):
    with links.connect("127.0.0.1", listener.port, listener.token) as connection:
        assert links.measure_stream(connection, 0.1) > 1e6


def test_a_stranger_gets_no_answer(listener):
    with links.connect("127.0.0.1", listener.port, "00" * 16) as connection, pytest.raises(ConnectionError):
        links.measure_trip(connection)


def test_what_prevents_a_connection_is_said():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as refused:
        links.connect("127.0.0.1", port, "00" * 16)
    assert links.why_not(refused.value)[0] == "connection refused"
    with pytest.raises(socket.gaierror) as unknown:
        links.connect("host.invalid", 1, "00" * 16)
    assert "the name does not resolve" in links.why_not(unknown.value)[0]
    assert "firewall" in links.why_not(TimeoutError())[1]
    assert "no route" in links.why_not(OSError(113, "No route to host"))[0]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8])
def test_every_pair_has_its_turn_and_no_host_two_at_once(num):
    rounds = links.schedule(num, most=100)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(num) for b in range(num) if a != b
    ]
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    assert len(links.schedule(num)) <= 6
