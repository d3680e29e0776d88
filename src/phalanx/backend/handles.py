"""Handles, by which other ranks can form a group with this one, and the lobby: the store in which these ranks meet.

**A handle** is the opaque text that torch passes around (``get_reconfigure_handle``). It holds the identity of the
process, its host, its versions, and the address of its lobby. A rank gets a new token whenever its group gets other
ranks, so a handle also identifies one life of the group.

**The lobby.** Ranks that are about to form a group can't rely on a common store: the job's store ends with the rank or
the launcher that serves it, and a new process may never have been connected to it. So every process that gives out a
handle serves a torch store until it leaves its last group. The ranks meet in the store of the lowest former rank,
whatever the order of the handles, and the meeting is the same as for any group (`hosts/meeting.py`). Gloo uses the
group's store instead, so Gloo can't form the new group if the rank that served that store has ended.

The lobby costs a thread, a port and some 2 ms, once, and only in programs that ask for handles. A connection to it
costs 0.6 ms and a look-up of the server's name. torch makes that look-up for its log, even for 127.0.0.1: torch writes
it as ``::ffff:127.0.0.1``, a name in no hosts file, so DNS is asked. If DNS loses one packet in 25, one look-up in 25
takes 5 s. So the server's own process uses the store object itself, and the other processes keep their connection for
the next meeting.

Like any torch store, the lobby listens on all interfaces and trusts everyone who connects.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch.distributed as dist

from phalanx import _core
from phalanx._errors import ArgumentError
from phalanx._settings import read_settings
from phalanx.backend.deadlines import CONNECT_S, POLL_S
from phalanx.backend.hosts.bridges import LOOPBACK, address_towards, master_of
from phalanx.backend.hosts.joining import whoami
from phalanx.backend.hosts.links import closed_at_exec
from phalanx.host.network import NetworkError, host_identity, outside_address
from phalanx.wire.messages import GarbledError, as_facts, between, cropped, understand
from phalanx.wire.store import connect_within
from phalanx.wire.waiting import wait_until

_SIGN = "phalanx:"
_MOST_HANDLES = 1 << 16
_Number = Annotated[int, between(0, 2**63 - 1)]
_Word = Annotated[str, cropped(300)]


@dataclass(frozen=True)
class Handle:
    """One rank of a group that may get other ranks.

    Attributes:
        token: Unique name of the rank in this life of its group.
        life: Name of this life of the group, the same on all its ranks; empty before the group has ranks.
        rank: Rank in the world, or in the group if the group's own ranks are those of the world.
        group: Name of the group.
        process: Pid, start time and pid namespace.
        host: Name of the rank's host.
        kernel: Identity of the host; ranks with the same identity may share memory.
        network: Identity of the host's network.
        address: Address at which other hosts reach the lobby of the rank's process.
        port: Port of that lobby.
        phalanx: Version of phalanx.
        torch: Version of torch.
    """

    token: _Word
    life: _Word
    rank: Annotated[int, between(0, 2**31 - 1)]
    group: _Word
    process: tuple[Annotated[int, between(0, 2**31 - 1)], _Number, _Number]
    host: _Word
    kernel: _Word
    network: _Word
    address: _Word
    port: Annotated[int, between(1, 65535)]
    phalanx: _Word
    torch: _Word

    @property
    def name(self) -> str:
        """Text that names the rank, its process and its host in messages."""
        return f"rank {self.rank} (pid {self.process[0]} on {self.host})"

    @property
    def place(self) -> tuple[int, str]:
        """Sort key: the former rank, and then the token, because new processes may have equal ranks."""
        return self.rank, self.token

    def text(self) -> str:
        return f"{_SIGN}{json.dumps(as_facts(self))}"


def own_handle(rank: int, group: str, token: str, life: str, store: Any) -> Handle:
    """Open this process's lobby, and return its handle.

    Args:
        store: Store of the group. The handle holds the address of the interface through which this host reaches the
            server of this store.
    """
    address, port = _outside_address(master_of(store)[0]), _Lobby.open().port
    who = whoami(read_settings())
    return Handle(token=token, life=life, rank=rank, group=group, address=address, port=port, **who)


def read_handles(given: Any, where: str) -> list[Handle]:
    """Return the handles that a program has passed, in rank order.

    A list is already in that order. A set is sorted by the former rank in each handle, and then by token.

    Raises:
        ArgumentError: No handle was passed, one is not a handle of phalanx, one occurs twice, or the handles are from
            different groups or versions.
    """
    if not isinstance(given, (list, tuple, set, frozenset)) or not 0 < len(given) <= _MOST_HANDLES:
        raise ArgumentError(f"{where}: handles must be a list or a set with one handle per rank, got {given!r:.80}")
    handles = [_read(text, where) for text in given]
    if isinstance(given, (set, frozenset)):
        handles.sort(key=lambda handle: handle.place)
    counted = Counter(handle.token for handle in handles)
    for handle in handles:
        if counted[handle.token] > 1:
            raise ArgumentError(f"{where}: the handle of {handle.name} occurs twice; pass one for each rank")
    whats = {"group": "groups", "phalanx": "versions of phalanx", "torch": "versions of torch"}
    for fact, what in whats.items():
        told = {str(getattr(handle, fact)): handle.name for handle in reversed(handles)}
        if len(told) > 1:
            listed = ", ".join(f"{value!r} of {name}" for value, name in sorted(told.items()))
            raise ArgumentError(f"{where}: the handles are of different {what}: {listed}; pass handles of one")
    return handles


def _read(text: Any, where: str) -> Handle:
    if not isinstance(text, str) or not text.startswith(_SIGN):
        raise ArgumentError(
            f"{where}: {text!r:.80} is not a handle of phalanx; pass what dist._get_reconfigure_handle() returns on "
            "each rank, with the same backend on all"
        )
    try:
        handle: Handle = understand(text.removeprefix(_SIGN), Handle)
    except GarbledError as error:
        raise ArgumentError(
            f"{where}: can't parse a handle: {error}; run the same version of phalanx on every rank"
        ) from None
    return handle


def is_dead(handle: Handle) -> bool:
    """Whether the process of a handle is known to have ended; False if it runs on another host."""
    if handle.kernel != host_identity(read_settings().host):
        return False
    watch = _core.PeerWatch.of(*handle.process)
    return watch is not None and watch.dead


def enter_lobby(server: Handle, handles: Sequence[Handle], me: int, timeout_s: float) -> dist.Store:
    """Return the store in which ranks with these handles meet.

    Args:
        server: Handle of the rank whose process serves the store.
        me: Index of this rank's handle in `handles`.

    Raises:
        OSError: The store can't be reached, so its process has most probably ended.
        StoreSilentError: The store does not answer in time, so its process may be suspended.
    """
    is_one_network = len({handle.network for handle in handles}) == 1
    if server == handles[me] and is_one_network:
        if (lobby := _Lobby.open()).port != server.port:
            raise ConnectionRefusedError("this process has left its last group since")
        return lobby
    host = LOOPBACK if is_one_network else server.address
    deadline = time.monotonic() + timeout_s

    def require_living() -> None:
        if is_dead(server):
            raise ConnectionRefusedError("its process has ended")

    require_living()
    if (known := _Lobby.take(server, host)) is not None:
        return known
    _await_server(host, server.port, min(timeout_s, CONNECT_S))
    limit_s = max(deadline - time.monotonic(), POLL_S)

    def connect() -> dist.Store:
        limit = timedelta(seconds=limit_s)
        return dist.TCPStore(host, server.port, is_master=False, wait_for_workers=False, timeout=limit)

    with closed_at_exec():
        return connect_within(limit_s, connect, require_living)


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Raise OSError if nothing listens where the lobby should be; torch would keep trying until its timeout."""
    errors: list[OSError] = []

    def connect() -> bool | None:
        try:
            socket.create_connection((host, port), timeout_s).close()
            return True
        except ConnectionRefusedError:
            raise  # no retry: the lobby was open before the handle was given out, so it has closed since
        except OSError as error:
            errors.append(error)
            return None

    if wait_until(connect, time.monotonic() + timeout_s) is None:
        raise errors[-1]


@functools.cache
def _outside_address(master: str) -> str:
    """Return the address at which other hosts reach this one; loopback if there is none, such as without a network."""
    for look in (functools.partial(address_towards, master, is_one_network=False), outside_address):
        with contextlib.suppress(NetworkError):
            return str(look())
    return LOOPBACK


class _Lobby:
    """The store that this process serves, and the store of another process that this process has visited last."""

    _pid = 0  # process to which the other attributes belong
    _opened: dist.TCPStore | None = None
    _visited: tuple[Any, dist.TCPStore] | None = None
    _of_parents: list[Any] = []  # noqa: RUF012 kept: destroying them would wait for threads of the parent

    @classmethod
    def _enter(cls) -> None:
        if cls._pid != os.getpid():
            cls._of_parents += [cls._opened, cls._visited]
            cls._pid, cls._opened, cls._visited = os.getpid(), None, None

    @classmethod
    def open(cls) -> dist.TCPStore:
        cls._enter()
        if cls._opened is None:
            with closed_at_exec():
                cls._opened = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        return cls._opened

    @classmethod
    def take(cls, server: Handle, host: str) -> dist.TCPStore | None:
        """Return the store of the last visit if this server serves it; forget that store: it may have failed since."""
        cls._enter()
        visited, cls._visited = cls._visited, None
        return visited[1] if visited is not None and visited[0] == (server.process, server.port, host) else None

    @classmethod
    def keep(cls, server: Handle, store: Any) -> None:
        """Keep the connection of a meeting that succeeded, for a later meeting in the lobby of the same process."""
        if store is not cls._opened:
            cls._visited = (server.process, server.port, store.host), store

    @classmethod
    def close(cls) -> None:
        if cls._pid == os.getpid():
            cls._opened = cls._visited = None


close_lobby, keep_lobby = _Lobby.close, _Lobby.keep
