"""Hosts out of namespaces: joined as by lines of that rate and length, to be cut and killed, and leaving nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.namespaces import hosts

pytestmark = pytest.mark.usefixtures("needs_hosts")
_PEER = """
import socket, sys, time
who, address, what = sys.argv[1:]
if who == "server":
    with socket.create_server((address, 5000)) as listener:
        print("listening", flush=True)
        peer = listener.accept()[0]
else:
    peer = socket.create_connection((address, 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""
_ECHO = """
while data := peer.recv(1 << 16):
    peer.sendall(data)
"""
_ROUND_TRIP = """
times = []
for _ in range(10):
    begin = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    times.append(time.perf_counter() - begin)
print(sorted(times)[2])
"""
_STREAM = """
num_bytes = int(what)
begin = time.perf_counter()
peer.sendall(bytes(num_bytes))
while num_bytes:
    num_bytes -= len(peer.recv(1 << 16))
print(time.perf_counter() - begin)
"""
_SWALLOW_AND_GIVE_BACK = """
num_bytes = left = int(what)
while left:
    left -= len(peer.recv(1 << 16))
peer.sendall(bytes(num_bytes))
peer.recv(1)
"""
_TICK = """
for number in range(10**6):
    peer.sendall(b"x")
    time.sleep(0.01)
"""
_TELL = """
while True:
    try:
        data = peer.recv(1 << 16)
    except OSError as error:
        data = type(error).__name__.encode()
        print("ended", data, flush=True)
        break
    print("got" if data else "ended", flush=True)
    if not data:
        break
"""


def _start(host, who, address, code, what=""):
    return host.start(
        [sys.executable, "-c", _PEER + code, who, address, str(what)], stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _pair(a, b, server_code, client_code, what=""):
    """Return the processes of a connection from b to a."""
    server = _start(a, "server", a.address, server_code, what)
    assert server.stdout.readline() == "listening\n"
    return server, _start(b, "client", a.address, client_code, what)


def _seconds(a, b, server_code, client_code, what=""):
    server, client = _pair(a, b, server_code, client_code, what)
    with server, client:
        return float(client.communicate(timeout=60)[0])


def _line(process, timeout_s):
    """Return the next line that a process prints, or "" if it prints none in that time."""
    return process.stdout.readline() if select.select([process.stdout], [], [], timeout_s)[0] else ""


def test_each_host_has_a_name_an_address_and_a_loopback():
    with hosts(3) as made:
        assert [host.name for host in made] == ["host-a", "host-b", "host-c"]
        for host in made:
            assert host.run("hostname").strip() == host.name
            (interface,) = json.loads(host.run("ip", "-json", "address", "show", host.interface))
            assert host.address in [info["local"] for info in interface["addr_info"]]
            assert interface["mtu"] == 1500
            assert _seconds(host, host, _ECHO, _ROUND_TRIP) < 1
        assert len({host.address for host in made}) == 3
        for here in made:
            for there in made:
                assert _seconds(here, there, _ECHO, _ROUND_TRIP) < 1
    assert os.uname().nodename not in {"host-a", "host-b", "host-c"}


def test_programs_get_this_environment_and_more(monkeypatch):
    monkeypatch.setenv("PATCHED", "here")
    with hosts(1) as (a,):
        command = [sys.executable, "-c", "import os; print(os.environ['PATCHED'], os.environ['GIVEN'], os.getpid())"]
        process = a.start(command, {"GIVEN": "yes"}, stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=30)[0].split() == ["here", "yes", str(process.pid)]


def test_a_round_trip_takes_twice_the_delay():
    with hosts(2, delay_ms=20) as (a, b):
        assert 0.039 < _seconds(a, b, _ECHO, _ROUND_TRIP) < 0.06


def test_a_stream_gets_the_rate_each_way_and_no_more():
    num_bytes = 5_000_000
    with hosts(2, rate="200mbit") as (a, b):
        there_and_back_s = _seconds(a, b, _SWALLOW_AND_GIVE_BACK, _STREAM, num_bytes)
    assert 120e6 < 2 * num_bytes * 8 / there_and_back_s < 205e6


def test_a_small_message_takes_its_time_on_a_slow_line_too():
    with hosts(2, rate="100kbit") as (a, b):
        # 79 bytes with all headers, and as many back: no burst is for free.
        assert 0.008 < _seconds(a, b, _ECHO, _ROUND_TRIP) < 0.1


def test_a_cut_host_is_silent_and_comes_back():
    with hosts(2, delay_ms=1) as (a, b):
        server, client = _pair(a, b, _TELL, _TICK)
        with server, client:
            assert _line(server, 10) == "got\n"
            b.cut()
            deadline = time.monotonic() + 10
            while _line(server, 0.5):  # what was on its way, or printed before
                assert time.monotonic() < deadline
            assert _line(server, 1) == ""
            assert client.poll() is None
            b.mend()
            assert _line(server, 10) == "got\n"
            a.kill()
            b.kill()


_KNOCK = """
import os, socket, sys
with socket.socket() as end:
    end.settimeout(1)
    print(os.strerror(end.connect_ex((sys.argv[1], 9))))
"""


def _reaches(host, peer):
    """Whether what `host` sends reaches `peer`, whose system then refuses."""
    return host.run(sys.executable, "-c", _KNOCK, peer.address) == "Connection refused\n"


def test_a_muted_host_reaches_all_others_but_that_one():
    with hosts(3) as (a, b, c):
        a.mute(b)
        assert not _reaches(a, b)
        assert _reaches(a, c)
        a.unmute(b)
        assert _reaches(a, b)


def test_what_a_stalled_host_is_sent_comes_late_and_in_full():
    with hosts(2, delay_ms=1) as (a, b):
        b.stall()
        assert not _reaches(b, a)  # the answer waits
        b.resume()
        assert _reaches(b, a)


def test_a_killed_host_closes_its_connections():
    with hosts(2) as (a, b):
        server, client = _pair(a, b, _TELL, _TICK)
        with server, client:
            assert _line(server, 10) == "got\n"
            b.kill()
            lines = server.communicate(timeout=10)[0]
            assert "ended" in lines
            assert client.wait(10) == -signal.SIGKILL
            assert server.returncode == 0  # of the other host
        assert b.run("hostname").strip() == "host-b"


def _gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_leaving_the_block_ends_everything():
    before = os.listdir("/sys/class/net")
    with pytest.raises(ZeroDivisionError), hosts(2, rate="1gbit", delay_ms=1) as (a, b):
        sleeper = a.start(["sleep", "1000"])
        pids = [a.pid, b.pid, sleeper.pid]
        assert os.readlink(f"/proc/{a.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        raise ZeroDivisionError
    assert all(map(_gone, pids))
    assert os.listdir("/sys/class/net") == before


def test_a_killed_parent_takes_its_hosts_along():
    script = """
        import time
        from tests.namespaces import hosts
        with hosts(2, rate="1gbit") as (a, b):
            print(a.pid, b.pid, a.start(["sleep", "1000"]).pid, flush=True)
            time.sleep(1000)
        """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    with parent:
        pidfds = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(pidfds) == 3
        parent.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 10)[0], "a process of a host outlived its parent"
        os.close(pidfd)


def test_two_sets_of_hosts_do_not_meet():
    with hosts(1) as (first,), hosts(1) as (second,):
        assert first.address == second.address
        assert os.readlink(f"/proc/{first.pid}/ns/net") != os.readlink(f"/proc/{second.pid}/ns/net")


def test_a_program_that_fails_in_a_host_is_named_with_its_message():
    with hosts(1) as (a,), pytest.raises(OSError, match=r"ip link show nothing on host-a: .*nothing"):
        a.run("ip", "link", "show", "nothing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), r"num_hosts must lie in \[1, 26\], got 0"), ((2, "fast"), "rate must be a number with .*, got 'fast'")],
)
def test_a_wrong_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message), hosts(*arguments):
        pass
