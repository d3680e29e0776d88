"""Views and states: who the nodes are, which of them take part in an attempt, and what each reports about itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated

from phalanx.failure.ending import Ending
from phalanx.wire.messages import between, cropped, require

Key = tuple[int, int]
"""Identity of a view: the term of the leader that chose the view, and the view's number. A greater key is newer."""
Place = tuple[str, int]
"""Address and port of an agent."""
NO_VIEW: Key = (0, 0)
MOST_RANKS = 1 << 20
"""Exclusive upper bound for the number of ranks of a node."""
_MOST_NODES = 10_000

_Name = Annotated[str, cropped(300)]
_Port = Annotated[int, between(0, 65_535)]
_NumRanks = Annotated[int, between(1, MOST_RANKS - 1)]


def _address(told: str) -> str:
    require("\0" not in told, "an address", told)
    return told


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as the other nodes know it. Nodes with the same id are the same node; the other facts may change.

    Attributes:
        id: Identifier of the agent's process; a node that is started again has a new identifier.
        host: Hostname, for people.
        address: Address at which the other nodes reach this node.
        port: Port on which the agent listens.
        num_ranks: Maximum number of ranks; in a view, the number of ranks in the view's attempt.
        position: Fixed number of the node (static rendezvous); -1: the number is not fixed.
        label: Label shared by nodes that may be lost together; empty: the node has no label.
        replica_port: Port on which the node accepts replicas of snapshots; 0: it accepts no replicas.
    """

    id: _Name
    host: _Name
    address: Annotated[str, cropped(300), _address]
    port: _Port
    num_ranks: _NumRanks
    position: int = -1
    label: _Name = ""
    replica_port: _Port = 0

    def __post_init__(self) -> None:
        require(bool(self.id), "a node's id", self.id)

    @property
    def domain(self) -> str:
        """Failure domain: the label, or the host if there is no label."""
        return self.label or self.host

    @property
    def place(self) -> Place:
        return self.address, self.port


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes whose votes count together, and their leader."""

    leader: str
    ids: tuple[str, ...]

    @property
    def succession(self) -> Iterator[str]:
        yield self.leader
        yield from (one for one in self.ids if one != self.leader)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why an attempt failed.

    Attributes:
        ending: Ending of the rank that was the cause. If a node was the cause, this is an ending with the node's host
            and first rank, which describes the event as an exception.
        num_ranks: Number of ranks that the failed rank's node has in the next attempt; -1: as many as before.
        is_free: Whether this failure costs no restart.
    """

    ending: Ending
    num_ranks: Annotated[int, between(-1, MOST_RANKS)] = -1
    is_free: bool = False

    @property
    def kind(self) -> str:
        return self.ending.last_words.kind

    @property
    def message(self) -> str:
        return self.ending.last_words.message

    @property
    def of_process(self) -> tuple[int, int]:
        return self.ending.rank, self.ending.pid


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a job; `cause` is the cause of its failure, None if it succeeded."""

    cause: Cause | None


@dataclasses.dataclass(frozen=True)
class View:
    """The nodes of one attempt, and the facts on which they agree.

    Attributes:
        members: Nodes, in the order of their ranks.
        attempt: Number of earlier attempts, however they ended.
        restarts: Number of failures so far.
        cause: Cause of the previous attempt's failure; None: that attempt did not fail.
        bases: One group of nodes for each earlier view that may have been the last to start. The leader may lead this
            view only with enough votes in each of these groups.
        places: Addresses and ports of all nodes that have taken part, at which the leader looks for restarted nodes.
        job: Id of the node that proposed the first view of this job.
    """

    key: Key
    leader: str
    members: Annotated[tuple[Node, ...], cropped(_MOST_NODES)]
    attempt: int = 0
    restarts: int = 0
    cause: Cause | None = None
    bases: tuple[Group, ...] = ()
    places: tuple[tuple[Annotated[str, _address], Annotated[int, between(1, 65_535)]], ...] = ()
    job: _Name = ""

    def __post_init__(self) -> None:
        require(any(node.id == self.leader for node in self.members), "a member, so no leader", self.leader)

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.members)

    @functools.cached_property
    def group(self) -> Group:
        return Group(self.leader, self.ids)

    def first_rank(self, node_rank: int) -> int:
        return sum(node.num_ranks for node in self.members[:node_rank])

    def name_of(self, node_rank: int) -> str:
        """Return the node's host, with the number of the node if several nodes of this view share the host."""
        host = self.members[node_rank].host
        is_shared = [node.host for node in self.members].count(host) > 1
        return f"{host} #{node_rank}" if is_shared else host


@dataclasses.dataclass(frozen=True)
class State:
    """Facts that a node repeatedly sends to all others; only its latest state counts.

    Attributes:
        term: Term in which the node has voted.
        leader: Id of the node that this node follows; its own id if it is a candidate or the leader.
        in_office: Whether the node leads with enough votes.
        key: Key of the newest view that the node has accepted.
        is_settled: Whether the node is linked to all nodes of that view, and every linked voter knows the view.
        is_idle: Whether none of the node's ranks is running.
        has_left: Whether the node has stopped its ranks in this view because it could not reach all other nodes.
        is_leaving: Whether the node is about to leave the job on purpose.
        is_done: Whether the node's ranks have succeeded in this view.
        failure: Failure of one of the node's ranks in this view.
        running: Key of the view whose nodes have to train, if the node leads.
        port: Port that the node holds for rank 0, if it is the first node of the view; 0: it holds no port yet.
        result: End of the job; None: the job has not ended.
        job: Id of the job to which the node's view belongs.
        num_ranks: Number of the node's ranks in the next attempt, unless `failure` is the cause and gives another
            number.
        cause: Reason for ending this view's attempt, if the node leads.
    """

    term: int = -1
    leader: str = ""
    in_office: bool = False
    key: Key = NO_VIEW
    is_settled: bool = False
    is_idle: bool = True
    has_left: bool = False
    is_leaving: bool = False
    is_done: bool = False
    failure: Cause | None = None
    running: Key = NO_VIEW
    port: int = 0
    result: Result | None = None
    job: _Name = ""
    num_ranks: _NumRanks = 1
    cause: Cause | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules of a job, as its flags set them.

    Attributes:
        silence_s: Seconds of silence after which a node is lost.
        last_call_s: Seconds to wait for more nodes at the start of the job, once the minimum number has joined.
        join_s: Seconds that new nodes wait for the next snapshot; then all ranks restart, even without a new snapshot.
        has_positions: Whether nodes have fixed numbers.
        spares: Number of nodes beyond the maximum that wait as spares.
        preempted_s: Seconds in which all ranks must end, once some ranks have been preempted.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int
    silence_s: float = 2.0
    last_call_s: float = 3.0
    join_s: float = 10.0
    has_positions: bool = False
    spares: int = 0
    preempted_s: float = 30.0


def seat(old: Sequence[str], present: Sequence[Node], rules: Rules) -> list[Node]:
    """Return the nodes of the next view, in order: old nodes keep their places, and newcomers fill the gaps.

    Args:
        old: Ids of the nodes of the previous view.
        present: Nodes that can take part.
    """
    if rules.has_positions:
        placed = {node.position: node for node in reversed(present)}
        return [placed[position] for position in sorted(placed)]
    stayed = {node.id: node for node in present if node.id in old}
    new = [node for node in present if node.id not in old][: rules.max_nodes - len(stayed)]
    members: list[Node] = []
    for node in old:
        if node in stayed:
            members.append(stayed[node])
        elif new:
            members.append(new.pop(0))
    return [*members, *new]
