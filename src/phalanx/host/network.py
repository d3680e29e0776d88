"""This host's network interfaces, and the interface on the route to another host.

Both come from the kernel: addresses through ``SIOCGIFCONF`` and ``/proc/net/if_inet6``, the route through the source
address of a connected UDP socket. Nothing is sent except the resolver's queries. The standard library can't list
addresses, and psutil would be a dependency that saves only thirty lines.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_IFREQ_BYTES = 40  # struct ifreq with 8-byte pointers: a name of 16 bytes, and the largest member
_MOST_ADDRESSES = 1024
_DISCARD_PORT = 9  # any port would do, because nothing is sent


class Interface(NamedTuple):
    """One address of one network interface.

    Attributes:
        name: Name for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
        address: IPv4 or IPv6 address, with its scope if it is link-local (``fe80::1%eth0``); empty if there is none.
        is_up: Whether the interface is configured and has a carrier.
    """

    name: str
    address: str
    is_up: bool = True
    is_loopback: bool = False


class NetworkError(OSError):
    """There is no usable route to a host; the message says why and what to do.

    Attributes:
        host: Host name that was given.
        kind: ``"name"`` (the name does not resolve), ``"route"`` (there is no route), ``"loopback"`` (the route leads
            to loopback), or ``"interface"`` (no interface has the route's address).
    """

    def __init__(self, message: str, host: str, kind: str) -> None:
        super().__init__(message, host, kind)
        self.host, self.kind = host, kind

    def __str__(self) -> str:
        return str(self.args[0])


def interfaces() -> tuple[Interface, ...]:
    """Return every address of every interface, in the kernel's order; an interface without an address appears once."""
    found: list[Interface] = []
    addresses = [*_v4_addresses(), *_v6_addresses()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            flags = _flags(asked, name)
            is_up = flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING
            for address in [address for owner, address in addresses if owner == name] or [""]:
                found.append(Interface(name, address, is_up, bool(flags & _IFF_LOOPBACK)))
    return tuple(found)


def interface_towards(host: str, port: int = _DISCARD_PORT, *, allow_loopback: bool = False) -> Interface:
    """Return the interface, with its address, through which connections to `host` leave this host.

    If `host` is one of this host's own addresses, return the interface that has this address.

    Args:
        host: Name or address.
        allow_loopback: Whether loopback is acceptable, as in a job on one host; other hosts can't reach it.

    Raises:
        NetworkError: The name does not resolve, there is no route, or the route ends in loopback.
    """
    try:
        candidates = socket.getaddrinfo(host, port or _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        todo = "use an address, or add the name to DNS or /etc/hosts"
        raise NetworkError(f"{unresolved(host, error)}: {todo}", host, "name") from None
    why = "no address"
    for family, kind, protocol, _, target in candidates:  # in the order in which a connection would try them
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                source = probe.getsockname()
        except OSError as error:
            why = error.strerror or str(error)
            continue
        return _owner_of(source, str(target[0]), host, allow_loopback)
    raise NetworkError(f"no route to {host} ({why}): see ip route, and that the interface is up", host, "route")


def unresolved(host: str, error: Exception) -> str:
    """Return a description of a failure to look up a host's name."""
    why = error.strerror if isinstance(error, socket.gaierror) else "it is not a host name"
    return f"the name {host!r} does not resolve here ({why})"


def outside_address() -> str:
    """Return an address of this host other than loopback.

    Raises:
        NetworkError: Only loopback is up.
    """
    found = [one for one in interfaces() if one.address and one.is_up and not one.is_loopback]
    if not found:
        raise NetworkError("no interface but loopback is up", "", "interface")
    return preferred_address(found)


def preferred_address(found: Sequence[Interface]) -> str:
    """Return the first IPv4 address, else the first address."""
    return min(found, key=lambda one: ":" in one.address).address


def host_identity(pretended: str = "") -> str:
    """Return an identity of this host: its boot id, and the network and PID namespaces of this process.

    Containers share the machine's kernel, but a container with its own network or PID namespace counts as a host of its
    own: ranks find each other through the network namespace and watch each other through the PID namespace.

    Args:
        pretended: Value of PHALANX_HOST, which makes ranks of one host count as ranks of several hosts.
    """
    processes = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
    return f"{network_identity()} {processes} {pretended}".rstrip()


def network_identity() -> str:
    """Return an identity of this host's network namespace; containers may share one."""
    if sys.platform != "linux":
        return socket.gethostname()
    return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"


def boot_id() -> str:
    """Return the identity of this boot of the Linux kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _owner_of(source: tuple, target: str, host: str, allow_loopback: bool) -> Interface:
    """Return the interface that owns the source address of a route to `target`."""
    scope = source[3] if len(source) == 4 else 0
    address = source[0].partition("%")[0]
    if scope:
        address = f"{address}%{socket.if_indextoname(scope)}"
    known = interfaces()
    if is_loopback(address) and not allow_loopback:
        others = sorted({one.address for one in known if one.is_up and not one.is_loopback and "." in one.address})
        named = host if target == host else f"{host} is {target} here, which"
        raise NetworkError(
            f"{named} is this host's loopback, and no other host can reach it: use "
            f"{' or '.join(others[:3]) or 'an address that the other hosts reach'}, or fix this host's entry in "
            "/etc/hosts",
            host,
            "loopback",
        )
    mine = [one for one in known if one.address == address]
    # All of 127.0.0.0/8 belongs to lo, although interfaces() does not list an address such as 127.0.0.2.
    mine = mine or [one._replace(address=address) for one in known if one.is_loopback and is_loopback(address)]
    if not mine:
        raise NetworkError(f"no interface has {address}, from which {host} is reached", host, "interface")
    return max(mine, key=lambda one: one.is_up)


def is_loopback(address: str) -> bool:
    """Whether an address is loopback, including IPv4 mapped into IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _v4_addresses() -> Iterator[tuple[str, str]]:
    """Yield pairs of an interface's name and an address; an interface may have several addresses."""
    room = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ_BYTES))
    pointer, num_bytes = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, struct.pack("iL", num_bytes, pointer))
    filled = room.tobytes()[: struct.unpack("iL", answer)[0]]
    for start in range(0, len(filled), _IFREQ_BYTES):
        label = filled[start : start + 16].split(b"\0", 1)[0].decode(errors="surrogateescape")
        yield (
            label.partition(":")[0],
            socket.inet_ntoa(filled[start + 20 : start + 24]),
        )  # without the suffix of an alias such as eth0:1


def _v6_addresses() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, _, _, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            yield name, f"{address}%{name}" if address.is_link_local else str(address)


def infiniband_cards(root: str = "/") -> list[str]:
    """Return the names of this host's InfiniBand and RoCE cards."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(os.path.join(root, "sys/class/infiniband")))
    return []


def _flags(asked: socket.socket, name: str) -> int:
    with contextlib.suppress(OSError):  # the interface is gone
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
        return int(struct.unpack("16sH22x", answer)[1])
    return 0
