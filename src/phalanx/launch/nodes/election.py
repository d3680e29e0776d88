"""Leader election as one node sees it: which nodes it reaches, which answers count, and which leader it follows.

The rules are verified in ``model/agreement.pml``, which mirrors this file: change both together.

- A leader needs the votes of more than half of a group of nodes, or of half of them including the group's leader. A
  node gives one vote in a term.
- A vote expires when the voter's answers are no longer fresh. This happens before the voter can consider this node lost
  and vote for another node. Over a new link, only an answer to a heartbeat over that link counts as fresh, so the first
  heartbeat is answered at once.
- A node is dead when its kernel refuses connections to its port. The first living node in the order of the group may
  then count the dead node's vote, but only if the dead node's last answer was younger than 0.9 of the silence limit:
  after a longer silence, the dead node may have voted for another node before it died.
"""

from __future__ import annotations

import dataclasses
import math

from phalanx.launch.nodes.views import NO_VIEW, Group, Key, Node, State, View

SETTLE_S = 1.0
"""Time for linked nodes to vote, for a candidate to wait between terms, and for another node to connect first."""
_FRESH = 0.9  # an answer is fresh for this fraction of the silence after which a node counts as lost


@dataclasses.dataclass
class Peer:
    """A linked node.

    Attributes:
        echo_s: Time at which this node sent the newest heartbeat that the peer has acknowledged over this link.
        handed: Key of the newest view that was sent to the peer, and the time of sending.
    """

    node: Node
    echo_s: float = -math.inf  # no heartbeat has been acknowledged yet
    state: State = dataclasses.field(default_factory=State)
    handed: tuple[Key, float] = (NO_VIEW, 0.0)


class Election:
    """One node's part in choosing the leader.

    Args:
        me: Id of this node.
        silence_s: Seconds of silence after which a node is lost.
        is_root: Whether this node is at the meeting place and therefore leads first.
        now_s: Time on any monotonic clock.

    Attributes:
        peers: Linked nodes of this job by id, in the order in which they connected.
        dead: Ids of nodes whose kernel reports that they have ended.
        term: Term in which this node has voted.
        leader: Id of the node that this node follows; empty: it follows no node.
        now_s: Present time, against which freshness is measured.
    """

    def __init__(self, me: str, silence_s: float, *, is_root: bool, now_s: float) -> None:
        self._me, self._silence_s = me, silence_s
        self.peers: dict[str, Peer] = {}
        self.dead: set[str] = set()
        self.term: int = 0 if is_root else -1
        self.leader: str = me if is_root else ""
        self.now_s: float = now_s
        self._raised_s = -SETTLE_S
        self._quiet_since_s = now_s

    # ------------------------------------------------------------ links

    def linked(self, node: Node, now_s: float) -> None:
        """Add a peer: a link to a node is up."""
        self.peers[node.id] = Peer(node)
        self.dead.discard(node.id)
        self._quiet_since_s = now_s

    def unlinked(self, peer: str, *, has_ended: bool, now_s: float) -> None:
        """Remove a peer, because its process has ended or because it was silent."""
        gone = self.peers.pop(peer)
        if has_ended and self._is_fresh(gone, now_s):
            self.dead.add(peer)

    def is_dialed(self, now_s: float) -> bool:
        """Whether this node should still wait for other nodes to connect to it first."""
        return now_s - self._quiet_since_s < SETTLE_S

    @property
    def awaits_votes(self) -> bool:
        """Whether nodes that have not voted may still do so."""
        return self.now_s - max(self._raised_s, self._quiet_since_s) < SETTLE_S

    def _is_fresh(self, peer: Peer, now_s: float) -> bool:
        return now_s - peer.echo_s < _FRESH * self._silence_s

    def is_with_us(self, node: str) -> bool:
        """Whether `node` is this node, or a peer whose answers are fresh."""
        peer = self.peers.get(node)
        return node == self._me or (peer is not None and self._is_fresh(peer, self.now_s))

    def why_lost(self, node: str) -> str:
        """Return how a node was lost; "" if it was not lost."""
        if node in self.dead:
            return "its process has ended"
        return "" if self.is_with_us(node) else f"silent for {self._silence_s:g} s"

    # ------------------------------------------------------------ votes

    @property
    def leads(self) -> bool:
        """Whether this node is the leader or a candidate."""
        return self.leader == self._me

    @property
    def leading(self) -> Peer | None:
        """The peer that this node follows; None: it follows no node, or a node that is not linked."""
        return self.peers.get(self.leader)

    def follows(self, node: str) -> bool:
        """Whether `node` has voted for this node and can't have voted for another node since."""
        if not self.is_with_us(node) or node == self._me:
            return node == self._me
        state = self.peers[node].state
        return state.leader == self._me and state.term == self.term

    def has_quorum(self, group: Group) -> bool:
        """Whether this node has enough votes in a group."""
        votes = {node for node in group.ids if self.follows(node)}
        before = []
        for node in group.succession:
            if node == self._me:
                break
            before.append(node)
        if all(node in votes or node in self.dead for node in before):
            votes |= self.dead & {*group.ids}
        return 2 * len(votes) > len(group.ids) or (2 * len(votes) == len(group.ids) and group.leader in votes)

    def _holder(self, key: Key) -> Peer | None:
        """Return the peer that claims to lead with enough votes; if several claim it, the one with the newest term."""
        holders = [
            peer
            for peer in self.peers.values()
            if peer.state.in_office and peer.state.leader == peer.node.id and peer.state.key >= key
        ]
        return max(holders, key=lambda peer: peer.state.term, default=None)

    def _preferred(self, view: View | None, holder: Peer | None, *, is_root: bool) -> str:
        """Return the node that should lead, as far as this node can tell; empty: unknown."""
        if holder is not None:
            return holder.node.id
        if view is None:
            leading = (peer.node.id for peer in self.peers.values() if peer.state.leader == peer.node.id)
            return self._me if is_root else next(leading, "")
        for node in view.group.succession:
            if node in self.peers or node == self._me:
                return node
        return ""

    def choose(self, view: View | None, *, is_root: bool, is_in_office: bool) -> bool:
        """Lead, follow or continue as before; return whether this node has cast a new vote, for itself or another node.

        Args:
            view: Newest view that this node knows.
            is_root: Whether this node may lead if there is no view yet.
            is_in_office: Whether this node leads with enough votes.
        """
        others = [peer.state.term for peer in self.peers.values() if peer.state.leader != self._me]
        newest = max(others, default=-1)  # nodes that voted in this term can vote for us only in a newer term
        holder = self._holder(view.key if view is not None else NO_VIEW)
        if is_in_office:
            if holder is not None and holder.state.term > self.term:
                return self._vote(holder)
            if newest >= self.term:
                self.term = newest + 1
            return False
        current = self.leading
        if current is not None and current.state.leader == self.leader:
            self.term = max(self.term, current.state.term)
            return holder is not None and not current.state.in_office and self._vote(holder)
        preferred = self._preferred(view, holder, is_root=is_root)
        if preferred != self._me:
            return bool(preferred) and self._vote(self.peers[preferred])
        if self.leads and (newest < self.term or self.now_s - self._raised_s < SETTLE_S):
            return False
        self.term, self.leader, self._raised_s = max(newest, self.term) + 1, self._me, self.now_s
        return True

    def _vote(self, peer: Peer) -> bool:
        """Follow a peer if it leads in a newer term than ours; return whether this node now follows it."""
        if peer.state.leader != peer.node.id or peer.state.term <= self.term:
            return False
        self.term, self.leader = peer.state.term, peer.node.id
        return True
