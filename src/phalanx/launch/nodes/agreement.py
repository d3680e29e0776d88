"""The agreement on which nodes train together: what a node knows about the other nodes, and what it does next.

Nothing in this module waits, reads a clock or owns a socket, so ``tests/launch/simulated_nodes.py`` simulates thousands
of accidents in a second. `links` carries the messages between nodes, and `agent` carries out what this module decides.

Every node sends its `State` to every other node, whenever it changes and at least twice a second. Only the latest state
counts, so nothing has to be resent or acknowledged. Nodes agree on a `View`: which nodes take part in one attempt, in
which order and with how many ranks, and why the previous attempt failed. A view has a leader, which chooses the next
view when the attempt has ended. No node is special: if the leader is lost, the first living node in the order of the
view succeeds it.

If the network is cut in two, the two sides never train at the same time, because

- a leader needs votes, and two nodes never have enough votes at the same time: see `election`;
- a view starts once all its nodes have accepted it and have sent it to every node that they can reach. Until a view is
  known to have started, the last view that started may be an earlier one, so a leader also needs the votes of the nodes
  of those earlier views (joint consensus);
- a node may train only as long as the answers of all other nodes of the view are fresh.

**Raft with three differences.** (1) There is no log: the newest view is the entire state. A view that a leader proposes
starts only after all its members have accepted it. (2) If a host refuses connections to a node's port, the host's
kernel thereby confirms that the node is dead. (The end of a connection confirms nothing: firewalls reset connections.)
The first living node in the order of the view may then count the dead node's vote; otherwise two hosts could not
survive the loss of one. (3) Half of the votes are enough if the view's leader is among the voters. Before a new view
starts, every node that can be reached has to know this view, even a node that is not in it. Otherwise, if the members
of the new view died, a node outside the new view could count their votes in the old view.

**Two nodes.** If the leader of two nodes loses power, the other node can't continue, not even when the leader's host
comes back with a new process. The leader may have continued alone with its half of the votes, admitted a third node and
died; neither the other node nor the new process could know. A shared disk could prove that this did not happen, but the
launcher knows of no such disk. So the other node and the new process wait, and say that a person has to decide. If the
new process reaches no node at all, however, it can't know that others exist, so it begins a job of its own.
`checkpoint.disk.claim` keeps the two jobs from writing into one folder; when the jobs meet, the younger one gives way.

**Verification.** ``model/agreement.pml`` mirrors this file, `election` and `attempt_watch`: change both together. A
model checker explores every order of events in the model, within the model's bounds (model/README.md). It found a bug,
since fixed: answers counted as fresh from the moment at which the link was made. If the handshake took longer than 0.1
of the silence limit, a vote still counted after the voter had voted for another node. A test removes one rule at a time
from the simulation: with at least one of a thousand seeds, both sides must then train at the same time, which shows
that the rule is needed. Two rules (one vote in a term; no start without acceptance) can't be tested in this way,
because in the simulation the other rules imply them.

**Why not torch's agent.** The first version was a subclass of `SimpleElasticAgent`. It could not survive the loss of
the host of its store, and a loss cost 14 to 48 s, since torch's agents wait for nodes that may still arrive.

Source: D. Ongaro, J. Ousterhout, "In Search of an Understandable Consensus Algorithm", USENIX ATC 2014.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

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
    """Actions that an `Agreement` asks of its agent."""

    def hand(self, peer: str, view: View, is_started: bool) -> None:
        """Send a view to a peer."""

    def start(self, view: View, port: int) -> None:
        """Ask the supervisor to start this node's ranks for a view; the ranks meet rank 0 on `port`."""

    def signal(self, what: Literal["stop", "reserve", "watch"]) -> None:
        """Ask the supervisor to stop the ranks, to reserve a port for rank 0, or to report the ranks' next snapshot."""


class Agreement:
    """One node's part in the agreement.

    Args:
        me: This node.
        rules: Rules of the job, the same on all nodes.
        acts: Object that carries out the actions.
        is_root: Whether this node is at the meeting place and therefore leads first.
        now_s: Time on any monotonic clock.

    Attributes:
        view: The newest view that this node knows.
        result: End of the job; None: the job has not ended.
        out: Failure for which this node leaves the job, while the other nodes continue; None: the node stays.
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
        self._strangers: dict[str, Peer] = {}  # linked nodes on another side of a split of this job
        self._has_started = False  # whether the view is known to have started
        self._running: Key = NO_VIEW
        self._enough_since_s: float | None = None
        self._is_leaving = self._is_interrupted = False
        self._attempt = self._new_attempt()
        self._ranks = "idle"  # or "running", "stopping"
        self._trained_in: Key = NO_VIEW

    def _new_attempt(self) -> AttemptWatch:
        def watch() -> None:
            self._acts.signal("watch")

        return AttemptWatch(self.view, self.me.id, self._rules, self._election, watch)

    # ------------------------------------------------------------ what happens

    def linked(self, node: Node, now_s: float) -> None:
        """Add a peer: a link to a node is up."""
        self._strangers.pop(node.id, None)
        self._election.linked(node, now_s)

    def unlinked(self, peer: str, *, has_ended: bool, now_s: float) -> None:
        """Remove a peer: the link to a node is down.

        Args:
            has_ended: Whether the node's kernel reports that its process has ended; otherwise the node was silent.
        """
        if self._strangers.pop(peer, None) is None:
            self._election.unlinked(peer, has_ended=has_ended, now_s=now_s)

    def heard(self, peer: str, state: State, echo_s: float, age_s: float = 0.0) -> None:
        """Handle the state of a node.

        Args:
            echo_s: Time at which this node sent the newest heartbeat that the peer has received.
            age_s: Seconds for which the peer's job has lasted.
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
        """Handle the state of a node on another side of a split of this job: the younger side gives way."""
        if peer in self._peers:
            self._strangers[peer] = self._peers.pop(peer)
        if age_s > self.job_age_s and state.result is None and self.result is None:
            self.result = Result(other_side(self._strangers[peer].node.host))

    def handed(self, view: View, *, is_started: bool, age_s: float = 0.0) -> None:
        """Adopt a view if it is newer than the view of this node.

        Args:
            view: View that another node has sent, or that this node proposes.
            is_started: Whether the view is known to have started.
            age_s: Seconds for which the job of the view has lasted.
        """
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
        """Leave the job if this node caused the failure of the attempt and now has too few ranks left."""
        failure = self._attempt.failure
        if failure is None or cause is None or failure.num_ranks != 0:
            return
        if failure.of_process == cause.of_process:
            self.out = failure

    def ranks_ended(self, how: str, cause: Cause | None) -> None:
        """Handle the end of this node's ranks: "succeeded", "failed", "stopped", or "interrupted" by Ctrl-C."""
        self._is_interrupted = how == "interrupted"
        if self._ranks == "running" and self._trained_in == self._key and not self._is_interrupted:
            self._attempt.is_done = how == "succeeded"
            self._attempt.failure = cause if how == "failed" else None
        self._ranks = "idle"

    def snapshot_is_whole(self) -> None:
        """Handle the supervisor's report of the snapshot that this agreement asked for with "watch"."""
        self._attempt.has_snapshot = True

    def interrupt(self) -> None:
        """Handle Ctrl-C on this node, which ends the job."""
        self._is_interrupted = True
        if self.view is not None and self.is_member:
            self._attempt.failure = interruption_of(self.view, self.view.ids.index(self.me.id))

    def leave(self) -> None:
        """Announce that this node is about to leave the job on purpose."""
        self._is_leaving = True

    def ask_for(self, num_ranks: int) -> None:
        """Ask for more ranks on this node in the next attempt, which follows the next snapshot or a failure."""
        if self._ranks != "idle" and self._trained_in == self._key:
            self._attempt.num_asked = num_ranks

    def reserved(self, port: int) -> None:
        """Set the port that the supervisor holds for rank 0."""
        self._attempt.port = port

    def lead_first(self, now_s: float, *, may: bool) -> None:
        """Set whether this node may begin the job; if it may, and there is no job yet, it begins one."""
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
        """Seconds since the first view of the job was proposed."""
        return self._now_s - self._job_born_s if self.view is not None else 0.0

    @property
    def trains(self) -> bool:
        """Whether this node's ranks are running."""
        return self._ranks == "running"

    @property
    def all_leave(self) -> bool:
        """Whether the job would end if this node left, because no other node, not even a spare, would continue it."""
        return all(peer.state.is_leaving for peer in self._peers.values())

    @property
    def is_next_to_leave(self) -> bool:
        """Whether this node may leave now: no earlier node of the view is about to leave.

        Nodes leave one at a time, with an attempt in between, because a leaving node may hold the only replica of
        another leaving node's part of the state.
        """
        before = self.view.ids[: self.view.ids.index(self.me.id)] if self.view is not None and self.is_member else ()
        return not any(self._attempt.known[node].is_leaving for node in before if node in self._attempt.known)

    @property
    def others_stay(self) -> bool:
        """Whether a linked node does not yet know how the job has ended."""
        return any(peer.state.result is None for peer in self._peers.values())

    @property
    def is_member(self) -> bool:
        return self.view is not None and self.me.id in self.view.ids

    def wanted(self, now_s: float) -> set[Place]:
        """Return the places to which this node should connect now.

        At first, a member of a view connects only to the members listed before it. If the members listed after it have
        not connected after a while, it also connects to them.
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
        """Whether the job is training, on this node or on other nodes."""
        leading = self._election.leading
        return (leading.state.running if leading is not None else self._running) != NO_VIEW

    def waits_for(self) -> str:
        """Return a message about what this node is waiting for; empty: nothing."""
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
        """Return the groups whose votes a leader needs, one for each view that may have been the last to start."""
        if self.view is None:
            return (Group(self.me.id, (self.me.id,)),)
        if self._has_started:
            return (self.view.group,)
        is_ours = self.view.leader == self.me.id  # only the leader starts a view, and we have not started this one
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
        """Act on everything that has happened so far; called after each event, and at regular intervals."""
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
        for peer in [*self._peers.values()]:  # a copy, because sending may remove a peer
            key, handed_s = peer.handed
            is_due = key != self._key or self._now_s - handed_s >= SETTLE_S
            if self.view is not None and peer.state.key < self._key and is_due:
                peer.handed = self._key, self._now_s
                self._acts.hand(peer.node.id, self.view, self._has_started)

    def _reserve(self) -> None:
        if self.view is not None and self.view.ids[0] == self.me.id and not self._attempt.has_asked_for_port:
            self._attempt.has_asked_for_port = True
            self._acts.signal("reserve")

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
        """Whether this node's proposed view may still be accepted: none of its nodes is lost."""
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
        """Choose the view of the next attempt, or end the job, once that can be decided."""
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
        """Return this node and the nodes that voted for it; empty while votes may still arrive or ranks are running."""
        old = self.view.ids if self.view is not None else ()
        # Wait also for spares that have not voted yet, so that the world keeps its size.
        awaited = [node for node in self._peers if self._rules.spares or node in old]
        if self._election.awaits_votes and not all(map(self._election.follows, awaited)):
            return []
        peers = [peer for peer in self._peers.values() if self._election.follows(peer.node.id)]
        is_idle = self._ranks == "idle" and all(peer.state.is_idle for peer in peers)
        return [self.me, *(peer.node for peer in peers)] if is_idle else []

    def _next_members(self, voters: Sequence[Node], cause: Cause | None) -> tuple[Node, ...]:
        """Return the members of the next attempt; empty while this node waits for more nodes.

        `cause` is the failure that ended the last attempt.
        """
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
            self._acts.start(view, self._attempt.port if first == self.me.id else self._peers[first].state.port)
        elif not may_train and self._ranks == "running":
            self._ranks = "stopping"
            self._attempt.has_left = leader is not None and leader.running == view.key
            self._acts.signal("stop")
