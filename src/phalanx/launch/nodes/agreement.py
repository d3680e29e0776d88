"""The agreement on which nodes train together: what one node knows of the others, and what it does next.

Nothing in here waits, reads a clock or owns a socket, so ``tests/launch/simulated_nodes.py`` plays thousands of
accidents in a second. `links` carries what nodes tell each other, `agent` obeys what is ordered.

Every node tells every other its `State`, when it changes and twice a second; what comes last counts, so nothing has to
be repeated or acknowledged. What they agree on is a `View`: who takes part in one attempt, in which order and with how
many ranks, and why the attempt before it failed. A view has a leader. It chooses the next one when an attempt has
ended, and no node is special: if it is lost, the first that lives in the order of the view comes next.

Two sides of a cut network never both train, because

- a leader needs votes, and they are counted so that two nodes never have enough: see `election`;
- a view starts once all its nodes have accepted it, and once they have shown it to everybody they can reach; until it
  is known to have started, the views that it follows have to agree as well (joint consensus);
- a node's right to train lasts as long as the answers of the others are fresh.

**Raft with three differences.** (1) There is no log: the newest view is all the state there is, and only a leader's
proposal that all its members have accepted starts. (2) A port that refuses connections is a death that the kernel of
the other host vouches for (the end of a connection is none: firewalls reset them), so its vote may be counted by the
first living node of the view's order; otherwise no two hosts could lose one. (3) Half of the votes are enough with the
view's leader among them. A node that is not in a new view but can be reached has to know of it before it starts;
otherwise the death of its members could be counted against the old view.

**Two nodes.** The one that did not lead can't go on when the other loses its power, nor when that comes back as a new
process: the leader's half of the votes may have let it go on alone, take in a third and die, and neither node could
know. A disk that all share could witness that nobody has, and the launcher knows none; so both wait, and say that a
person has to decide. A process that is started anew where nodes look for the job, and reaches nobody, can't know of
the others and begins a job of its own. `checkpoint.disk.claim` fences what the two write; when they meet, the younger
one gives way.

**How it is checked.** ``model/agreement.pml`` is explored for every order of events within its bounds
(model/README.md). It found that a link's answers counted from the moment of the link: a handshake longer than 0.1 of
the time of silence let a vote count after it had been given to another. In the simulation, each rule has a variant
without it that must let two sides train within a thousand seeds. Two rules have no such variant (one vote in a term; a
start without acceptance): they follow from the others in all that it plays.

**Why not torch's agent.** A subclass of `SimpleElasticAgent` came first: the host of its store could not be lost, and
a loss cost 14 to 48 s, since torch's agents wait for nodes that may still come.

Source: D. Ongaro, J. Ousterhout, "In Search of an Understandable Consensus Algorithm", USENIX ATC 2014.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.launch.nodes import waiting
from phalanx.launch.nodes.attempt_watch import AttemptWatch
from phalanx.launch.nodes.causes import (
    INTERRUPTED,
    NODE_LOST,
    OTHER_SIDE,
    interruption_of,
    num_ranks_after,
    other_side,
)
from phalanx.launch.nodes.election import SETTLE_S, Election, Peer
from phalanx.launch.nodes.views import NO_VIEW, Cause, Group, Key, Node, Place, Result, Rules, State, View, seat

_MAX_PLACES = 1000


class Acts(Protocol):
    """What an agreement does to the world."""

    def hand(self, peer: str, view: View, is_started: bool) -> None:
        """Send a view to a peer."""

    def order(self, what: dict[str, Any]) -> None:
        """Have the supervisor "start" or "stop" its ranks, "reserve" a port or "watch" for their next snapshot."""


class Agreement:
    """One node's part.

    Args:
        me: This node.
        rules: Rules of the job, the same on all nodes.
        acts: Receiver of views to send and of orders.
        is_root: Whether this node is where the others look for the job; it leads first.
        now_s: Time on any clock that only grows.

    Attributes:
        view: The newest view that this node knows.
        result: End of the job; None: it goes on.
        out: Failure for which this node leaves the job, which goes on; None: it stays.
    """

    def __init__(self, me: Node, rules: Rules, acts: Acts, *, is_root: bool, now_s: float) -> None:
        self.me = me
        self.view: View | None = None
        self.result: Result | None = None
        self.out: Cause | None = None
        self._rules, self._acts, self._is_root = rules, acts, is_root
        self._now_s = self._born_s = self._job_born_s = now_s
        self._election = Election(me.id, rules.silence_s, is_root=is_root, now_s=now_s)
        self._peers = self._election.peers
        self._strangers: dict[str, Peer] = {}  # linked nodes of another job that began as this one did
        self._has_started = False  # whether the view is known to have started
        self._running: Key = NO_VIEW
        self._enough_since_s: float | None = None
        self._is_leaving = self._is_interrupted = False
        self._attempt = self._new_attempt()
        self._ranks = "idle"  # or "running", "stopping"
        self._trained_in: Key = NO_VIEW

    def _new_attempt(self) -> AttemptWatch:
        return AttemptWatch(self.view, self.me.id, self._rules, self._election, self._acts.order)

    # ------------------------------------------------------------ what happens

    def linked(self, node: Node, now_s: float) -> None:
        """Take in that a node can be talked to."""
        self._strangers.pop(node.id, None)
        self._election.linked(node, now_s)

    def unlinked(self, peer: str, *, has_ended: bool, now_s: float) -> None:
        """Take in that a node can't be talked to any more.

        Args:
            has_ended: Whether its process has ended, as its system says; otherwise it was silent.
        """
        if self._strangers.pop(peer, None) is None:
            self._election.unlinked(peer, has_ended=has_ended, now_s=now_s)

    def heard(self, peer: str, state: State, echo_s: float, age_s: float = 0.0) -> None:
        """Take in what a node says of itself.

        Args:
            echo_s: Time at which we sent what it had heard last from us.
            age_s: Time for which its job has lasted.
        """
        if self.view is not None and state.job not in ("", self.view.job):
            self._meet_stranger(peer, state, age_s)
            return
        if peer in self._strangers:
            self._peers[peer] = self._strangers.pop(peer)
        it = self._peers[peer]
        it.state, it.echo_s = state, max(it.echo_s, echo_s)
        self._attempt.hear(peer, state)

    def _meet_stranger(self, peer: str, state: State, age_s: float) -> None:
        """Of two jobs that began as one and the same, let the younger give way, whatever its views are."""
        if peer in self._peers:
            self._strangers[peer] = self._peers.pop(peer)
        if age_s > self.job_age_s and state.result is None and self.result is None:
            self.result = Result(other_side(self._strangers[peer].node.host))

    def handed(self, view: View, *, is_started: bool, age_s: float = 0.0) -> None:
        """Take in a view that another node knows, of a job that has lasted for `age_s`."""
        if self.view is not None and view.job != self.view.job:
            return
        if self.view is None:
            self._job_born_s = self._now_s - age_s
        if view.key > self._key:
            self._judge(view.cause)
            self.view, self._has_started, self._running = view, False, NO_VIEW
            self._attempt = self._new_attempt()
            for peer in self._peers.values():
                self._attempt.hear(peer.node.id, peer.state)
            if self._is_interrupted:
                self.interrupt()
        self._has_started |= is_started and view.key == self._key

    def _judge(self, cause: Cause | None) -> None:
        """Leave the job if a failure after which this node has too few ranks was the cause."""
        failure = self._attempt.failure
        if failure is None or cause is None or failure.num_ranks != 0:
            return
        if failure.of_process == cause.of_process:
            self.out = failure

    def ranks_ended(self, how: str, cause: Cause | None) -> None:
        """Take in how this node's ranks ended: "succeeded", "failed", "stopped", or unsaved and "interrupted"."""
        self._is_interrupted = how == "interrupted"
        if self._ranks == "running" and self._trained_in == self._key and not self._is_interrupted:
            self._attempt.is_done = how == "succeeded"
            self._attempt.failure = cause if how == "failed" else None
        self._ranks = "idle"

    def snapshot_is_whole(self) -> None:
        """Take in that the ranks have just taken a snapshot, after "watch" was ordered."""
        self._attempt.has_snapshot = True

    def interrupt(self) -> None:
        """Take in that Ctrl-C has stopped this node, which ends the job."""
        self._is_interrupted = True
        if self.view is not None and self.is_member:
            self._attempt.failure = interruption_of(self.view, self.view.ids.index(self.me.id))

    def leave(self) -> None:
        """Take in that this node is to be gone soon."""
        self._is_leaving = True

    def ask_for(self, num_ranks: int) -> None:
        """Take in that this node would go on with more ranks: from the next snapshot, or as the attempt ends anyway."""
        if self._ranks != "idle" and self._trained_in == self._key:
            self._attempt.num_asked = num_ranks

    def reserved(self, port: int) -> None:
        """Take in which port the supervisor holds for rank 0."""
        self._attempt.port = port

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
        return self._election.leads

    @property
    def state(self) -> State:
        return State(
            self._election.term,
            self._election.leader,
            self._is_in_office(),
            self._key,
            self._is_settled(),
            self._ranks == "idle",
            self._attempt.has_left,
            self._is_leaving or self.out is not None,
            self._attempt.is_done,
            self._attempt.failure,
            self._running,
            self._attempt.port,
            self.result,
            self.view.job if self.view is not None else "",
            self._attempt.num_asked or self._own_num_ranks(),
            self._attempt.cause,
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
        return not any(self._attempt.known[node].is_leaving for node in before if node in self._attempt.known)

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
        if self.is_member and self._election.is_dialed(now_s):
            members = members[: self.view.ids.index(self.me.id)]
        places = {node.place for node in members if node.id not in self._election.dead}
        if self.leads:
            places |= {*self.view.places}
        return places - {self.me.place} - {peer.node.place for peer in self._peers.values()}

    @property
    def is_under_way(self) -> bool:
        """Whether the job trains, here or on other nodes."""
        leading = self._election.leading
        return (leading.state.running if leading is not None else self._running) != NO_VIEW

    def waits_for(self) -> str:
        """Return what this node waits for, for people; empty: for nothing."""
        if (self.is_under_way and self.is_member) or self.result is not None:
            return ""
        view, rules, leading = self.view, self._rules, self._election.leading
        nodes = [self.me, *(peer.node for peer in self._peers.values())]
        if self.is_under_way:
            return waiting.why_not_in(view, rules, self.me) if view is not None else ""
        is_in_office = self._is_in_office() if self.leads else leading is not None and leading.state.in_office
        if view is not None and not is_in_office:
            reached = {node for node in view.ids if self._election.is_with_us(node)}
            return waiting.why_no_majority(view, reached, nodes)
        busy = [peer.node.host for peer in self._peers.values() if not peer.state.is_idle]
        if busy and self._ranks == "idle":
            return f"waiting for the ranks on {', '.join(busy)} to end"
        missing = waiting.missing(nodes, rules)
        if not self.leads:
            return missing
        cause = self._attempt.cause_of_end if self._has_started else None
        loss = f"{cause.message}; " if cause is not None and cause.kind == NODE_LOST else ""
        return missing and f"{loss}{missing}"

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
        if self.view is None and (not self._is_root or self._now_s - self._born_s < SETTLE_S):
            return False
        return all(self._election.has_quorum(base) for base in self._bases())

    def _is_settled(self) -> bool:
        if self.view is None:
            return False
        if self.view.ids[0] == self.me.id and not self._attempt.port:
            return False
        here = all(node == self.me.id or node in self._peers for node in self.view.ids)
        voters = {node for group in (*self.view.bases, self.view.group) for node in group.ids}
        return here and all(p.state.key >= self._key for p in self._peers.values() if p.node.id in voters)

    # ------------------------------------------------------------ what follows

    def decide(self, now_s: float) -> None:
        """Do what follows from all that has happened."""
        self._now_s = self._election.now_s = now_s
        while True:
            before = (self.state, self.view, self._ranks, self._attempt.has_asked_for_port)
            if self.result is None:
                office = {"is_root": self._is_root, "is_in_office": self._is_in_office()}
                if self._election.choose(self.view, **office):
                    self._running = NO_VIEW
                self._hand_on()
                self._reserve()
                if self.leads:
                    self._lead()
                self._run()
            if before == (self.state, self.view, self._ranks, self._attempt.has_asked_for_port):
                return

    def _hand_on(self) -> None:
        for peer in [*self._peers.values()]:  # who can't be reached any more leaves them
            key, handed_s = peer.handed
            is_due = key != self._key or self._now_s - handed_s >= SETTLE_S
            if self.view is not None and peer.state.key < self._key and is_due:
                peer.handed = self._key, self._now_s
                self._acts.hand(peer.node.id, self.view, self._has_started)

    def _reserve(self) -> None:
        if self.view is not None and self.view.ids[0] == self.me.id and not self._attempt.has_asked_for_port:
            self._attempt.has_asked_for_port = True
            self._acts.order({"reserve": True})

    # ------------------------------------------------------------ leading

    def _lead(self) -> None:
        view = self.view
        if view is not None and self._has_started and self._attempt.all_are_done:
            self.result = Result(None)
        elif view is not None and self._running == view.key:
            is_idle, has_newcomers = self._ranks == "idle", bool(self._newcomers(view))
            if self._attempt.is_to_end(self._now_s, is_idle=is_idle, has_newcomers=has_newcomers):
                self._running = NO_VIEW
        elif self._is_in_office():
            if view is not None and self._may_start(view):
                self._has_started, self._running = True, view.key
            elif view is None or not self._is_coming(view):
                self._propose()

    def _newcomers(self, view: View | None) -> list[Node]:
        members = view.ids if view is not None else ()
        others = [peer for peer in self._peers.values() if peer.node.id not in members]
        return [it.node for it in others if self._election.follows(it.node.id) and not it.state.is_leaving]

    def _is_coming(self, view: View) -> bool:
        """Whether a view that we have proposed is being accepted, and nobody of it is lost."""
        is_ours = view.leader == self.me.id and not self._has_started
        return is_ours and all(self._election.is_with_us(node) for node in view.ids)

    def _may_start(self, view: View) -> bool:
        if not self._is_coming(view) or not self._is_settled():
            return False
        others = [self._peers[node].state for node in view.ids if node != self.me.id]
        return all(self._election.follows(node) for node in view.ids) and all(
            state.key == view.key and state.is_settled for state in others
        )

    def _propose(self) -> None:
        """Choose the view of the next attempt, or end the job, if that can be said."""
        voters = self._idle_voters()
        if not voters:
            return
        view, cause, attempt, restarts = self.view, None, 0, 0
        if view is not None:
            cause = self._attempt.cause_of_end if self._has_started else view.cause
            attempt = view.attempt + self._has_started
            is_counted = self._has_started and cause is not None and not cause.is_free
            restarts = view.restarts + is_counted
            self._attempt.cause = cause if self._has_started else None
        is_last = cause is not None and (cause.kind in (OTHER_SIDE, INTERRUPTED) or cause.ending.preempted)
        if is_last or restarts > self._rules.max_restarts:
            self.result = Result(cause)
            return
        self._judge(cause)
        members = self._next_members(voters, cause) if self.out is None else ()
        if not members:
            return
        known = [*(view.places if view is not None else ()), *(node.place for node in members)]
        places = tuple(dict.fromkeys(known))[-_MAX_PLACES:]
        key, job = (self._election.term, self._key[1] + 1), view.job if view is not None else self.me.id
        view = View(key, self.me.id, members, attempt, restarts, cause, self._bases(), places, job)
        self.handed(view, is_started=False)

    def _idle_voters(self) -> list[Node]:
        """Return this node and all that have voted for it; empty while others may still vote, or ranks run."""
        old = self.view.ids if self.view is not None else ()
        # A spare that has not voted yet is waited for, too: the world is to stay as large as it was.
        awaited = [node for node in self._peers if self._rules.spares or node in old]
        if self._election.awaits_votes and not all(map(self._election.follows, awaited)):
            return []
        peers = [peer for peer in self._peers.values() if self._election.follows(peer.node.id)]
        is_idle = self._ranks == "idle" and all(peer.state.is_idle for peer in peers)
        return [self.me, *(peer.node for peer in peers)] if is_idle else []

    def _next_members(self, voters: Sequence[Node], cause: Cause | None) -> tuple[Node, ...]:
        """Return who takes part in the attempt after one that ended for `cause`; empty while more are waited for."""
        rules, old = self._rules, self.view.ids if self.view is not None else ()
        told = {self.me.id: self.state, **{name: peer.state for name, peer in self._peers.items()}}
        sized = [dataclasses.replace(node, num_ranks=num_ranks_after(cause, told[node.id])) for node in voters]
        members = seat(old, [node for node in sized if node.num_ranks], rules)
        if len(members) < rules.min_nodes:
            self._enough_since_s = None
            return ()
        if self._enough_since_s is None:
            self._enough_since_s = self._now_s
        is_last_call = self._now_s - self._enough_since_s < rules.last_call_s
        return () if self.view is None and len(members) < rules.max_nodes and is_last_call else tuple(members)

    # ------------------------------------------------------------ this node's ranks

    def _run(self) -> None:
        view = self.view
        leading = self._election.leading
        leader = self.state if self.leads else leading.state if leading is not None else None
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
            and all(self._election.is_with_us(node) for node in view.ids)
        )
        if may_train and self._trained_in != view.key and self._ranks == "idle":
            self._ranks, self._trained_in = "running", view.key
            first = view.ids[0]
            attempt = view.place_of(self.me.id) | {
                "master_port": self._attempt.port if first == self.me.id else self._peers[first].state.port,
                "max_restarts": self._rules.max_restarts,
            }
            self._acts.order({"start": attempt, "cause": view.cause, "restarts": view.restarts})
        elif not may_train and self._ranks == "running":
            self._ranks = "stopping"
            self._attempt.has_left = leader is not None and leader.running == view.key
            self._acts.order({"stop": True})
