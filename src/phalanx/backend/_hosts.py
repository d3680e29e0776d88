"""How ranks meet: they say hello in the store, those of one host map one segment, a bridge joins hosts."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from phalanx import _core
from phalanx._env import GroupOptions, Settings, environment, read_settings
from phalanx._errors import CollectiveTimeout, OutOfSharedMemory, PhalanxError
from phalanx._network import NetworkError, host_identity, interface_towards, interfaces, is_loopback, network_identity
from phalanx.backend._bridged import BridgedGroup
from phalanx.backend._channels import Channel, GlooChannel, links_to, watch_link
from phalanx.backend._failures import Failures, Place
from phalanx.backend._mailbox import Mailbox

_EARLY_S = 0.1  # before the deadline: an error then is none of lateness
_SERVE_S = 0.1  # between looks at whether those who are still awaited can't come

# Segments that this process maps, by nonce: groups made later live in the one that their members already share.
_segments: weakref.WeakValueDictionary[str, _core.Segment] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Meeting:
    """What a rank brings to the meeting of its group."""

    store: Store
    rank: int
    size: int
    name: str
    global_ranks: list[int]
    timeout_s: float
    deadline: float

    @property
    def me(self) -> int:
        return self.global_ranks[self.rank]

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def get(self, key: str, what: str) -> Any:
        """Return what `key` of the store says; a missing one is a timeout that names the ranks that did not come."""
        try:
            self.store.wait([key], timedelta(seconds=self.left_s))
            return json.loads(self.store.get(key))
        except Exception as error:
            if self.left_s > _EARLY_S:
                raise PhalanxError(
                    f"rank {self.me}: init_process_group: the job's store is gone ({error}). Look at what the rank or "
                    "launcher that serves it, most often rank 0, printed last.",
                    op="join",
                ) from error
            ranks = self._absent()
            if ranks:
                what = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come"
            raise CollectiveTimeout(
                f"rank {self.me}: init_process_group: {what} within the timeout. "
                "Start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method).",
                op="join",
                ranks=ranks,
            ) from error

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks that have not said hello, none if the store cannot tell."""
        try:
            return tuple(other for r, other in enumerate(self.global_ranks) if not self.store.check([f"hello/{r}"]))
        except Exception:  # it may have gone with the rank that served it
            return ()


def join_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    global_ranks: list[int],
    timeout_s: float,
    options: GroupOptions | None = None,
) -> tuple[Any, _core.Segment]:
    """Return the core group of `rank`, after all `size` ranks have joined it; with several hosts what bridges them.

    Args:
        store: Key-value store of this group alone.
        rank: Rank in the group.
        size: Ranks in the group.
        name: Name of the group in messages.
        global_ranks: Number of each rank in the world, for messages.
        timeout_s: Seconds for the meeting, and the default of the group's operations.
        options: In place of what the environment says.

    Raises:
        CollectiveTimeout: A rank did not come; `ranks` names it.
        PhalanxError: Ranks cannot share memory, or their hosts can't reach each other.
    """
    settings = (options or GroupOptions()).over(read_settings())
    meeting = Meeting(store, rank, size, name, global_ranks, timeout_s, time.monotonic() + timeout_s)
    meeting.set(f"hello/{rank}", _hello(settings.host, settings.bridge))
    if rank == 0:
        hellos = [meeting.get(f"hello/{r}", f"rank {g} did not answer") for r, g in enumerate(global_ranks)]
        meeting.set("hellos", hellos)
    else:
        hellos = meeting.get("hellos", f"rank {global_ranks[0]} did not say who came")
    _check(hellos, meeting)
    hosts = _hosts_by_word(hellos)
    segment, offset, hosts = _map_segment(meeting, hellos, hosts)
    here = next(ranks for ranks in hosts if rank in ranks)
    core = _core.Group.make(
        segment,
        offset,
        here.index(rank),
        len(here),
        name,
        [global_ranks[r] for r in here],
        timeout_s=timeout_s,
        stall_s=settings.stall_s,
        spin_us=settings.spin_us,
    )
    core.tune(settings.one_shot_bytes, settings.chunk_bytes)
    core.join(meeting.left_s)
    if len(hosts) == 1:
        return core, segment
    return _bridge(meeting, hellos, hosts, core, settings), segment


def _hello(pretended_host: str, bridge: str) -> dict[str, Any]:
    hello = {
        "pid": os.getpid(),
        "host": pretended_host or os.uname().nodename,
        "kernel": host_identity(pretended_host),  # who may share memory
        "network": network_identity(),
        "torch": torch.__version__,
        "bridge": bridge,
        "segments": sorted(_segments),
    }
    if bridge == "mpi":
        from phalanx.backend._mpi import world_rank

        hello["mpi"] = world_rank()
    return hello


def _check(hellos: list[dict[str, Any]], meeting: Meeting) -> None:
    for fact, what in (("torch", "versions of torch"), ("bridge", "bridges")):
        said = [hello[fact] for hello in hellos]
        if len(set(said)) > 1:
            told = ", ".join(f"{one} on rank {meeting.global_ranks[said.index(one)]}" for one in sorted(set(said)))
            raise PhalanxError(
                f"rank {meeting.me}: init_process_group: the ranks run different {what}: {told}. Give all the same.",
                op="join",
            )


def _hosts_by_word(hellos: list[dict[str, Any]]) -> list[list[int]]:
    """Return who may share memory, by what ranks say; mapping it proves it."""
    hosts: dict[str, list[int]] = {}
    for r, hello in enumerate(hellos):
        hosts.setdefault(hello["kernel"], []).append(r)
    return list(hosts.values())


# ---------------------------------------------------------------- one host: one segment


def _map_segment(
    meeting: Meeting, hellos: list[dict[str, Any]], hosts: list[list[int]]
) -> tuple[_core.Segment, int, list[list[int]]]:
    """Map this host's segment; return it, the group's place in it, and the hosts as mapping has proved them."""
    here = next(ranks for ranks in hosts if meeting.rank in ranks)
    key = f"segment/{here[0]}"
    if meeting.rank != here[0]:
        what = f"rank {meeting.global_ranks[here[0]]} offered no shared segment"
        offer = meeting.get(f"{key}/offer", what)
        segment = _accept(meeting, key, offer)
        placed = meeting.get(f"{key}/placed", what)
        _raise_refusal(placed, meeting, here[0])
        if segment is None:  # alone, and so the first of a host of its own
            segment = _core.Segment.create()
            _segments[segment.nonce] = segment
            placed = {"offset": segment.create_group(1), "ranks": [meeting.rank]}
            meeting.set(f"segment/{meeting.rank}/placed", placed)
    else:
        segment, placed = _offer(meeting, key, [hellos[r] for r in here], here)
    if len(hosts) == 1 and len(placed["ranks"]) == meeting.size:
        return segment, placed["offset"], hosts
    return segment, placed["offset"], _proved(meeting, hosts)


def _proved(meeting: Meeting, hosts: list[list[int]]) -> list[list[int]]:
    """Return the hosts as they have mapped memory, in the order of their first ranks."""
    proved = []
    for ranks in hosts:
        what = f"rank {meeting.global_ranks[ranks[0]]} did not say who shares its memory"
        together = meeting.get(f"segment/{ranks[0]}/placed", what).get("ranks", [])
        proved += [together, *([r] for r in ranks if r not in together)]
    return sorted(proved)


def _offer(
    meeting: Meeting, key: str, hellos: list[dict[str, Any]], here: list[int]
) -> tuple[_core.Segment, dict[str, Any]]:
    """Choose a segment that every rank of this host maps already, else make one; allocate the group in it."""
    shared = set(hellos[0]["segments"]).intersection(*(hello["segments"] for hello in hellos))
    try:
        if shared:
            segment = _segments[min(shared)]
            meeting.set(f"{key}/offer", {"nonce": segment.nonce})
            together = here
        else:
            segment = _core.Segment.create()
            _segments[segment.nonce] = segment
            server = _core.SegmentServer(segment)
            meeting.set(f"{key}/offer", {"nonce": segment.nonce, "socket": server.name, "host": hellos[0]["host"]})
            together = [here[0], *_serve(meeting, key, server, here[1:])]
        placed = {"offset": segment.create_group(len(together)), "ranks": together}
    except (MemoryError, PhalanxError) as error:
        placed = {"no_memory": isinstance(error, MemoryError), "refused": str(error)}
        meeting.set(f"{key}/offer", placed)  # the peers wait for it: they must fail now, not at the timeout
        meeting.set(f"{key}/placed", placed)
        _raise_refusal(placed, meeting, here[0])
    meeting.set(f"{key}/placed", placed)
    return segment, placed


def _serve(meeting: Meeting, key: str, server: _core.SegmentServer, peers: Sequence[int]) -> list[int]:
    """Hand the segment to the peers; return those that could map it."""
    num_served = 0
    refused: list[int] = []
    while True:
        num_served += server.serve(len(peers) - len(refused) - num_served, min(_SERVE_S, meeting.left_s))
        if num_served + len(refused) == len(peers):
            break
        refused = [r for r in peers if meeting.store.check([f"{key}/refused/{r}"])]
        if meeting.left_s <= 0.001:
            raise CollectiveTimeout(
                f"rank {meeting.me}: init_process_group: only {num_served} of {len(peers)} peers mapped the shared "
                "segment",
                op="join",
            )
    return [r for r in peers if r not in refused]


def _accept(meeting: Meeting, key: str, offer: dict[str, Any]) -> _core.Segment | None:
    """Return the segment that was offered, mapping it if this process does not yet; None if it can't."""
    if "refused" in offer:
        return None
    nonce = offer["nonce"]
    if nonce in _segments:
        return _segments[nonce]
    try:
        segment = _core.Segment.attach(offer["socket"], nonce, meeting.left_s)
    except (OSError, RuntimeError) as error:  # another user, or another network namespace: another host
        meeting.set(f"{key}/refused/{meeting.rank}", str(error))
        return None
    _segments[nonce] = segment
    return segment


def _raise_refusal(placed: dict[str, Any], meeting: Meeting, leader: int) -> None:
    """Raise the error of a group that its host's first rank could not make; the same on every rank there."""
    if "refused" not in placed:
        return
    if not placed["no_memory"]:
        raise PhalanxError(f"rank {meeting.me}: init_process_group: {placed['refused']}", op="join")
    raise OutOfSharedMemory(
        f"rank {meeting.me}: init_process_group: rank {meeting.global_ranks[leader]} found no shared memory for a "
        f"group of {meeting.size} ranks; raise the memory limit of the job or container",
        op="join",
        ranks=(meeting.global_ranks[leader],),
    )


# ---------------------------------------------------------------- several hosts: a bridge


def _bridge(
    meeting: Meeting, hellos: list[dict[str, Any]], hosts: list[list[int]], core: _core.Group, settings: Settings
) -> BridgedGroup:
    """Connect the hosts; return the group of all ranks."""
    place = Place(
        group=meeting.name,
        rank=meeting.rank,
        global_ranks=tuple(meeting.global_ranks),
        hosts=_names(hellos, hosts),
        pids=tuple(hello["pid"] for hello in hellos),
    )
    mine = next(ranks for ranks in hosts if meeting.rank in ranks).index(meeting.rank)
    rail = [ranks[mine] for ranks in hosts] if mine < min(map(len, hosts)) else None
    everyone = list(range(meeting.size))
    mailbox, boxes = None, {}
    if settings.bridge == "mpi":
        from phalanx.backend._mpi import MpiChannel, library

        if len({hello["mpi"] for hello in hellos}) < meeting.size:
            raise PhalanxError(
                f"rank {meeting.me}: init_process_group: PHALANX_BRIDGE=mpi, and mpi4py has loaded {library()}, which "
                "did not start these ranks. Start them with its mpirun, or install the mpi4py of the MPI that did.",
                op="join",
            )

        if len({hello["mpi"] for hello in hellos}) < len(hellos):
            raise PhalanxError(
                f"rank {meeting.me}: init_process_group: MPI numbers several ranks alike: mpi4py uses another MPI than "
                "the mpirun that started them; install mpi4py for that one",
                op="join",
            )

        def connect(ranks: list[int], name: str) -> Channel:
            return MpiChannel([hellos[r]["mpi"] for r in ranks])

    else:
        address = _own_address(meeting, hellos, place)
        mailbox = Mailbox(address)
        boxes = _share(meeting, "mailbox", mailbox.name)

        def connect(ranks: list[int], name: str) -> Channel:
            store = c10d.PrefixStore(f"bridge/{name}", meeting.store)
            return GlooChannel(
                store, ranks.index(meeting.rank), len(ranks), address, meeting.left_s, settings.silence_s
            )

    try:
        own_rail = connect(rail, f"rail{mine}") if rail else None
        to_everyone = connect(everyone, "everyone")
    except RuntimeError as error:
        if mailbox is not None:
            mailbox.close()
        raise PhalanxError(
            f"rank {meeting.me}: init_process_group: {settings.bridge} could not connect the hosts "
            f"{', '.join(dict.fromkeys(place.hosts))}: {error}\n"
            "Run phalanx doctor on them: it tests names, ports and interfaces.",
            op="join",
        ) from error
    failures = Failures(meeting.store, place, mailbox, boxes)
    for link in links_to(_master(meeting.store)[1]):
        watch_link(link, settings.silence_s)
    return BridgedGroup(
        core, hosts, meeting.rank, place, own_rail, to_everyone, failures, meeting.timeout_s, settings.stall_s,
    )  # fmt: skip


def _share(meeting: Meeting, key: str, value: Any) -> dict[int, Any]:
    """Give every rank of the group what this one brings; return what the others bring."""
    meeting.set(f"{key}/{meeting.rank}", value)
    others = [r for r in range(meeting.size) if r != meeting.rank]
    return {r: meeting.get(f"{key}/{r}", f"rank {meeting.global_ranks[r]} did not answer") for r in others}


def _names(hellos: list[dict[str, Any]], hosts: list[list[int]]) -> tuple[str, ...]:
    """Return the name of each rank's host, with a number where two are named alike."""
    names = [""] * len(hellos)
    firsts = [hellos[ranks[0]]["host"] for ranks in hosts]
    for number, ranks in enumerate(hosts):
        for r in ranks:
            names[r] = firsts[number] if firsts.count(firsts[number]) == 1 else f"{firsts[number]}#{number}"
    return tuple(names)


def _own_address(meeting: Meeting, hellos: list[dict[str, Any]], place: Place) -> str:
    """Return the address on which the other hosts reach this rank: where the route to the master leaves.

    Raises:
        PhalanxError: It would be loopback, which no other host reaches.
    """
    named = environment().get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    is_one_network = len({hello["network"] for hello in hellos}) == 1
    try:
        if named:
            address = _address_of(named)
        elif master := _master(meeting.store)[0]:
            address = interface_towards(master, allow_loopback=is_one_network).address
        else:
            address = "127.0.0.1" if is_one_network else _any_address()
    except NetworkError as error:
        raise PhalanxError(
            f"rank {meeting.me}: init_process_group: host {place.hosts[meeting.rank]} has no way to the other hosts: "
            f"{error}. Set MASTER_ADDR to an address that every host reaches, or GLOO_SOCKET_IFNAME to the interface.",
            op="join",
        ) from error
    if is_loopback(address) and not is_one_network:
        raise PhalanxError(
            f"rank {meeting.me}: init_process_group: host {place.hosts[meeting.rank]} would listen on its loopback "
            f"({address}), which the hosts {', '.join(sorted(set(place.hosts)))} can't reach from each other. Set "
            "MASTER_ADDR to rank 0's address in the network, or GLOO_SOCKET_IFNAME to the interface.",
            op="join",
        )
    return address


def _address_of(name: str) -> str:
    known = interfaces()
    found = [one for one in known if one.name == name and one.address]
    if not found:
        names = ", ".join(sorted({one.name for one in known if one.address}))
        raise NetworkError(
            f"GLOO_SOCKET_IFNAME is {name}, which has no address here; there are {names}", name, "interface"
        )
    return min(found, key=lambda one: ":" in one.address).address


def _any_address() -> str:
    found = [one for one in interfaces() if one.address and one.is_up and not one.is_loopback]
    if not found:
        raise NetworkError("no interface but loopback is up", "", "interface")
    return min(found, key=lambda one: ":" in one.address).address


def _master(store: Any) -> tuple[str, int]:
    """Return host and port of the job's store; empty and 0 for one that is no server, such as a file."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else ("", 0)
