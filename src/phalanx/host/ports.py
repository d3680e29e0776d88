"""Reserves the port on which rank 0 will listen, and names the process that uses a port that is not free."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from phalanx.host.processes import command_of, open_files

_BACKLOG = 128  # connections that wait to be accepted


class ReservedPort:
    """A TCP port that this process binds without listening on it, so that no other job gets the port.

    Because this process and rank 0 both set SO_REUSEADDR, rank 0 can bind the port and listen on it although it is
    bound here. The kernel gives the port neither to a process that asks for any free port, nor to an outgoing
    connection (``inet_csk_get_port``).
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = bound_socket(port)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def port_problem(port: int, host: str = "") -> str | None:
    """Return why no process can listen on `port` here, such as which process uses it; None if one can.

    Args:
        host: Name or address of this host; empty: all its addresses.
    """
    try:
        open_listener(port, host).close()  # bind() may succeed beside a listener on some kernels, but listen() on none
    except PermissionError:
        return f"port {port} needs root"
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"{f'address {host}' if host else f'port {port}'}: {error.strerror}"
        return f"port {port} is taken by {_owner(port) or 'a process of another user'}"
    return None


def port_advice(max_nodes: int) -> str:
    """Return advice for a problem that `port_problem` has found."""
    if max_nodes > 1:
        return "use another --master-port (or --rdzv-endpoint), the same on every node"
    return "use another --master-port, or leave it out to have a free one chosen"


def bound_socket(port: int = 0) -> socket.socket:
    """Return a socket bound to `port` on all addresses, including IPv6 if this host has it; port 0 means any free port.

    Raises:
        OSError: Another process listens on the port.
    """
    try:
        return _bound(socket.AF_INET6, ("::", port))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, ("0.0.0.0", port))


def open_listener(port: int, host: str = "") -> socket.socket:
    """Return a socket that listens on `port`; port 0 means any free port.

    If two processes call this at the same time, both may bind the port, but only one of them can listen.

    Args:
        host: Name or address of this host; empty: all its addresses.

    Raises:
        OSError: The port is taken, or there is no such host.
    """
    if host:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = _bound(family, address)  # type: ignore[arg-type]
    else:
        listener = bound_socket(port)
    try:
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _bound(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _owner(port: int) -> str:
    """Return the process that listens on `port`, as ``pid 4242 (python train.py)``; "" if this user may not see it."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listeners(table, port)}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted & {*open_files(pid).values()}:
                return f"pid {pid} ({' '.join(command_of(int(pid)))})"
    return ""


def _listeners(table: str, port: int) -> list[str]:
    """Return the inodes of the sockets that listen on `port`, from ``/proc/net``."""
    with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
        rows = [line.split() for line in file.readlines()[1:]]
        return [row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port]
    return []
