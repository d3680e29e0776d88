"""Ports of the launcher: who has one, when several come at once."""

from __future__ import annotations

import errno
import socket

import pytest

from phalanx.host import ports
from tests.ports import free_port


def test_of_two_that_come_at_once_one_gets_the_port():
    port = int(free_port())
    with ports.bound_socket(port) as late:  # has been bound before the other listens, as SO_REUSEADDR allows
        with ports.open_listener(port), pytest.raises(OSError, match="in use") as refused:
            late.listen()
        assert refused.value.errno == errno.EADDRINUSE
    with ports.open_listener(port), pytest.raises(OSError, match="in use"):
        ports.open_listener(port)


def test_a_listener_is_open_at_once_for_both_families():
    with ports.open_listener(0) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        if listener.family == socket.AF_INET6:
            socket.create_connection(("::1", listener.getsockname()[1])).close()


@pytest.mark.parametrize("missing", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_host_without_ipv6_listens_all_the_same(monkeypatch, missing):
    bound = ports._bound

    def without_ipv6(family, address):
        if family == socket.AF_INET6:
            raise OSError(missing, "no IPv6")
        return bound(family, address)

    monkeypatch.setattr(ports, "_bound", without_ipv6)
    with ports.open_listener(0) as listener:
        assert listener.family == socket.AF_INET
