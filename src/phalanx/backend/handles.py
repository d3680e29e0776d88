"""What a rank tells others so that they can form a group with it: its handle; and the store in which they then meet.

**A handle** is what torch passes around as an opaque text (``get_reconfigure_handle``): who the process is, on which
host, with which versions, and where it can be asked. Its token is new whenever the group of the rank has got other
ranks, so a handle says which life of the group it is of.

**The lobby.** Ranks that are about to form a group share no store that is sure to be there: that of the job goes with
the rank or the launcher that serves it, and a new process may never have had it. So every process that gives out a
handle serves a store of torch's, until it leaves its last group, and the ranks meet in that of the first handle: the
same meeting as for any group (`hosts/meeting.py`). Gloo asks the store of the group instead, so it can't go on once
that has died with its rank. A store costs a thread, a port and some 2 ms once, and only where handles are asked for. A
client of it costs 0.6 ms and a look-up of the server's name, which torch makes for its log: where DNS is slow, that is
what a reconfigure waits for. The server's own process therefore uses the store itself.

Like any store of torch's, the lobby listens on all interfaces and believes whoever connects.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist

import phalanx
from phalanx import _core, _env
from phalanx._errors import ArgumentError
from phalanx._settings import read_settings
from phalanx.backend.deadlines import CONNECT_S, POLL_S
from phalanx.backend.hosts.bridges import address_of, master_of
from phalanx.backend.hosts.links import closed_at_exec
from phalanx.host.network import NetworkError, host_identity, interface_towards, network_identity, outside_address
from phalanx.wire.messages import GarbledError, as_facts, between, cropped, understand
from phalanx.wire.waiting import wait_until

_SIGN = "phalanx:"
_LOOPBACK = "127.0.0.1"
_MOST_HANDLES = 1 << 16
_Number = Annotated[int, between(0, 2**63 - 1)]
_Word = Annotated[str, cropped(300)]


@dataclass(frozen=True)
class Handle:
    """One rank of a group that may get other ranks.

    Attributes:
        token: Name of the rank in this life of its group; nobody else has it.
        rank: Number in the world, or in the group if that is the world.
        group: Name of the group.
        process: Pid, start time and pid namespace.
        host: Name of its host.
        kernel: Identity of its host: ranks with the same one may share memory.
        network: Identity of its host's network.
        address: Address at which other hosts reach its lobby.
        port: Port of its lobby.
        phalanx: Version of phalanx.
        torch: Version of torch.
    """

    token: _Word
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
        """The rank, its process and its host, in messages."""
        return f"rank {self.rank} (pid {self.process[0]} on {self.host})"

    def text(self) -> str:
        return f"{_SIGN}{json.dumps(as_facts(self))}"


def own_handle(rank: int, group: str, token: str, store: Any) -> Handle:
    """Return the handle of this process, whose lobby is open from now on.

    Args:
        store: Store of the group, towards which other hosts are.
    """
    host = read_settings().host
    return Handle(
        token=token,
        rank=rank,
        group=group,
        process=_core.identity(),
        host=host or os.uname().nodename,
        kernel=host_identity(host),
        network=network_identity(),
        address=_outside_address(master_of(store)[0]),
        port=_Lobby.open().port,
        phalanx=phalanx.__version__,
        torch=torch.__version__,
    )


def read_handles(given: Any, where: str) -> list[Handle]:
    """Return the handles that a program has passed, in the order of ranks.

    A list has that order. A set is put in the order of the ranks that the handles tell, and then of their tokens.

    Raises:
        ArgumentError: There is none, one is no handle of phalanx, one comes twice, or they are of different groups or
            versions.
    """
    if not isinstance(given, (list, tuple, set, frozenset)) or not 0 < len(given) <= _MOST_HANDLES:
        raise ArgumentError(f"{where}: handles must be a list or a set with a handle of each rank, got {given!r:.80}")
    handles = [_read(text, where) for text in given]
    if isinstance(given, (set, frozenset)):
        handles.sort(key=lambda handle: (handle.rank, handle.token))
    for index, handle in enumerate(handles):
        if handle in handles[:index]:
            raise ArgumentError(f"{where}: the handle of {handle.name} comes twice; pass one for each rank")
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
        raise ArgumentError(f"{where}: a handle is not understood: {error}; run the same phalanx everywhere") from None
    return handle


def is_dead(handle: Handle) -> bool:
    """Whether the process of a handle has ended, as far as can be seen from here."""
    if handle.kernel != host_identity(read_settings().host):
        return False
    watch = _core.PeerWatch.of(*handle.process)
    return watch is not None and watch.dead


def enter_lobby(handles: Sequence[Handle], me: int, timeout_s: float) -> dist.Store:
    """Return the store in which ranks with these handles meet.

    Args:
        me: Number of this rank's handle.

    Raises:
        OSError: It does not answer in time, so its process has ended or can't be reached.
    """
    first = handles[0]
    is_one_network = len({handle.network for handle in handles}) == 1
    if me == 0 and is_one_network:
        return _Lobby.open()
    host = _LOOPBACK if is_one_network else first.address
    deadline = time.monotonic() + timeout_s
    if is_dead(first):
        raise ConnectionRefusedError("its process has ended")
    if first.kernel != handles[me].kernel:
        _await_server(host, first.port, min(timeout_s, CONNECT_S))
    left_s = max(deadline - time.monotonic(), POLL_S)
    with closed_at_exec():
        return dist.TCPStore(
            host, first.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left_s)
        )


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Raise OSError if nothing listens where the lobby should be; torch would try for the whole timeout."""
    errors: list[OSError] = []

    def connect() -> bool | None:
        try:
            socket.create_connection((host, port), timeout_s).close()
            return True
        except ConnectionRefusedError:
            raise  # its process has opened it before it gave out the handle
        except OSError as error:
            errors.append(error)
            return None

    if wait_until(connect, time.monotonic() + timeout_s) is None:
        raise errors[-1]


@functools.cache
def _outside_address(master: str) -> str:
    """Return the address at which other hosts reach this one; loopback if there is no other, as on a lone host."""
    try:
        if named := _env.environment().get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            return address_of(named)
        if master and (towards := interface_towards(master, allow_loopback=True)) and not towards.is_loopback:
            return towards.address
        return outside_address()
    except NetworkError:
        return _LOOPBACK


class _Lobby:
    """The store that this process serves."""

    _opened: tuple[int, dist.TCPStore] | None = None
    _of_parents: list[dist.TCPStore] = []  # noqa: RUF012 kept: their threads stayed in the parent

    @classmethod
    def open(cls) -> dist.TCPStore:
        if cls._opened is not None and cls._opened[0] != os.getpid():
            cls._of_parents.append(cls._opened[1])
            cls._opened = None
        if cls._opened is None:
            with closed_at_exec():
                store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
            cls._opened = os.getpid(), store
        return cls._opened[1]

    @classmethod
    def close(cls) -> None:
        if cls._opened is not None and cls._opened[0] == os.getpid():
            cls._opened = None


close_lobby = _Lobby.close
