"""Connects the hosts of a new group: finds each rank's address, checks that all are reachable, starts the engine.

A rank listens on the address of the interface through which it reaches the master, or on the interface that
GLOO_SOCKET_IFNAME names. Gloo's own default is the address of the host's name, which on Debian is 127.0.1.1. Loopback
between hosts is refused, and the error says how to set another address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d

from phalanx import _core
from phalanx._env import environment
from phalanx._errors import PhalanxError
from phalanx._settings import Settings
from phalanx.backend.deadlines import CONNECT_S
from phalanx.backend.failures.members import Members
from phalanx.backend.hosts.bridged import BridgedGroup
from phalanx.backend.hosts.channels import Channel, GlooChannel
from phalanx.backend.hosts.failures import Failures
from phalanx.backend.hosts.links import watch_store
from phalanx.backend.hosts.mailbox import Mailbox, post
from phalanx.backend.hosts.meeting import Meeting
from phalanx.host.network import (
    NetworkError,
    interface_towards,
    interfaces,
    is_loopback,
    outside_address,
    preferred_address,
)

LOOPBACK = "127.0.0.1"
_MOST_LINES = 8
_ADVICE = "Run phalanx doctor on them: it tests names, ports and interfaces."


def bridge(
    meeting: Meeting, hellos: list[dict[str, Any]], hosts: list[list[int]], core: _core.Group, settings: Settings
) -> BridgedGroup:
    """Connect the hosts and return the group of all ranks.

    Args:
        hellos: Hello of each rank, see `meeting`.
        hosts: Ranks of the group by host.
        core: Core group of this host's ranks.

    Raises:
        PhalanxError: The hosts can't reach each other, or the engine can't be used here.
    """
    members = Members(
        group=meeting.name,
        rank=meeting.rank,
        global_ranks=tuple(meeting.global_ranks),
        hosts=_names(hellos, hosts),
        pids=tuple(hello["pid"] for hello in hellos),
    )
    engine: _Mpi | _Gloo
    if settings.bridge == "mpi":
        engine = _Mpi(meeting, hellos)
    else:
        engine = _Gloo(meeting, members, _own_address(meeting, hellos, members), settings.silence_s)
    mine = next(ranks for ranks in hosts if meeting.rank in ranks).index(meeting.rank)
    rail = [ranks[mine] for ranks in hosts] if mine < min(map(len, hosts)) else None
    try:
        own_rail = engine.connect(rail, f"rail{mine}") if rail else None
        everyone = engine.connect(list(range(meeting.size)), "everyone")
    except RuntimeError as error:
        engine.close()
        names = ", ".join(dict.fromkeys(members.hosts))
        raise meeting.refusal(
            f"{settings.bridge} could not connect the hosts {names}: {error}\n{_ADVICE}", entry="unreachable"
        ) from error
    failures = Failures(meeting.life_store, members, engine.mailbox, engine.boxes)
    watch_store(master_of(meeting.life_store)[1], settings.silence_s)
    return BridgedGroup(core, hosts, members, own_rail, everyone, failures, meeting.timeout_s, settings.stall_s)


class _Mpi:
    """Connects ranks through the MPI that started them."""

    mailbox: ClassVar[Mailbox | None] = None
    boxes: ClassVar[Mapping[int, Sequence[Any]]] = {}

    def __init__(self, meeting: Meeting, hellos: list[dict[str, Any]]) -> None:
        from phalanx.backend.hosts.mpi import library

        self._ranks = [hello.get("mpi", -1) for hello in hellos]
        if len(set(self._ranks)) < meeting.size:
            raise meeting.refusal(
                f"PHALANX_BRIDGE=mpi, and mpi4py has loaded {library()}, which did not start these ranks. Start them "
                "with its mpirun, or install the mpi4py of the MPI that did.",
                entry="mpi",
            )

    def connect(self, ranks: list[int], name: str) -> Channel:
        from phalanx.backend.hosts.mpi import MpiChannel

        return MpiChannel([self._ranks[r] for r in ranks])

    def close(self) -> None:
        pass


class _Gloo:
    """Connects ranks through Gloo, once each has proved that it reaches the others.

    If Gloo failed to connect, it would free connections that a late peer can still use, and the process would crash.
    """

    def __init__(self, meeting: Meeting, members: Members, address: str, silence_s: float) -> None:
        self._meeting, self._address, self._silence_s = meeting, address, silence_s
        self.mailbox = Mailbox(address)
        try:
            boxes = enumerate(meeting.share("mailbox", self.mailbox.name))
            self.boxes = {r: box for r, box in boxes if r != meeting.rank}
            self._reach(members)
        except PhalanxError:
            self.close()
            raise

    def _reach(self, members: Members) -> None:
        """Check that every rank reaches every rank of the other hosts; otherwise, all ranks raise the same error."""
        meeting = self._meeting
        others = [r for r in self.boxes if members.hosts[r] != members.hosts[members.rank]]
        names = [self.boxes[r] for r in others]
        failed = post(names, {"reached by": members.rank}, min(meeting.left_s / 2, CONNECT_S))
        me = members.describe(members.rank)
        lines = [
            f"{me} does not reach {members.describe(others[i])} at {names[i][0]}, port {names[i][1]}: {why}"
            for i, why in failed.items()
        ]
        lines = [line for told in meeting.share("unreached", lines) for line in told]
        while self.mailbox.read() is not None:  # drop the test messages
            pass
        if lines:
            meeting.part()
            more = [f"... and {len(lines) - _MOST_LINES} more"] * (len(lines) > _MOST_LINES)
            told = "\n".join([*lines[:_MOST_LINES], *more, _ADVICE])
            raise meeting.refusal(f"hosts can't reach each other:\n{told}", entry="unreachable")

    def connect(self, ranks: list[int], name: str) -> Channel:
        store = c10d.PrefixStore(f"bridge/{name}", self._meeting.life_store)
        timeout_s = max(self._meeting.left_s, CONNECT_S)
        return GlooChannel(store, self._meeting.rank, ranks, self._address, timeout_s, self._silence_s)

    def close(self) -> None:
        self.mailbox.close()


def _names(hellos: list[dict[str, Any]], hosts: list[list[int]]) -> tuple[str, ...]:
    """Return the name of each rank's host, numbered if several hosts share a name."""
    names = [""] * len(hellos)
    firsts = [hellos[ranks[0]]["host"] for ranks in hosts]
    for number, ranks in enumerate(hosts):
        for r in ranks:
            names[r] = firsts[number] if firsts.count(firsts[number]) == 1 else f"{firsts[number]}#{number}"
    return tuple(names)


def _own_address(meeting: Meeting, hellos: list[dict[str, Any]], members: Members) -> str:
    """Return the address at which other hosts reach this rank: that of the interface towards the master.

    Raises:
        PhalanxError: There is no such address except loopback, which other hosts can't reach.
    """
    is_one_network = len({hello["network"] for hello in hellos}) == 1
    try:
        address = address_towards(master_of(meeting.life_store)[0], is_one_network=is_one_network)
    except NetworkError as error:
        raise meeting.refusal(
            f"host {members.hosts[meeting.rank]} has no way to the other hosts: {error}. Set MASTER_ADDR to an address "
            "that every host reaches, or GLOO_SOCKET_IFNAME to the interface.",
            entry="unreachable",
        ) from error
    if is_loopback(address) and not is_one_network:
        raise meeting.refusal(
            f"host {members.hosts[meeting.rank]} would listen on its loopback ({address}), which the hosts "
            f"{', '.join(sorted(set(members.hosts)))} can't reach from each other. Set MASTER_ADDR to rank 0's address "
            "in the network, or GLOO_SOCKET_IFNAME to the interface.",
            entry="unreachable",
        )
    return address


def address_towards(master: str, *, is_one_network: bool) -> str:
    """Return the address at which other ranks reach this one: that of the interface towards the master.

    Args:
        master: Host that serves the store; empty if no host does.
        is_one_network: Whether all ranks may use loopback.

    Raises:
        NetworkError: There is no such address.
    """
    if named := environment().get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return _address_of(named)
    if master:
        return interface_towards(master, allow_loopback=is_one_network).address
    return LOOPBACK if is_one_network else outside_address()


def _address_of(name: str) -> str:
    known = interfaces()
    found = [one for one in known if one.name == name and one.address]
    if not found:
        names = ", ".join(sorted({one.name for one in known if one.address}))
        raise NetworkError(
            f"GLOO_SOCKET_IFNAME is {name}, which has no address here; there are {names}", name, "interface"
        )
    return preferred_address(found)


def master_of(store: Any) -> tuple[str, int]:
    """Return the host and port of the job's store; "" and 0 for a store without a server, such as a file."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else ("", 0)
