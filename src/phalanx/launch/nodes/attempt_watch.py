"""One attempt as a node sees it: the reports of its nodes, the cause of its failure, and when the leader ends it.

``model/agreement.pml`` mirrors this file: change both together.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.launch.deadlines import CAUSE_S
from phalanx.launch.nodes.causes import cause_of_end, is_interruption
from phalanx.launch.nodes.election import Election
from phalanx.launch.nodes.views import Cause, Rules, State, View


class AttemptWatch:
    """This node's knowledge of the attempt of one view.

    Args:
        view: View of the attempt; None: there is no view yet.
        me: Id of this node.
        watch: Function that asks the supervisor to report the ranks' next snapshot; called at most once.

    Attributes:
        known: Latest state of each other node in this view, kept after the node is lost.
        is_done: Whether this node's ranks have succeeded.
        has_left: Whether this node has stopped its ranks because it could not reach all other nodes.
        failure: Failure of one of this node's ranks; None: no rank has failed.
        num_asked: Number of ranks that this node asks for in the next attempt; 0: as many as now.
        port: Port that this node holds for rank 0; 0: it holds no port.
        has_asked_for_port: Whether the supervisor has been asked for a port.
        has_snapshot: Whether the ranks have taken a snapshot since `watch` was called.
        cause: Reason for ending the attempt, if this node leads.
    """

    def __init__(self, view: View | None, me: str, rules: Rules, election: Election, watch: Callable[[], None]) -> None:
        self._view, self._me, self._rules, self._election, self._watch = view, me, rules, election, watch
        self.known: dict[str, State] = {}
        self.is_done: bool = False
        self.has_left: bool = False
        self.failure: Cause | None = None
        self.num_asked: int = 0
        self.port: int = 0
        self.has_asked_for_port: bool = False
        self.has_snapshot: bool = False
        self.cause: Cause | None = None
        self._is_watched = False
        self._failed_since_s: float | None = None
        self._room_since_s: float | None = None  # when newcomers, and room for them, were first seen

    def hear(self, peer: str, state: State) -> None:
        """Record the state of a node, if it belongs to this attempt."""
        if self._view is not None and state.key == self._view.key:
            self.known[peer] = state

    @property
    def _told(self) -> dict[str, State]:
        own = State(is_done=self.is_done, has_left=self.has_left, failure=self.failure)
        return {**self.known, self._me: own}

    @property
    def all_are_done(self) -> bool:
        """Whether the ranks of all nodes have succeeded."""
        told = self._told
        return self._view is not None and all(node in told and told[node].is_done for node in self._view.ids)

    @property
    def gone(self) -> set[str]:
        """Ids of the nodes that have left after announcing it."""
        leaving = (node for node, state in self.known.items() if state.is_leaving)
        ids = self._view.ids if self._view is not None else ()
        return {node for node in leaving if node in ids and not self._election.is_with_us(node)}

    @property
    def cause_of_end(self) -> Cause | None:
        """The cause for which the attempt has ended or must end; None: the attempt has not failed."""
        interruption = next((it.failure for it in self._told.values() if is_interruption(it.failure)), None)
        if self.cause is not None or self._view is None:
            if self.cause is not None and self.cause.ending.preempted:
                return self.cause
            return interruption or self.cause  # Ctrl-C ends the job, whatever failed before
        return cause_of_end(self._view, self._told, self.gone, self._election.why_lost)

    def is_to_end(self, now_s: float, *, is_idle: bool, has_newcomers: bool) -> bool:
        """Return whether the leader should end the attempt: it has failed, or the next attempt could have more ranks.

        Args:
            is_idle: Whether none of this node's ranks is running.
            has_newcomers: Whether there are new nodes for the next attempt.
        """
        cause = self.cause_of_end
        if cause is not None and (patience_s := self._patience_s(cause, is_idle=is_idle)):
            if self._failed_since_s is None:
                self._failed_since_s = now_s
            if now_s - self._failed_since_s < patience_s:
                return False
        if cause is None and not self.gone and not self._may_grow(now_s, has_newcomers=has_newcomers):
            return False
        self.cause = cause
        return True

    def _patience_s(self, cause: Cause, *, is_idle: bool) -> float:
        """Return how long the attempt continues after a failure, so that the cause can appear or ranks can save."""
        if cause.ending.preempted:
            ids, peers = self._view.ids if self._view is not None else (), self._election.peers
            are_idle = is_idle and all(peers[node].state.is_idle for node in ids if node in peers)
            return 0.0 if are_idle else self._rules.preempted_s
        if is_interruption(cause):  # the interrupted node's ranks may be saving, together with all other ranks
            told = (
                [is_idle]
                if self.failure == cause
                else [it.is_idle for it in self.known.values() if it.failure == cause]
            )
            return 0.0 if all(told) else self._rules.preempted_s
        return CAUSE_S if cause.ending.is_victim else 0.0

    def _may_grow(self, now_s: float, *, has_newcomers: bool) -> bool:
        """Return whether to end the attempt now, to continue with more nodes or with more ranks on a node.

        Ranks are restarted only after a snapshot. After `Rules.join_s`, new nodes no longer wait for a snapshot.
        """
        members = self._view.members if self._view is not None else ()
        has_room = len(members) < self._rules.max_nodes and has_newcomers
        has_more = self.num_asked > 0 or any(
            node.id in self.known and self.known[node.id].num_ranks > node.num_ranks for node in members
        )
        if any(state.is_done for state in self._told.values()):
            has_more = False
        if not has_room:
            self._room_since_s = None
        elif self._room_since_s is None:
            self._room_since_s = now_s
        if not has_room and not has_more:
            return False
        if not self._is_watched:
            self._is_watched, self.has_snapshot = True, False
            self._watch()
        is_late = self._room_since_s is not None and now_s - self._room_since_s >= self._rules.join_s
        return self.has_snapshot or is_late
