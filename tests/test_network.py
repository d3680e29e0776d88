"""Which interface leads to another host. The interfaces are real: cables in a network namespace of the test's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from phalanx.host.network import NetworkError, interface_towards, interfaces, is_loopback

_PROBE = """
import json, sys
from phalanx.host.network import *
answers = [interfaces()]
for host in sys.argv[1:]:
    try:
        answers.append(interface_towards(host, 29500))
    except NetworkError as error:
        answers.append([error.kind, str(error)])
print(json.dumps(answers))
"""


def why_no_namespace():
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "ip (iproute2) and unshare (util-linux) are needed"
    done = subprocess.run(["unshare", "-rn", "true"], capture_output=True, text=True, timeout=20)
    return f"no network namespace can be made here: {done.stderr.strip()}" if done.returncode else ""


needs_namespace = pytest.mark.skipif(bool(why_no_namespace()), reason=why_no_namespace() or "-")


def in_namespace(setup, *hosts):
    """Return what `interfaces` and `interface_towards` say where the links of `setup` are all that there is."""
    script = "\n".join(["set -e", "ip link set lo up", *setup, 'exec "$@"'])
    command = ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, "-c", _PROBE, *hosts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def link(name, *addresses, up=True):
    """Return the commands that make one end of a cable with these addresses; the other end is plugged in."""
    lines = [f"ip link add {name} type veth peer name {name}-p", f"ip link set {name}-p up"]
    lines += [f"ip addr add {address} dev {name}{' nodad' * (':' in address)}" for address in addresses]
    return [*lines, *[f"ip link set {name} up"] * up]


@needs_namespace
def test_the_route_decides_among_several_interfaces():
    setup = [*link("front", "10.1.0.5/16"), *link("back", "10.2.0.5/16", "fd12::5/64")]
    _, front, back, back6, own = in_namespace(setup, "10.1.0.9", "10.2.0.9", "fd12::9", "10.2.0.5")
    assert front[:2] == ["front", "10.1.0.5"]
    assert back[:2] == ["back", "10.2.0.5"]
    assert back6[:2] == ["back", "fd12::5"]
    assert own[:2] == ["back", "10.2.0.5"]  # the host itself, by an address that others reach


@needs_namespace
def test_a_second_address_of_an_interface_is_found_too():
    setup = [*link("net0", "10.1.0.5/16"), "ip addr add 10.3.0.5/16 dev net0 label net0:1"]
    _, towards = in_namespace(setup, "10.3.0.9")
    assert towards[:2] == ["net0", "10.3.0.5"]


@needs_namespace
def test_interfaces_tell_what_is_up_and_what_has_no_address():
    setup = [*link("on", "10.1.0.5/16"), *link("off", "10.2.0.5/16", up=False), *link("bare", up=False)]
    (found,) = in_namespace(setup)
    told = {(name, address): (is_up, is_loop) for name, address, is_up, is_loop in found}
    assert told[("lo", "127.0.0.1")] == told[("lo", "::1")] == (True, True)
    assert told[("on", "10.1.0.5")] == (True, False)
    assert told[("off", "10.2.0.5")] == (False, False)
    assert told[("bare", "")] == (False, False)


@needs_namespace
def test_no_route_is_said():
    _, (kind, message) = in_namespace(link("net0", "10.1.0.5/16"), "10.9.0.1")
    assert kind == "route"
    assert "no route to 10.9.0.1 (Network is unreachable)" in message


@needs_namespace
def test_loopback_is_refused_with_the_address_to_use_instead():
    _, (kind, message), (kind6, _) = in_namespace(link("net0", "10.1.0.5/16"), "127.0.1.1", "::1")
    assert kind == kind6 == "loopback"
    assert "127.0.1.1 is this host's loopback" in message
    assert "use 10.1.0.5" in message


def test_loopback_is_allowed_on_one_host():
    found = interface_towards("127.0.0.1", 29500, allow_loopback=True)
    assert found.is_loopback
    assert found in interfaces()


def test_a_name_that_does_not_resolve_is_said():
    with pytest.raises(NetworkError, match=r"the name 'host\.invalid' does not resolve here") as caught:
        interface_towards("host.invalid")
    assert (caught.value.kind, caught.value.host) == ("name", "host.invalid")


@pytest.mark.parametrize(
    ("address", "is_it"),
    [("127.0.1.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_addresses_of_loopback_are_known(address, is_it):
    assert is_loopback(address) is is_it
