"""This host's network interfaces, and the one that the route to another host takes.

Asks the kernel: the addresses come from ``SIOCGIFCONF`` and ``/proc/net/if_inet6``, the route from the source address
that a connected UDP socket is given. Nothing is sent but what the resolver sends to look a name up. The standard
library lists no addresses, and psutil would be a dependency for the sake of the thirty lines at the end.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_IFREQ_BYTES = 40  # struct ifreq where pointers have 8 bytes: a name of 16, and the largest member
_MOST_ADDRESSES = 1024
_DISCARD_PORT = 9  # any: it is not sent to


class Interface(NamedTuple):
    """One address of one network interface.

    Attributes:
        name: Name for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
        address: IPv4 or IPv6, one of the link with its scope (``fe80::1%eth0``); empty: it has none.
        is_up: Set up, and with a carrier.
    """

    name: str
    address: str
    is_up: bool = True
    is_loopback: bool = False


class NetworkError(OSError):
    """There is no usable way to a host; the message says why and what to do.

    Attributes:
        host: Host name that was given.
        kind: ``"name"`` (does not resolve), ``"route"`` (there is none), ``"loopback"``, or ``"interface"`` (none has
            the route's address).
    """

    def __init__(self, message: str, host: str, kind: str) -> None:
        super().__init__(message, host, kind)
        self.host, self.kind = host, kind

    def __str__(self) -> str:
        return str(self.args[0])


def interfaces() -> tuple[Interface, ...]:
    """Return every address of every interface, in the kernel's order; one without an address once."""
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
    """Return the interface, with its address, through which connections to `host` leave this one.

    For an address of this host itself it is the interface that has it.

    Args:
        host: Name or address.
        allow_loopback: For a job of one host. Between hosts loopback leads nowhere.

    Raises:
        NetworkError: The name does not resolve, there is no route, or it ends in loopback.
    """
    try:
        candidates = socket.getaddrinfo(host, port or _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "it is no host's name"
        raise NetworkError(
            f"the name {host!r} does not resolve here ({why}): use an address, or add the name to DNS or /etc/hosts",
            host,
            "name",
        ) from None
    why = "no address"
    for family, kind, protocol, _, target in candidates:  # in the order in which connections try them
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                source = probe.getsockname()
        except OSError as error:
            why = error.strerror or str(error)
            continue
        return _owner_of(source, str(target[0]), host, allow_loopback)
    raise NetworkError(f"no route to {host} ({why}): see ip route, and that the interface is up", host, "route")


def outside_address() -> str:
    """Return an address of this host that is not loopback.

    Raises:
        NetworkError: There is none.
    """
    found = [one for one in interfaces() if one.address and one.is_up and not one.is_loopback]
    if not found:
        raise NetworkError("no interface but loopback is up", "", "interface")
    return preferred_address(found)


def preferred_address(found: Sequence[Interface]) -> str:
    """Return the first address, of version 4 if there is one."""
    return min(found, key=lambda one: ":" in one.address).address


def host_identity(pretended: str = "") -> str:
    """Return what tells this host from others: its boot, and the network and processes that its ranks see.

    Containers of one machine share its kernel; those with a network or process numbers of their own are hosts of
    their own: ranks find each other by the one and watch each other by the other.

    Args:
        pretended: PHALANX_HOST, which divides a host into several.
    """
    return f"{network_identity()} {os.readlink('/proc/self/ns/pid')} {pretended}".rstrip()


def network_identity() -> str:
    """Return what tells this host's network, which containers may share, from others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _owner_of(source: tuple, target: str, host: str, allow_loopback: bool) -> Interface:
    """Return the interface that has the source address of a route to `target`."""
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
            f"{' or '.join(others[:3]) or 'an address that the other hosts reach'}, or mend the name's line in "
            "/etc/hosts",
            host,
            "loopback",
        )
    mine = [one for one in known if one.address == address]
    # 127.0.0.2 has no entry of its own: lo answers for all of 127/8.
    mine = mine or [one._replace(address=address) for one in known if one.is_loopback and is_loopback(address)]
    if not mine:
        raise NetworkError(f"no interface has {address}, from which {host} is reached", host, "interface")
    return max(mine, key=lambda one: one.is_up)


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the host itself, also as IPv4 written in IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _v4_addresses() -> Iterator[tuple[str, str]]:
    """Yield name and address, several of one interface too."""
    room = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ_BYTES))
    pointer, num_bytes = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, struct.pack("iL", num_bytes, pointer))
    filled = room.tobytes()[: struct.unpack("iL", answer)[0]]
    for start in range(0, len(filled), _IFREQ_BYTES):
        label = filled[start : start + 16].split(b"\0", 1)[0].decode(errors="surrogateescape")
        yield label.partition(":")[0], socket.inet_ntoa(filled[start + 20 : start + 24])  # eth0:1 is of eth0


def _v6_addresses() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, _, _, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            yield name, f"{address}%{name}" if address.is_link_local else str(address)


def _flags(asked: socket.socket, name: str) -> int:
    with contextlib.suppress(OSError):  # it has gone
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
        return int(struct.unpack("16sH22x", answer)[1])
    return 0
