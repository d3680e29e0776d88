"""Channels that carry bytes between hosts: an existing engine (Gloo or MPI) behind one small interface.

A channel joins some ranks of a group and numbers them. An operation is over once ``is_completed()`` of its handle
returns True. If ``wait(timeout)`` times out before that, it raises RuntimeError.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Store, Work
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx.backend.deadlines import CLOSING_POLL_S, END_S
from phalanx.backend.hosts.links import Link, closed_at_exec, duplicate, sockets
from phalanx.host.processes import open_files
from phalanx.wire.messages import understand
from phalanx.wire.waiting import wait_until

# The wrapper of `record.gloo` is bypassed, because its frame would keep the work alive.
wait_for_gloo = inspect.unwrap(Work.wait)
# Channels are made one at a time: a channel takes all connections that are opened while it is made for its own.
_making = threading.Lock()


class Handle(Protocol):
    """A running exchange or message."""

    def wait(self, timeout: timedelta) -> Any: ...

    def is_completed(self) -> bool: ...


class Channel(Protocol):
    """Moves bytes between ranks through one engine; all tensors are contiguous and of dtype uint8.

    Attributes:
        ends_waits: Whether `close` also ends the waits of the other ranks.
        links: Connections to the other ranks, by rank in the group; empty if they can't be watched.
    """

    ends_waits: bool

    @property
    def links(self) -> Mapping[int, Link]: ...

    def exchange(
        self, out: torch.Tensor, source: torch.Tensor, out_bytes: Sequence[int], in_bytes: Sequence[int],
        limit: timedelta,
    ) -> Handle:  # fmt: skip
        """Send part i of `source` to rank i, and receive part i of `out` from it.

        Parts follow each other in memory; part i has ``in_bytes[i]`` bytes in `source` and ``out_bytes[i]`` in `out`.
        Callers may wait for the handle several times, each time with a timeout; no wait lasts longer than `limit`.
        """
        ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        """Send a message. Only one wait for its handle is allowed, in a thread that can be abandoned."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        """Receive a message of exactly the size of `tensor`; the handle is like that of `send`."""
        ...

    def close(self) -> None:
        """Close every connection: running operations fail, here and on the other ranks."""
        ...

    def drain(self, handles: Sequence[Handle]) -> None:
        """Wait after `close`, for at most a second, until the engine no longer touches the memory of these handles."""
        ...

    def destroy(self) -> bool:
        """Free the engine after `close`, unless the engine is still busy; return whether it was freed."""
        ...


class _GlooHandle:
    """A handle for Gloo's work. It drops the work when the channel is destroyed.

    So a reference to the handle, such as one in a traceback, keeps no connection open.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        if self._work is None:
            raise RuntimeError("the channel was closed")
        wait_for_gloo(self._work, timeout)

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def release(self) -> None:
        self._work = None


class GlooChannel:
    """Gloo over TCP. Its connections are watched and closed from outside, which Gloo itself can't do.

    If a connection ends in the middle of a message, Gloo forgets the receive, and a wait for this receive lasts until
    the timeout.

    Args:
        store: Store for this channel alone.
        rank: This rank's number in the group.
        ranks: The channel's ranks, in the channel's order, each by its number in the group.
        address: Address at which the other ranks reach this one.
        timeout_s: Seconds allowed for connecting.
        silence_s: Seconds without an answer of the peer's kernel after which a connection counts as lost.

    Attributes:
        address: The argument `address`.
    """

    ends_waits = True

    def __init__(
        self, store: Store, rank: int, ranks: list[int], address: str, timeout_s: float, silence_s: float
    ) -> None:
        group: Any = c10d.ProcessGroupGloo
        limit = timedelta(seconds=timeout_s)
        with _making, closed_at_exec() as self._fresh:
            device = group.create_device(hostname=address, lazy_init=False)
            options = _torch.gloo_options(timeout=limit, threads=2, devices=[device])
            self._group = group(store, ranks.index(rank), len(ranks), options)
        self.address = address
        self.inodes = {
            inode for inode, _ in self._fresh
        }  # identified by inode, because a descriptor's number may be reused after the engine has closed it
        self._options = c10d.AllToAllOptions()
        self._handles: weakref.WeakSet[_GlooHandle] = weakref.WeakSet()
        self._last: Handle | None = None  # the last exchange, the only one that may still run on an engine's thread
        self.links = self._identify(store, rank, ranks, timeout_s, silence_s)
        _channels.add(self)

    def _identify(
        self, store: Store, rank: int, ranks: list[int], timeout_s: float, silence_s: float
    ) -> dict[int, Link]:
        """Return the connection to each rank; the addresses at its two ends identify it."""
        opened = [fd for target, fd in self._fresh if target.startswith("socket:")]
        made = [connection for fd in opened if (connection := duplicate(fd)) is not None]
        store.set(f"links/{rank}", json.dumps(sorted({_name(connection.getsockname()) for connection in made})))
        keys = {r: f"links/{r}" for r in ranks}
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        owners = {name: r for r, key in keys.items() if r != rank for name in understand(store.get(key), [str])}
        found: dict[int, Link] = {}
        for connection in made:
            owner = owners.get(_name(connection.getpeername()))
            if owner is None or owner in found:
                connection.close()
            else:
                found[owner] = Link(connection, silence_s)
        return found

    def exchange(
        self, out: torch.Tensor, source: torch.Tensor, out_bytes: Sequence[int], in_bytes: Sequence[int],
        limit: timedelta,
    ) -> Handle:  # fmt: skip
        self._options.timeout = limit
        work = self.engine().alltoall_base(out, source, list(out_bytes), list(in_bytes), self._options)
        self._last = self._handle(work)
        return self._last

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        return self._handle(self.engine().send([tensor], peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        return self._handle(self.engine().recv([tensor], peer, tag))

    def engine(self) -> Any:
        """Return torch's Gloo group.

        Raises:
            RuntimeError: The channel was destroyed.
        """
        if self._group is None:  # another thread has destroyed the channel
            raise RuntimeError("the channel was closed")
        return self._group

    def _handle(self, work: Any) -> Handle:
        handle = _GlooHandle(work)
        self._handles.add(handle)
        return handle

    def close(self) -> None:
        for link in self.links.values():
            link.shut()

    def drain(self, handles: Sequence[Handle]) -> None:
        """Wait until Gloo has closed the descriptors of its connections and no longer touches the memory of messages.

        Until then, the handles must stay alive. They can't report that Gloo is done, because Gloo forgets interrupted
        receives.
        """
        own = {link.fileno() for link in self.links.values()}
        held = {target for fd, target in open_files().items() if fd in own}

        def is_closed() -> bool | None:
            return not any(inode in held and fd not in own for inode, fd in sockets()) or None

        wait_until(is_closed, time.monotonic() + END_S, most_s=CLOSING_POLL_S)

    def destroy(self) -> bool:
        """Destroy the engine, unless that would wait for a running exchange, which may last until its deadline."""
        if self._last is not None and not self._last.is_completed():
            return False
        for handle in list(self._handles):
            handle.release()
        self._group = None
        for link in self.links.values():
            link.release()
        self.links = {}
        return True


_channels: weakref.WeakSet[GlooChannel] = weakref.WeakSet()


def _let_go() -> None:
    """Close a forked child's copies of the descriptors, which would keep connections open after the rank has ended."""
    inodes = set().union(*(channel.inodes for channel in _channels))
    if not inodes:
        return
    with open(os.devnull) as nothing:
        for inode, fd in sockets():
            if inode in inodes:
                # Not closed: the engine may later close this number, which by then must not belong to another file.
                os.dup2(nothing.fileno(), fd, inheritable=False)


os.register_at_fork(after_in_child=_let_go)


def _name(address: Any) -> str:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"
