"""Forms a group: ranks write a hello into the store, ranks of one host map one segment, and a bridge joins the hosts.

At first, the hellos only claim which ranks share a host. The first rank of each supposed host then offers a segment,
and the other ranks prove that they are on the same host by mapping the segment. A process of another user or in another
network namespace can't map it, and counts as a host of its own. A segment file that is too short for its contents, or
that may still shrink, is refused before it is touched.
"""

from __future__ import annotations

import errno
import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Store, is_gloo_available

import phalanx
from phalanx import _core
from phalanx._env import LONGEST_S, seconds
from phalanx._errors import PhalanxError
from phalanx._settings import GroupOptions, Settings, read_settings, variable_of
from phalanx._torch.lookup import num_groups_made
from phalanx.backend.deadlines import LOOK_S
from phalanx.backend.hosts.bridges import bridge
from phalanx.backend.hosts.meeting import Meeting
from phalanx.host.network import host_identity, network_identity
from phalanx.wire.store import JsonStore

_AGREED = ("one_shot_bytes", "chunk_bytes")  # settings that determine where ranks find each other's data
_ELSEWHERE = (errno.ECONNREFUSED, errno.EACCES)  # another network namespace, another user: counts as another host

# Segments that this process maps, by nonce: a later group uses a segment that all its members already map.
_segments: weakref.WeakValueDictionary[str, _core.Segment] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Joined:
    """Result of `join_group`, once all ranks of the group have joined.

    Attributes:
        core: Group of the core, or a `BridgedGroup` if the ranks are on several hosts.
        segment: Segment of this host; None for a group that awaits its ranks.
        store: Store for all further exchange between these ranks; it holds nothing from an earlier group.
        processes: Members on this host by rank in the world, for further groups of these ranks.
        life: Name of this life of the group, which only these ranks know.
        num_groups: Largest number of groups that torch has counted in any of these processes.
        settings: Settings of the group on this rank.
    """

    core: Any
    segment: _core.Segment | None
    store: Store
    processes: Mapping[int, Sequence[int]]
    life: str
    num_groups: int
    settings: Settings


def join_group(
    store: Store,
    rank: int,
    size: int,
    name: str,
    global_ranks: list[int],
    timeout_s: float,
    options: GroupOptions | None = None,
    *,
    is_in_place: bool = False,
    processes: Mapping[int, Sequence[int]],
    op: str = "join",
    prepare: Callable[[Meeting], None] = lambda meeting: None,
) -> Joined:
    """Return the group after all `size` ranks have joined.

    Args:
        store: Store of the group. It may hold leftovers of an earlier group.
        rank: Number of this rank in the group.
        size: Number of ranks in the group.
        name: Name of the group in messages.
        global_ranks: Rank in the world of each rank of the group.
        timeout_s: Seconds for joining, and the default timeout of the group's operations.
        options: Options that take precedence over the environment.
        is_in_place: Whether the program asked for Gloo, so that other ranks may wait in Gloo itself.
        processes: Known members on this host, by rank in the world: pid, start time (0: unknown) and pid namespace.
        op: Purpose of the meeting, in messages: ``join``, ``reconfigure`` or ``shrink``.
        prepare: Function called before this rank says hello. If it raises, the other ranks raise the same error.

    Raises:
        CollectiveTimeout: A rank did not join in time; the error's `ranks` names it.
        RankFailed: A rank of this host died before it joined.
        PhalanxError: A rank can't join and says why, ranks can't share memory, or hosts can't reach each other.
        ValueError: A setting or the timeout of this rank is out of its range.
    """
    limit_s = min(timeout_s, LONGEST_S) if timeout_s > 0 else LONGEST_S
    deadline = time.monotonic() + limit_s
    meeting = Meeting(JsonStore(store), rank, size, name, global_ranks, limit_s, deadline, is_in_place, processes, op)
    with meeting.joining():
        seconds("timeout", timeout_s)
        for number, member in enumerate(global_ranks):
            _, started, _ = processes.get(member, (0, 0, 0))
            if started:
                meeting.watch(number, processes[member])
        prepare(meeting)
        settings = (options or GroupOptions()).over(read_settings())
        core, segment, num_groups = _join(meeting, settings)
    return Joined(core, segment, meeting.life_store, meeting.processes, meeting.life, num_groups, settings)


def _join(meeting: Meeting, settings: Settings) -> tuple[Any, _core.Segment, int]:
    rank, global_ranks = meeting.rank, meeting.global_ranks
    meeting.stall_s = settings.stall_s
    if settings.verify and not is_gloo_available():
        raise ValueError(
            f"{variable_of('verify')}={settings.verify} needs Gloo, which this torch is built without; unset it"
        )
    segments = _kept_segments()
    hellos, place = meeting.gather(_hello(settings, segments), functools.partial(_place, segments, meeting))
    if refusal := _disagreement(hellos, meeting):
        raise refusal
    hosts = _hosts_by_word(hellos)
    here = next(ranks for ranks in hosts if rank in ranks)
    for r in here:
        if r not in meeting.watches or meeting.processes.get(global_ranks[r]) != hellos[r]["process"]:
            meeting.watch(r, hellos[r]["process"])
    meeting.processes = {global_ranks[r]: hellos[r]["process"] for r in here}
    if place is not None:
        segment, offset = _placed(meeting, segments, place), place["offset"]
    else:
        segment, offset, hosts = _map_segment(meeting, hellos, hosts)
        here = next(ranks for ranks in hosts if rank in ranks)
    core = _core.Group.make(
        segment,
        offset,
        here.index(rank),
        len(here),
        meeting.name,
        [global_ranks[r] for r in here],
        timeout_s=meeting.timeout_s,
        stall_s=settings.stall_s,
        spin_us=settings.spin_us,
    )
    core.tune(settings.one_shot_bytes, settings.chunk_bytes)
    try:
        core.join(meeting.left_s, meeting.look)
    except PhalanxError:
        meeting.look()  # raises the error of the rank that ended the join
        raise
    if len(hosts) > 1:
        core = bridge(meeting, hellos, hosts, core, settings)
    return core, segment, max(hello["groups"] for hello in hellos)


def whoami(settings: Settings) -> dict[str, Any]:
    """Return the facts about this process that other ranks need before they can meet this process."""
    return {
        "process": _core.identity(),
        "host": settings.host or os.uname().nodename,
        "kernel": host_identity(settings.host),  # ranks with the same value may share memory
        "network": network_identity(),
        "phalanx": phalanx.__version__,
        "torch": torch.__version__,
    }


def _kept_segments() -> dict[str, _core.Segment]:
    """Return the segments that this process maps, by nonce. As long as the result exists, they stay mapped."""
    segments = [reference() for reference in _segments.valuerefs()]
    return {segment.nonce: segment for segment in segments if segment is not None}


def _hello(settings: Settings, segments: Mapping[str, _core.Segment]) -> dict[str, Any]:
    hello = {
        **whoami(settings),
        "pid": os.getpid(),
        "bridge": settings.bridge,
        "verify": settings.verify,
        "segments": sorted(segments),
        "groups": num_groups_made(),
        **{name: getattr(settings, name) for name in _AGREED},
    }
    if settings.bridge == "mpi":
        from phalanx.backend.hosts.mpi import world_rank

        hello["mpi"] = world_rank()
    return hello


def _disagreement(hellos: list[dict[str, Any]], meeting: Meeting) -> PhalanxError | None:
    """Return the error if the ranks do not agree on what must be the same on all of them."""
    whats = {"phalanx": "versions of phalanx", "torch": "versions of torch", "bridge": "bridges"}
    whats |= {name: f"values of {variable_of(name)}" for name in (*_AGREED, "verify")}
    for fact, what in whats.items():
        said = [hello[fact] for hello in hellos]
        if len(set(said)) > 1:
            firsts = {one or "none": meeting.global_ranks[said.index(one)] for one in sorted(set(said))}
            told = ", ".join(f"{one} on rank {rank}" for one, rank in firsts.items())
            return meeting.refusal(
                f"the ranks run different {what}: {told}. Use the same on every rank.", entry="different-versions"
            )
    return None


def _hosts_by_word(hellos: list[dict[str, Any]]) -> list[list[int]]:
    """Return the ranks by host, as the hellos claim; only mapping the segment proves the claim."""
    hosts: dict[str, list[int]] = {}
    for r, hello in enumerate(hellos):
        hosts.setdefault(hello["kernel"], []).append(r)
    return list(hosts.values())


def _place(
    segments: Mapping[str, _core.Segment], meeting: Meeting, hellos: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """On rank 0: if all ranks agree, share a host and already map one segment, allocate the group; return its place."""
    shared = _shared(hellos) if len(_hosts_by_word(hellos)) == 1 else set()
    if not shared or _disagreement(hellos, meeting):  # ranks that disagree would never join and free the memory
        return None
    nonce = min(shared)
    return {"nonce": nonce, "offset": segments[nonce].create_group(len(hellos))}


def _placed(meeting: Meeting, segments: Mapping[str, _core.Segment], place: dict[str, Any]) -> _core.Segment:
    """Return the segment in which rank 0 has placed the group."""
    if place["nonce"] not in segments:
        raise meeting.refusal(
            f"rank {meeting.global_ranks[0]} placed the group in a segment that this rank does not map. Let nothing "
            "else write to the job's store.",
            entry="store-lost",
        )
    return segments[place["nonce"]]


def _shared(hellos: list[dict[str, Any]]) -> set[str]:
    """Return the nonces of the segments that all these ranks map."""
    return set(hellos[0]["segments"]).intersection(*(hello["segments"] for hello in hellos))


def _map_segment(
    meeting: Meeting, hellos: list[dict[str, Any]], hosts: list[list[int]]
) -> tuple[_core.Segment, int, list[list[int]]]:
    """Map this host's segment; return the segment, the group's offset in it, and the ranks by host.

    Only ranks that have mapped the same segment count as ranks of one host.
    """
    here = next(ranks for ranks in hosts if meeting.rank in ranks)
    key = f"segment/{here[0]}"
    if meeting.rank != here[0]:
        what = f"rank {meeting.global_ranks[here[0]]} offered no shared segment"
        offer = meeting.get(f"{key}/offer", what)
        segment = _accept(meeting, key, offer)
        placed = meeting.get(f"{key}/placed", what)
        if segment is None:  # out of reach: this rank counts as a host of its own
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
    """Return the ranks by host, according to which segment each has mapped; hosts are ordered by their first rank."""
    proved = []
    for ranks in hosts:
        what = f"rank {meeting.global_ranks[ranks[0]]} did not say who shares its memory"
        together = meeting.get(f"segment/{ranks[0]}/placed", what).get("ranks", [])
        proved += [together, *([r] for r in ranks if r not in together)]
    if sorted(r for ranks in proved for r in ranks) != list(range(meeting.size)) or not all(proved):
        raise meeting.refusal(
            f"the ranks disagree on who shares memory: {proved}. Let nothing else write to the job's store.",
            entry="store-lost",
        )
    return sorted(proved)


def _offer(
    meeting: Meeting, key: str, hellos: list[dict[str, Any]], here: list[int]
) -> tuple[_core.Segment, dict[str, Any]]:
    """Choose a segment that every rank of this host already maps, or create one; allocate the group in this segment."""
    if shared := _shared(hellos):
        segment = _segments[min(shared)]
        meeting.set(f"{key}/offer", {"nonce": segment.nonce, "socket": ""})
        together = here
    else:
        segment = _core.Segment.create()
        _segments[segment.nonce] = segment
        server = _core.SegmentServer(segment)
        meeting.set(f"{key}/offer", {"nonce": segment.nonce, "socket": server.name})
        together = [here[0], *_serve(meeting, key, server, here[1:])]
    placed = {"offset": segment.create_group(len(together)), "ranks": together}
    meeting.set(f"{key}/placed", placed)
    return segment, placed


def _serve(meeting: Meeting, key: str, server: _core.SegmentServer, peers: Sequence[int]) -> list[int]:
    """Hand the segment to the peers; return those that mapped it."""
    num_served = 0
    refused: list[int] = []
    while True:
        num_served += server.serve(len(peers) - len(refused) - num_served, min(LOOK_S, meeting.left_s))
        if num_served + len(refused) == len(peers):
            break
        meeting.look()
        refused = [r for r in peers if meeting.has(f"{key}/refused/{r}")]
        if meeting.left_s <= 0.001:
            raise meeting.too_late(f"only {num_served} of {len(peers)} peers mapped the shared segment")
    return [r for r in peers if r not in refused]


def _accept(meeting: Meeting, key: str, offer: dict[str, Any]) -> _core.Segment | None:
    """Return the offered segment, after mapping it if necessary; None if this process can't reach it."""
    nonce = offer["nonce"]
    if nonce in _segments:
        return _segments[nonce]
    try:
        segment = _core.Segment.attach(offer["socket"], nonce, meeting.left_s)
    except OSError as error:
        if error.errno not in _ELSEWHERE:
            raise
        meeting.set(f"{key}/refused/{meeting.rank}", str(error))
        return None
    _segments[nonce] = segment
    return segment
