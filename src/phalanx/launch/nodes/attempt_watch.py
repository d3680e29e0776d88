"""One attempt as a node sees it: what its nodes have told, why it failed, and when its leader ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.launch.deadlines import CAUSE_S
from phalanx.launch.nodes.causes import cause_of_end, is_interruption
from phalanx.launch.nodes.election import Election
from phalanx.launch.nodes.views import Cause, Rules, State, View


class AttemptWatch:
    """What a node knows of the attempt of one view.

    Args:
        view: View of the attempt; None: there is none yet, so that nothing is known.
        me: Id of this node.
        order: Function to call with ``{"watch": True}`` once news of the ranks' next snapshot are wanted.

    Attributes:
        known: Last message of each other node in this view, kept even if that node has been lost since.
        is_done: Whether this node's ranks have come to their end.
        has_left: Whether this node has stopped its ranks, because it could not reach all others.
        failure: Failure of one of this node's ranks.
        num_asked: Number of ranks that this node would have in the next attempt; 0: as many as now.
        port: Port that this node holds for rank 0; 0: none.
        has_asked_for_port: Whether it has been asked for.
        has_snapshot: Whether the ranks have taken a snapshot since news of it were wanted.
        cause: Reason for which this node, as leader, has ended the attempt.
    """

    def __init__(
        self, view: View | None, me: str, rules: Rules, election: Election, order: Callable[[dict[str, Any]], None]
    ) -> None:
        self._view, self._me, self._rules, self._election, self._order = view, me, rules, election, order
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
        self._room_since_s: float | None = None  # since when there are newcomers, and room for them

    def hear(self, peer: str, state: State) -> None:
        """Take in what a node says, if it is of this attempt."""
        if self._view is not None and state.key == self._view.key:
            self.known[peer] = state

    @property
    def _told(self) -> dict[str, State]:
        own = State(is_done=self.is_done, has_left=self.has_left, failure=self.failure)
        return {**self.known, self._me: own}

    @property
    def all_are_done(self) -> bool:
        """Whether the ranks of all nodes have come to their end."""
        told = self._told
        return self._view is not None and all(node in told and told[node].is_done for node in self._view.ids)

    @property
    def gone(self) -> set[str]:
        """Ids of the nodes that have left as they had said."""
        leaving = (node for node, state in self.known.items() if state.is_leaving)
        ids = self._view.ids if self._view is not None else ()
        return {node for node in leaving if node in ids and not self._election.is_with_us(node)}

    @property
    def cause_of_end(self) -> Cause | None:
        """Why the attempt has ended, or has to; None: it did not fail."""
        interruption = next((it.failure for it in self._told.values() if is_interruption(it.failure)), None)
        if self.cause is not None or self._view is None:
            if self.cause is not None and self.cause.ending.preempted:
                return self.cause
            return interruption or self.cause  # that one ends the job, whatever failed before
        return cause_of_end(self._view, self._told, self.gone, self._election.why_lost)

    def is_to_end(self, now_s: float, *, is_idle: bool, has_newcomers: bool) -> bool:
        """Return whether the leader ends the attempt: it can't go on, or could with more nodes or ranks.

        Args:
            is_idle: Whether none of this node's ranks run.
            has_newcomers: Whether there are nodes that would take part in the next attempt.
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
        """Return how long it goes on after a failure: until its cause shows or all preempted ranks have ended."""
        if cause.ending.preempted:
            ids, peers = self._view.ids if self._view is not None else (), self._election.peers
            are_idle = is_idle and all(peers[node].state.is_idle for node in ids if node in peers)
            return 0.0 if are_idle else self._rules.preempted_s
        if is_interruption(cause):  # its ranks may save, together with all others
            told = (
                [is_idle]
                if self.failure == cause
                else [it.is_idle for it in self.known.values() if it.failure == cause]
            )
            return 0.0 if all(told) else self._rules.preempted_s
        return CAUSE_S if cause.ending.is_victim else 0.0

    def _may_grow(self, now_s: float, *, has_newcomers: bool) -> bool:
        """Return whether the attempt can end now to go on with more nodes, or with more ranks on one.

        That is when a snapshot is whole. New nodes do not wait for ever for one that does not come.
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
            self._order({"watch": True})
        is_late = self._room_since_s is not None and now_s - self._room_since_s >= self._rules.join_s
        return self.has_snapshot or is_late
