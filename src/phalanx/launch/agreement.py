"""Which nodes train together: what one of them knows of the others, and what it does next.

Nothing in here waits, reads a clock or owns a socket, so a test can play thousands of accidents in a second. `links`
carries what nodes tell each other, `agent` obeys what is ordered.

Every node tells every other its `State`, when it changes and twice a second. What they agree on is a `View`: who takes
part in one attempt. A view has a leader. It chooses the next one when an attempt has ended, and no node is special: if
it is lost, the first that lives in the order of the view comes next.

Two sides of a cut network never both go on, because

- a leader needs the votes of more than half of the nodes of the last view, or of half of them with that view's leader,
  and a node gives one vote in a term;
- a view starts once all its nodes have accepted it, and once they have shown it to everybody they can reach; until it
  is known to have started, the views that it follows have to agree as well (joint consensus, as in Raft);
- a vote and a node's right to train last as long as its answers are fresh, which is shorter than the time after which
  the others call it lost; over a new link only what answers us is fresh;
- a node is dead when its system refuses connections to its port; the first living node in the order may count its
  vote, unless its last answer was too old: then it may have voted for others.

A process that is started anew where nodes look for the job, and reaches nobody, can't know of the others and begins a
job of its own. What the two write is fenced by `checkpoint.claim`. When they meet, the younger one gives way: its nodes
begin anew, and join the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from phalanx._text import in_runs, plural
from phalanx.launch.deadlines import CAUSE_S

Key = tuple[int, int]
"""Term of the leader that chose a view, and the view's number; a greater one is newer."""
Place = tuple[str, int]
"""Address and port of an agent."""
NO_VIEW: Key = (0, 0)
NODE_LOST = "NodeLost"
"""Kind of a cause that is no rank's."""
OTHER_SIDE = "OtherSide"
"""Kind of a cause that ends a job which is the lesser side of another: its nodes join that."""
_FRESH = 0.9  # of the time after which a silent node is lost
_MAX_PLACES = 1000
_SETTLE_S = 1.0  # for nodes that are linked to vote; between terms of one that gets no votes; to be dialed


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as the others know it. Two are the same node if their ids are: what else is known of it may change.

    Attributes:
        id: Of this agent's process; a node that is started again has another.
        host: Its hostname, for people.
        address: Address at which the other nodes reach it.
        port: Port on which its agent listens.
        num_ranks: Largest number of its ranks; in a view, that of its attempt.
        position: Its number, where nodes have fixed ones; else -1.
        label: What it shares with nodes that may be lost together with it; empty: nothing.
        replica_port: Port on which it takes replicas of snapshots; 0: it takes none.
    """

    id: str
    host: str
    address: str
    port: int
    num_ranks: int
    position: int = -1
    label: str = ""
    replica_port: int = 0

    @property
    def domain(self) -> str:
        """What it is lost together with: nodes of the same label, or else of the same host."""
        return self.label or self.host

    @property
    def place(self) -> Place:
        return self.address, self.port


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes whose votes count together, and who led them."""

    leader: str
    ids: tuple[str, ...]

    @property
    def succession(self) -> Iterator[str]:
        yield self.leader
        yield from (one for one in self.ids if one != self.leader)


@dataclasses.dataclass(frozen=True)
class View:
    """Who takes part in one attempt.

    Attributes:
        members: In the order of their ranks.
        attempt: Attempts before it, for whatever reason they ended.
        restarts: Failures so far.
        cause: Why the attempt before it failed, as `nodes.cause_of` wrote it; None: it did not.
        bases: Groups of the views that may have started last.
        places: Addresses and ports of all nodes that have taken part: there one that is started again is looked for.
        job: Id of the node that proposed the first view of this job.
    """

    key: Key
    leader: str
    members: tuple[Node, ...]
    attempt: int = 0
    restarts: int = 0
    cause: Mapping[str, Any] | None = None
    bases: tuple[Group, ...] = ()
    places: tuple[Place, ...] = ()
    job: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.members)

    @property
    def group(self) -> Group:
        return Group(self.leader, self.ids)

    def first_rank(self, node_rank: int) -> int:
        return sum(node.num_ranks for node in self.members[:node_rank])


@dataclasses.dataclass(frozen=True)
class State:
    """What a node tells the others, again and again; what comes last counts.

    Attributes:
        term: The term in which it has voted.
        leader: Whom it follows; itself: it would lead.
        in_office: Whether it leads with enough votes.
        key: The view that it has accepted.
        is_settled: Whether it is linked to all nodes of it, and all that it is linked to know it.
        is_idle: Whether none of its ranks run.
        has_left: Whether it has stopped its ranks in this view, because it could not reach all others.
        is_leaving: Whether it will be gone soon, and nothing is wrong with that.
        is_done: Whether its ranks have come to their end in this view.
        failure: How one of its ranks has failed in this view.
        running: As leader, the view that its nodes are to train in.
        port: Port that the first node of this view holds for rank 0; 0: not yet.
        result: How the job ended, {"cause": ...}; None: it has not.
        job: That of its view.
        num_ranks: Number of its ranks in the next attempt, unless a failure of its own says another.
        cause: As leader, why it has ended this view's attempt.
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
    failure: Mapping[str, Any] | None = None
    running: Key = NO_VIEW
    port: int = 0
    result: Mapping[str, Any] | None = None
    job: str = ""
    num_ranks: int = 1
    cause: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What the job's flags ask for.

    Attributes:
        silence_s: Seconds of silence after which a node is lost.
        last_call_s: Seconds to wait for more nodes when the fewest are there, at the job's start.
        join_s: Seconds that new nodes wait for the ranks to take a snapshot, before all start again without.
        has_positions: Whether nodes have fixed numbers.
        spares: Number of nodes beyond the largest that are to wait.
        room_s: Seconds for all ranks to end, once some have made room.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int
    silence_s: float = 2.0
    last_call_s: float = 3.0
    join_s: float = 10.0
    has_positions: bool = False
    spares: int = 0
    room_s: float = 30.0


class Acts(Protocol):
    """What an agreement does to the world."""

    def hand(self, peer: str, view: View, is_started: bool) -> None:
        """Send a view to a peer."""

    def order(self, what: dict[str, Any]) -> None:
        """Have the supervisor "start" or "stop" its ranks, "reserve" a port or "watch" for their next snapshot."""


@dataclasses.dataclass
class _Peer:
    """A linked node."""

    node: Node
    echo_s: float  # when we sent what it had heard last over this link
    state: State = dataclasses.field(default_factory=State)
    handed: Key = NO_VIEW
    handed_s: float = 0.0


class Agreement:
    """One node's part.

    Args:
        me: This node.
        rules: The same on all nodes.
        acts: Told what to do.
        is_root: Whether this node is where the others look for the job; it leads first.
        now_s: The time, on any clock that only grows.

    Attributes:
        view: The newest view that this node knows.
        result: How the job ended, {"cause": ...}; None: it goes on.
        out: Failure for which this node leaves the job, which goes on; None: it stays.
    """

    def __init__(self, me: Node, rules: Rules, acts: Acts, *, is_root: bool, now_s: float) -> None:
        self.me = me
        self.view: View | None = None
        self.result: Mapping[str, Any] | None = None
        self.out: Mapping[str, Any] | None = None
        self._rules, self._acts, self._is_root = rules, acts, is_root
        self._now_s = self._born_s = self._quiet_since_s = now_s
        self._peers: dict[str, _Peer] = {}  # in the order in which they came
        self._strangers: dict[str, _Peer] = {}  # linked nodes of another job that began as this one did
        self._job_born_s = now_s
        self._dead: set[str] = set()
        self._known: dict[str, State] = {}  # of each member, also when it is lost: what it said last in this view
        self._term, self._leader = (0, me.id) if is_root else (-1, "")
        self._raised_s = -_SETTLE_S
        self._has_started = False  # whether the view is known to have started
        self._running: Key = NO_VIEW
        self._enough_since_s: float | None = None
        self._failed_since_s: float | None = None
        self._cause: Mapping[str, Any] | None = None  # of the attempt that we have ended
        self._port = 0
        self._is_leaving = False
        self._forget_attempt()
        self._ranks = "idle"  # or "running", "stopping"
        self._trained_in: Key = NO_VIEW

    def _forget_attempt(self) -> None:
        self._is_done = self._has_left = False
        self._failure: Mapping[str, Any] | None = None
        self._failed_since_s = None
        self._is_watched = self._has_snapshot = False
        self._room_since_s: float | None = None  # since when there are newcomers, and room for them
        self._asked = 0  # ranks that this node would have in the next attempt; 0: as many as now
        self._cause = None
        self._port = 0
        self._has_asked_for_port = False
        self._known = {}

    # ------------------------------------------------------------ what happens

    def linked(self, node: Node, now_s: float) -> None:
        """Take in that a node can be talked to."""
        self._strangers.pop(node.id, None)
        self._peers[node.id] = _Peer(node, -math.inf)  # it may not have heard from us yet
        self._dead.discard(node.id)
        self._quiet_since_s = now_s

    def unlinked(self, peer: str, *, has_ended: bool, now_s: float) -> None:
        """Take in that a node can't be talked to any more.

        Args:
            has_ended: Whether its process has ended, as its system says; otherwise it was silent.
        """
        if self._strangers.pop(peer, None) is not None:
            return
        gone = self._peers.pop(peer)
        if has_ended and self._is_fresh(gone, now_s):
            self._dead.add(peer)

    def heard(self, peer: str, state: State, echo_s: float, age_s: float = 0.0) -> None:
        """Take in what a node says of itself.

        Args:
            echo_s: When we sent what it had heard last from us.
            age_s: Time for which its job has lasted.
        """
        if self.view is not None and state.job not in ("", self.view.job):
            self._meet_stranger(peer, state, age_s)
            return
        if peer in self._strangers:
            self._peers[peer] = self._strangers.pop(peer)
        it = self._peers[peer]
        it.state, it.echo_s = state, max(it.echo_s, echo_s)
        if self.view is not None and state.key == self.view.key:
            self._known[peer] = state

    def _meet_stranger(self, peer: str, state: State, age_s: float) -> None:
        """Of two jobs that began as one and the same, let the younger give way, whatever its views are."""
        if peer in self._peers:
            self._strangers[peer] = self._peers.pop(peer)
        if age_s > self.job_age_s and state.result is None and self.result is None:
            self.result = {"cause": _other_side(self._strangers[peer].node.host)}

    def handed(self, view: View, *, is_started: bool, age_s: float = 0.0) -> None:
        """Take in a view that another node knows, of a job that has lasted for `age_s`."""
        if self.view is not None and view.job != self.view.job:
            return
        if self.view is None:
            self._job_born_s = self._now_s - age_s
        if view.key > self._key:
            self._judge(view.cause)
            self.view, self._has_started, self._running = view, False, NO_VIEW
            self._forget_attempt()
            for peer in self._peers.values():
                if peer.state.key == view.key:
                    self._known[peer.node.id] = peer.state
        self._has_started |= is_started and view.key == self._key

    def _judge(self, cause: Mapping[str, Any] | None) -> None:
        """Leave the job if a failure after which this node has too few ranks was the cause."""
        failure = self._failure
        if failure is None or cause is None or failure.get("num_ranks") != 0:
            return
        if all(failure.get(name) == cause.get(name) for name in ("rank", "pid")):
            self.out = failure

    def ranks_ended(self, how: str, cause: Mapping[str, Any] | None) -> None:
        """Take in how this node's ranks ended: "succeeded", "failed" or "stopped"."""
        if self._ranks == "running" and self._trained_in == self._key:
            self._is_done = how == "succeeded"
            self._failure = cause if how == "failed" else None
        self._ranks = "idle"

    def snapshot_is_whole(self) -> None:
        """Take in that the ranks have just taken a snapshot, after "watch" was ordered."""
        self._has_snapshot = True

    def leave(self) -> None:
        """Take in that this node is to be gone soon."""
        self._is_leaving = True

    def ask_for(self, num_ranks: int) -> None:
        """Take in that this node would go on with more ranks: from the next snapshot, or as the attempt ends anyway."""
        if self._ranks != "idle" and self._trained_in == self._key:
            self._asked = num_ranks

    def reserved(self, port: int) -> None:
        """Take in which port the supervisor holds for rank 0."""
        self._port = port

    def lead_first(self, now_s: float, *, may: bool) -> None:
        """Take in whether this node may begin the job; it does if nobody has."""
        if may and not self._is_root:
            self._born_s = now_s
        self._is_root = may

    # ------------------------------------------------------------ what is known

    @property
    def _key(self) -> Key:
        return self.view.key if self.view is not None else NO_VIEW

    @property
    def leads(self) -> bool:
        return self._leader == self.me.id

    @property
    def state(self) -> State:
        return State(
            self._term,
            self._leader,
            self._is_in_office(),
            self._key,
            self._is_settled(),
            self._ranks == "idle",
            self._has_left,
            self._is_leaving or self.out is not None,
            self._is_done,
            self._failure,
            self._running,
            self._port,
            self.result,
            self.view.job if self.view is not None else "",
            self._asked or self._own_num_ranks(),
            self._cause,
        )

    def _own_num_ranks(self) -> int:
        members = self.view.members if self.view is not None else ()
        return next((node.num_ranks for node in members if node.id == self.me.id), self.me.num_ranks)

    @property
    def job_age_s(self) -> float:
        """The time for which the job has lasted: since its first view was proposed."""
        return self._now_s - self._job_born_s if self.view is not None else 0.0

    @property
    def trains(self) -> bool:
        """Whether this node's ranks run."""
        return self._ranks == "running"

    @property
    def all_leave(self) -> bool:
        """Whether nobody would be left to go on if this node goes: neither another node of the view nor a spare."""
        return all(peer.state.is_leaving for peer in self._peers.values())

    @property
    def is_next_to_leave(self) -> bool:
        """Whether no node before this one in the view has said that it is leaving.

        Nodes leave one after the other, each in an attempt of its own: one may keep the replica of another's part.
        """
        before = self.view.ids[: self.view.ids.index(self.me.id)] if self.view is not None and self.is_member else ()
        return not any(self._known[node].is_leaving for node in before if node in self._known)

    @property
    def others_stay(self) -> bool:
        """Whether a node can be talked to that does not know yet how the job has ended."""
        return any(peer.state.result is None for peer in self._peers.values())

    @property
    def is_member(self) -> bool:
        return self.view is not None and self.me.id in self.view.ids

    def wanted(self, now_s: float) -> set[Place]:
        """Return where this node is to connect to.

        Of two nodes of a view the later one does; the earlier one too, when that has not come to pass.
        """
        if self.view is None:
            return set()
        members = self.view.members
        if self.is_member and now_s - self._quiet_since_s < _SETTLE_S:
            members = members[: self.view.ids.index(self.me.id)]
        places = {node.place for node in members if node.id not in self._dead}
        if self.leads:
            places |= {*self.view.places}
        return places - {self.me.place} - {peer.node.place for peer in self._peers.values()}

    @property
    def is_under_way(self) -> bool:
        """Whether the job trains, here or on other nodes."""
        leader = self._peers.get(self._leader)
        return (leader.state.running if leader is not None else self._running) != NO_VIEW

    def waits_for(self) -> str:
        """Return what this node waits for, for people; empty: for nothing."""
        if (self.is_under_way and self.is_member) or self.result is not None:
            return ""
        view, rules = self.view, self._rules
        nodes = [self.me, *(peer.node for peer in self._peers.values())]
        if self.is_under_way:
            if view is None or len(view.members) < rules.max_nodes:
                return ""
            if rules.has_positions:
                return (
                    f"all nodes of the job are there: another one has --node-rank {self.me.position}, as this one has"
                )
            return (
                f"all {len(view.members)} nodes of the job are there: this one is a spare, and waits to take the place "
                "of one that is lost"
            )
        leader = self._peers.get(self._leader)
        is_in_office = self._is_in_office() if self.leads else leader is not None and leader.state.in_office
        if view is not None and not is_in_office:
            return self._why_no_majority(view)
        busy = [peer.node.host for peer in self._peers.values() if not peer.state.is_idle]
        if busy and self._ranks == "idle":
            return f"waiting for the ranks on {', '.join(busy)} to end"
        if not self.leads:
            return self._missing(nodes)
        cause = (self._cause or self._cause_of_end(view)) if view is not None and self._has_started else None
        loss = f"{cause['message']}; " if cause is not None and cause["kind"] == NODE_LOST else ""
        missing = self._missing(nodes)
        return missing and f"{loss}{missing}"

    def _missing(self, nodes: Sequence[Node]) -> str:
        """Return what `nodes`, which are here, lack for a beginning, for people; empty: nothing that is known."""
        rules, here = self._rules, ", ".join(node.host for node in nodes)
        if rules.has_positions:
            positions = [node.position for node in nodes]
            if twice := sorted({one for one in positions if positions.count(one) > 1}):
                owners = ", ".join(node.host for node in nodes if node.position == twice[0])
                return f"several nodes have --node-rank {twice[0]}: {owners}"
            missing = {*range(rules.max_nodes)} - {*positions}
            noun = plural(len(missing), "node")
            return f"waiting for the {noun} with --node-rank {in_runs([*missing])}; so far: {here}" if missing else ""
        if len(nodes) < rules.min_nodes:
            return f"waiting for nodes: {len(nodes)} of at least {rules.min_nodes} are here ({here})"
        return ""

    def _why_no_majority(self, view: View) -> str:
        """Return which nodes of a view this one and those that it reaches wait for; empty if all are here."""
        lost = [node.host for node in view.members if not self._is_with_us(node.id)]
        left = [node.host for node in view.members if self._is_with_us(node.id)]
        new = {peer.node.host for peer in self._peers.values()} | {self.me.host}
        again = [host for host in lost if host in new and host not in left]
        if not lost:
            return ""
        if not again:
            return (
                f"of {len(view.members)} nodes, {', '.join(lost)} can't be reached; those that are left "
                f"({', '.join(left)}) are no majority, so others may be going on: waiting for them"
            )
        has = "has" if len(again) == 1 else "have"
        return (
            f"{', '.join(again)} {has} been started again and can't tell what became of the job, which others may be "
            "going on with: waiting for them. If no host trains any more, end this command on all, then start it again"
        )

    def _is_fresh(self, peer: _Peer, now_s: float) -> bool:
        return now_s - peer.echo_s < _FRESH * self._rules.silence_s

    def _is_with_us(self, node: str) -> bool:
        peer = self._peers.get(node)
        return node == self.me.id or (peer is not None and self._is_fresh(peer, self._now_s))

    def _follows(self, node: str) -> bool:
        """Whether a node has voted for this one, and can't have voted for another since."""
        if not self._is_with_us(node) or node == self.me.id:
            return node == self.me.id
        state = self._peers[node].state
        return state.leader == self.me.id and state.term == self._term

    def _has_quorum(self, group: Group) -> bool:
        votes = {node for node in group.ids if self._follows(node)}
        before = []
        for node in group.succession:
            if node == self.me.id:
                break
            before.append(node)
        if all(node in votes or node in self._dead for node in before):
            votes |= self._dead & {*group.ids}
        return 2 * len(votes) > len(group.ids) or (2 * len(votes) == len(group.ids) and group.leader in votes)

    def _bases(self) -> tuple[Group, ...]:
        """Return the groups of the views that may have started last, as far as this node can know."""
        if self.view is None:
            return (Group(self.me.id, (self.me.id,)),)
        if self._has_started:
            return (self.view.group,)
        is_ours = self.view.leader == self.me.id  # and then we know that it has not started, and will not
        return self.view.bases if is_ours else tuple(dict.fromkeys((*self.view.bases, self.view.group)))

    def _is_in_office(self) -> bool:
        if not self.leads or (self.view is not None and not self.is_member):
            return False
        if self.view is None and (not self._is_root or self._now_s - self._born_s < _SETTLE_S):
            return False
        return all(self._has_quorum(base) for base in self._bases())

    def _is_settled(self) -> bool:
        if self.view is None:
            return False
        if self.view.ids[0] == self.me.id and not self._port:
            return False
        here = all(node == self.me.id or node in self._peers for node in self.view.ids)
        voters = {node for group in (*self.view.bases, self.view.group) for node in group.ids}
        return here and all(p.state.key >= self._key for p in self._peers.values() if p.node.id in voters)

    # ------------------------------------------------------------ what follows

    def decide(self, now_s: float) -> None:
        """Do what follows from all that has happened."""
        self._now_s = now_s
        while True:
            before = (self.state, self.view, self._ranks, self._has_asked_for_port)
            if self.result is None:
                self._choose_leader()
                self._hand_on()
                self._reserve()
                if self.leads:
                    self._lead()
                self._run()
            if before == (self.state, self.view, self._ranks, self._has_asked_for_port):
                return

    def _holder(self) -> _Peer | None:
        """Return the node that says it is in office; of several, the one with the newest term."""
        holders = [
            peer
            for peer in self._peers.values()
            if peer.state.in_office and peer.state.leader == peer.node.id and peer.state.key >= self._key
        ]
        return max(holders, key=lambda peer: peer.state.term, default=None)

    def _preferred(self) -> str:
        """Return who should lead, as seen from here; empty: unknown."""
        if (holder := self._holder()) is not None:
            return holder.node.id
        if self.view is None:
            leading = (peer.node.id for peer in self._peers.values() if peer.state.leader == peer.node.id)
            return self.me.id if self._is_root else next(leading, "")
        for node in self.view.group.succession:
            if node in self._peers or (node == self.me.id and self.is_member):
                return node
        return ""

    def _choose_leader(self) -> None:
        others = [peer.state.term for peer in self._peers.values() if peer.state.leader != self.me.id]
        newest = max(others, default=-1)  # of those who can't vote for this node in a term that is no newer
        holder = self._holder()
        if self.leads and self._is_in_office():
            if holder is not None and holder.state.term > self._term:
                self._vote(holder)
            elif newest >= self._term:
                self._term = newest + 1
            return
        current = self._peers.get(self._leader)
        if current is not None and current.state.leader == self._leader:
            if current.state.term > self._term:
                self._term = current.state.term
            if holder is not None and not current.state.in_office:
                self._vote(holder)
            return
        preferred = self._preferred()
        if preferred == self.me.id:
            may_raise = self._now_s - self._raised_s >= _SETTLE_S
            if not self.leads or (newest >= self._term and may_raise):
                self._term, self._leader, self._raised_s = max(newest, self._term) + 1, self.me.id, self._now_s
                self._running = NO_VIEW
        elif preferred:
            self._vote(self._peers[preferred])

    def _vote(self, peer: _Peer) -> None:
        """Follow a node that leads in a newer term."""
        if peer.state.leader == peer.node.id and peer.state.term > self._term:
            self._term, self._leader, self._running = peer.state.term, peer.node.id, NO_VIEW

    def _hand_on(self) -> None:
        for peer in [*self._peers.values()]:
            is_due = peer.handed != self._key or self._now_s - peer.handed_s >= _SETTLE_S
            if self.view is not None and peer.state.key < self._key and is_due:
                peer.handed, peer.handed_s = self._key, self._now_s
                self._acts.hand(peer.node.id, self.view, self._has_started)

    def _reserve(self) -> None:
        if self.view is not None and self.view.ids[0] == self.me.id and not self._has_asked_for_port:
            self._has_asked_for_port = True
            self._acts.order({"reserve": True})

    # ------------------------------------------------------------ leading

    def _lead(self) -> None:
        view = self.view
        if view is not None and self._has_started and self._all_are_done(view):
            self.result = {"cause": None}
        elif view is not None and self._running == view.key:
            self._watch(view)
        elif self._is_in_office():
            if view is not None and self._may_start(view):
                self._has_started, self._running = True, view.key
            elif view is None or not self._is_coming(view):
                self._propose()

    def _watch(self, view: View) -> None:
        """End the attempt if it can't go on, or could with more nodes."""
        cause = self._cause_of_end(view)
        if cause is not None and (patience_s := self._patience_s(view, cause)):
            if self._failed_since_s is None:
                self._failed_since_s = self._now_s
            if self._now_s - self._failed_since_s < patience_s:
                return
        if cause is not None or self._gone(view) or self._may_grow(view):
            self._cause, self._running = cause, NO_VIEW

    def _patience_s(self, view: View, cause: Mapping[str, Any]) -> float:
        """Return how long an attempt goes on after a failure: until its cause shows, or all ranks have made room."""
        if cause.get("made_room"):
            told = [self._peers[node].state for node in view.ids if node in self._peers]
            return 0.0 if self._ranks == "idle" and all(state.is_idle for state in told) else self._rules.room_s
        return CAUSE_S if cause["is_victim"] else 0.0

    def _may_grow(self, view: View) -> bool:
        """Whether the attempt can end now to go on with more nodes, or with more ranks on one.

        That is when a snapshot is whole. New nodes do not wait for ever for one that does not come.
        """
        has_room = len(view.members) < self._rules.max_nodes and bool(self._newcomers(view))
        has_more = self._asked or any(
            node.id in self._known and self._known[node.id].num_ranks > node.num_ranks for node in view.members
        )
        if self._is_done or any(state.is_done for state in self._known.values()):
            has_more = False
        if not has_room:
            self._room_since_s = None
        elif self._room_since_s is None:
            self._room_since_s = self._now_s
        if not has_room and not has_more:
            return False
        if not self._is_watched:
            self._is_watched, self._has_snapshot = True, False
            self._acts.order({"watch": True})
        is_late = self._room_since_s is not None and self._now_s - self._room_since_s >= self._rules.join_s
        return self._has_snapshot or is_late

    def _all_are_done(self, view: View) -> bool:
        known = {**self._known, self.me.id: self.state}
        return all(node in known and known[node].is_done for node in view.ids)

    def _newcomers(self, view: View | None) -> list[Node]:
        members = view.ids if view is not None else ()
        others = [peer for peer in self._peers.values() if peer.node.id not in members]
        return [it.node for it in others if self._follows(it.node.id) and not it.state.is_leaving]

    def _cause_of_end(self, view: View) -> Mapping[str, Any] | None:
        """Return why an attempt in `view` failed; None if it did not."""
        known = {**self._known, self.me.id: self.state}
        gone = self._gone(view)
        causes = [state.failure for state in known.values() if state.failure is not None]
        for number, node in enumerate(view.members):
            if node.id in gone:
                continue
            if node.id in self._dead:
                causes.append(_loss(view, number, "its process has ended"))
            elif not self._is_with_us(node.id):
                causes.append(_loss(view, number, f"silent for {self._rules.silence_s:g} s"))
            elif known.get(node.id, State()).has_left:  # because of another, who may show
                causes.append(_loss(view, number, "it could not reach the others for a while") | {"is_victim": True})
        if gone:  # whoever fell victim did so to those
            causes = [cause for cause in causes if not cause["is_victim"]]
        room = next((cause for cause in causes if cause.get("made_room")), None)
        if room is not None:  # asked for: whatever came of it is no failure
            return room
        return min(causes, key=lambda cause: (cause["is_victim"], cause["returncode"] > 0), default=None)

    def _gone(self, view: View) -> set[str]:
        """Return the nodes that have left as they had said."""
        leaving = {node for node, state in self._known.items() if state.is_leaving}
        return {node for node in view.ids if node in leaving and not self._is_with_us(node)}

    def _is_coming(self, view: View) -> bool:
        """Whether a view that we have proposed is being accepted, and nobody of it is lost."""
        is_ours = view.leader == self.me.id and not self._has_started
        return is_ours and all(self._is_with_us(node) for node in view.ids)

    def _may_start(self, view: View) -> bool:
        if not self._is_coming(view) or not self._is_settled():
            return False
        others = [self._peers[node].state for node in view.ids if node != self.me.id]
        return all(self._follows(node) for node in view.ids) and all(
            state.key == view.key and state.is_settled for state in others
        )

    def _propose(self) -> None:
        """Choose who takes part in the next attempt, if that can be said."""
        view, rules = self.view, self._rules
        old = view.ids if view is not None else ()
        # A spare that has not voted yet is waited for, too: the world is to stay as large as it was.
        awaited = [peer.node for peer in self._peers.values() if rules.spares or peer.node.id in old]
        undecided = [node for node in awaited if not self._follows(node.id)]
        if undecided and self._now_s - max(self._raised_s, self._quiet_since_s) < _SETTLE_S:
            return
        told = {self.me.id: self.state, **{name: peer.state for name, peer in self._peers.items()}}
        with_us = [self.me, *(peer.node for peer in self._peers.values() if self._follows(peer.node.id))]
        is_idle = all(self._peers[node.id].state.is_idle for node in with_us if node.id != self.me.id)
        if not is_idle or self._ranks != "idle":
            return
        cause, attempt, restarts = None, 0, 0
        if view is not None:
            cause = (self._cause or self._cause_of_end(view)) if self._has_started else view.cause
            attempt = view.attempt + self._has_started
            is_counted = self._has_started and cause is not None and not cause.get("is_free")
            restarts = view.restarts + is_counted
            self._cause = cause if self._has_started else None
        is_last = cause is not None and (cause["kind"] == OTHER_SIDE or cause.get("made_room"))
        if is_last or restarts > rules.max_restarts:
            self.result = {"cause": cause}
            return
        self._judge(cause)
        if self.out is not None:
            return
        sized = [dataclasses.replace(node, num_ranks=_num_ranks_after(cause, told[node.id])) for node in with_us]
        members = self._placed(old, [node for node in sized if node.num_ranks])
        if len(members) < rules.min_nodes:
            self._enough_since_s = None
            return
        if self._enough_since_s is None:
            self._enough_since_s = self._now_s
        if view is None and len(members) < rules.max_nodes and self._now_s - self._enough_since_s < rules.last_call_s:
            return
        known = [*(view.places if view is not None else ()), *(node.place for node in members)]
        places = tuple(dict.fromkeys(known))[-_MAX_PLACES:]
        key, bases, job = (self._term, self._key[1] + 1), self._bases(), view.job if view is not None else self.me.id
        view = View(key, self.me.id, tuple(members), attempt, restarts, cause, bases, places, job)
        self.handed(view, is_started=False)

    def _placed(self, old: tuple[str, ...], with_us: list[Node]) -> list[Node]:
        """Return the nodes of the next view in order: who was there keeps its place, newcomers fill the gaps.

        Args:
            old: Ids of the nodes of the last view.
        """
        if self._rules.has_positions:
            placed = {node.position: node for node in reversed(with_us)}
            return [placed[position] for position in sorted(placed)]
        stayed = {node.id: node for node in with_us if node.id in old}
        new = [node for node in with_us if node.id not in old][: self._rules.max_nodes - len(stayed)]
        members: list[Node] = []
        for node in old:
            if node in stayed:
                members.append(stayed[node])
            elif new:
                members.append(new.pop(0))
        return [*members, *new]

    # ------------------------------------------------------------ this node's ranks

    def _run(self) -> None:
        view = self.view
        leader = self.state if self.leads else self._peers[self._leader].state if self._leader in self._peers else None
        if leader is not None and leader.result is not None and not self.leads:
            self.result = leader.result
            return
        if view is None:
            return
        if leader is not None and leader.key == view.key:
            self._judge(leader.cause)
        if leader is not None and leader.running == view.key:
            self._has_started = True
        may_train = (
            self.is_member
            and leader is not None
            and leader.running == view.key
            and all(self._is_with_us(node) for node in view.ids)
        )
        if may_train and self._trained_in != view.key and self._ranks == "idle":
            self._ranks, self._trained_in = "running", view.key
            self._acts.order({"start": self._attempt(view), "cause": view.cause, "restarts": view.restarts})
        elif not may_train and self._ranks == "running":
            self._ranks = "stopping"
            self._has_left = leader is not None and leader.running == view.key
            self._acts.order({"stop": True})

    def _attempt(self, view: View) -> dict[str, Any]:
        """Return what this node's ranks are told, as `environment.Attempt` takes it."""
        first = view.members[0]
        number = view.ids.index(self.me.id)
        return {
            "world_size": view.first_rank(len(view.members)),
            "num_local_ranks": view.members[number].num_ranks,
            "first_rank": view.first_rank(number),
            "node_rank": number,
            "num_nodes": len(view.members),
            "master_addr": first.address,
            "master_port": self._port if first.id == self.me.id else self._peers[first.id].state.port,
            "restart_count": view.attempt,
            "max_restarts": self._rules.max_restarts,
            "epoch": {"job": view.job, "attempt": list(view.key)},
        }


def _num_ranks_after(cause: Mapping[str, Any] | None, state: State) -> int:
    """Return the number of ranks of a node after an attempt that ended for `cause`; 0: it takes no part."""
    failure = state.failure
    if failure is not None and failure == cause and failure.get("num_ranks", -1) >= 0:
        return int(failure["num_ranks"])
    return state.num_ranks


def _other_side(host: str) -> dict[str, Any]:
    """Return the cause that another side of this job is older, and goes on."""
    message = f"another side of this job is older, and {host} takes part in it"
    return {
        "rank": -1, "pid": -1, "returncode": 1, "is_victim": False, "kind": OTHER_SIDE, "message": message,
        "lines": [], "folder": "", "host": host,
    }  # fmt: skip


def _loss(view: View, number: int, how: str) -> dict[str, Any]:
    """Return the cause that a node was lost, as `nodes.cause_of` writes those of ranks."""
    node = view.members[number]
    first = view.first_rank(number)
    last = first + node.num_ranks - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    return {
        "rank": first,
        "pid": -1,
        "returncode": 1,
        "is_victim": False,
        "kind": NODE_LOST,
        "message": f"node {node.host} ({ranks}) was lost: {how}",
        "lines": [],
        "folder": "",
        "host": node.host,
    }
