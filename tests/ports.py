"""Ports at which processes of a test meet."""

from __future__ import annotations

import itertools
import os
import socket

with open("/proc/sys/net/ipv4/ip_local_port_range") as _file:
    _FIRST_OF_THE_KERNEL = int(_file.read().split()[0])
_NUM_PORTS = min(12_000, _FIRST_OF_THE_KERNEL - 8_000)
_turns = itertools.count(int.from_bytes(os.urandom(4), "little"))


def free_port():
    """Return a port, as text, that nobody has, and that the kernel gives to nobody who asks for any."""
    for turn in itertools.islice(_turns, _NUM_PORTS):
        port = _FIRST_OF_THE_KERNEL - 1 - turn % _NUM_PORTS
        try:
            with socket.create_server(("", port), reuse_port=False):
                return str(port)
        except OSError:
            continue
    raise OSError(f"none of {_NUM_PORTS} ports is free")
