"""How bytes travel between hosts: on an existing engine, behind one small interface.

A channel joins some ranks of a group, each known by its number among them. What it starts is over when the handle's
``is_completed()`` says so; ``wait(timeout)`` raises RuntimeError while it is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

FOR_EVER = timedelta(days=30)  # deadlines are kept by who waits: an engine that reaches its own ends the connection
_KEEPALIVE_S = 1  # the kernel's shortest
_making = threading.Lock()  # connections are told apart by when they were made


class Handle(Protocol):
    """An exchange or message on its way."""

    def wait(self, timeout: timedelta) -> Any: ...

    def is_completed(self) -> bool: ...


class Channel(Protocol):
    """One engine's way to move bytes between ranks; tensors are contiguous, of dtype uint8.

    Attributes:
        ends_waits: Whether `close` ends the waits of the other ranks.
        links: Connections to other ranks, as far as they can be watched.
    """

    ends_waits: bool

    @property
    def links(self) -> Mapping[int, socket.socket]: ...

    def exchange(
        self, out: torch.Tensor, source: torch.Tensor, out_bytes: Sequence[int], in_bytes: Sequence[int]
    ) -> Handle:
        """Send the parts of `source`, of `in_bytes` each, to the ranks in order, and fill those of `out` likewise."""
        ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        """Send a message; its handle may only be waited for."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        """Receive a message of that very size; its handle may only be waited for."""
        ...

    def lost(self) -> list[int]:
        """Return the ranks whose connections have ended."""
        ...

    def silent(self) -> list[int]:
        """Return those of them whose end nobody told: their hosts do not answer."""
        ...

    def close(self) -> None:
        """End every connection: operations on their way fail, here and on the other ranks."""
        ...


class GlooChannel:
    """Gloo over TCP. Its connections are watched and closed beside it, which it can't do itself.

    The kernel probes each connection: a host that vanished without a word is noticed although nothing is sent, and
    a process that computes, or is stopped, is not taken for lost.

    Args:
        store: Of this channel alone.
        rank: Among the `size` ranks of the channel.
        address: Of the interface on which the others reach this rank.
        silence_s: Seconds without an answer of the other kernel after which a connection is lost.
    """

    ends_waits = True

    def __init__(self, store: Store, rank: int, size: int, address: str, timeout_s: float, silence_s: float) -> None:
        group: Any = c10d.ProcessGroupGloo
        options = group._Options()
        options._devices = [group.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)  # of connecting
        options._threads = 2
        with _making:
            known = {inode for inode, _ in _sockets()}
            self._group = group(store, rank, size, options)
            fresh = [(inode, fd) for inode, fd in _sockets() if inode not in known]
            made = [_duplicate(fd) for _, fd in fresh]
        self.inodes = {inode for inode, _ in fresh}  # descriptors may be closed by the engine, and given anew
        self._options = c10d.AllToAllOptions()
        self._options.timeout = FOR_EVER
        self.links = self._identify(store, rank, size, [link for link in made if link is not None], timeout_s)
        for link in self.links.values():
            watch_link(link, silence_s)
        self._silence_s = silence_s
        _channels.add(self)

    def _identify(
        self, store: Store, rank: int, size: int, links: list[socket.socket], timeout_s: float
    ) -> dict[int, socket.socket]:
        """Return the connection to each rank, which they tell from the addresses at their ends."""
        mine = sorted({_name(link.getsockname()) for link in links})
        store.set(f"links/{rank}", json.dumps(mine))
        keys = [f"links/{r}" for r in range(size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        owners = {name: r for r, key in enumerate(keys) if r != rank for name in json.loads(store.get(key))}
        found = {}
        for link in links:
            owner = owners.get(_name(link.getpeername()))
            if owner is None or owner in found:
                link.close()
            else:
                found[owner] = link
        return found

    def exchange(
        self, out: torch.Tensor, source: torch.Tensor, out_bytes: Sequence[int], in_bytes: Sequence[int]
    ) -> Handle:
        return self._group.alltoall_base(out, source, list(out_bytes), list(in_bytes), self._options)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        return self._group.send([tensor], peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        return self._group.recv([tensor], peer, tag)

    def lost(self) -> list[int]:
        return [peer for peer, link in self.links.items() if _has_ended(link)]

    def silent(self) -> list[int]:
        return [peer for peer in self.lost() if _silence_s(self.links[peer]) > _SILENT * self._silence_s]

    def close(self) -> None:
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it has ended already
                link.shutdown(socket.SHUT_RDWR)


_channels: weakref.WeakSet[GlooChannel] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: its copies of the connections would keep them open when the rank has ended."""
    inodes = set().union(*(channel.inodes for channel in _channels))
    if not inodes:
        return
    with open(os.devnull) as nothing:
        for inode, fd in _sockets():
            if inode in inodes:
                os.dup2(nothing.fileno(), fd, inheritable=False)  # the engine may yet close the number


os.register_at_fork(after_in_child=_let_go)


def _sockets() -> list[tuple[str, int]]:
    """Return inode and descriptor of the sockets of this process."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                found.append((target, int(entry)))
    return found


def _duplicate(fd: int) -> socket.socket | None:
    """Return a socket object of its own for a TCP connection; None for any other."""
    try:
        link = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
            link.getpeername()
            return link
    link.close()
    return None


def _name(address: Any) -> str:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"


def watch_link(link: socket.socket, silence_s: float) -> None:
    """Have the kernel end a TCP connection whose other end has not answered for `silence_s`."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(silence_s)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def links_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port: those of a TCPStore's clients."""
    for _, fd in _sockets():
        link = _duplicate(fd)
        if link is None:
            continue
        with link:
            if link.getpeername()[1] == port:
                yield link


def _has_ended(link: socket.socket) -> bool:
    if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return True
    state = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED


def _silence_s(link: socket.socket) -> float:
    """Return how long ago the other kernel sent anything."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECV + 4)
    return int.from_bytes(info[_LAST_ACK_RECV:], sys.byteorder) / 1e3


_ESTABLISHED = 1  # linux/tcp_states.h
_LAST_ACK_RECV = 56  # offset in struct tcp_info, milliseconds; linux/tcp.h
_SILENT = 0.9  # of the limit
