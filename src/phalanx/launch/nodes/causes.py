"""Causes that end attempts, as nodes report them to each other: a rank's ending, the loss of a node, Ctrl-C."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from phalanx._env import host_name
from phalanx._text import named
from phalanx.failure.ending import Ending
from phalanx.failure.folding import ROWS
from phalanx.failure.last_words import LastWords
from phalanx.launch.nodes.views import Cause, State, View

NODE_LOST = "NodeLost"
"""`kind` of a cause: a node was lost."""
OTHER_SIDE = "OtherSide"
"""`kind` of a cause: this side of a split job is younger than another side, so its nodes have to join that side."""
INTERRUPTED = "Interrupted"
"""`kind` of a cause: Ctrl-C on a node, which ends the job."""


def cause_of(end: Ending, **what_follows: Any) -> Cause:
    """Return the cause to send to other nodes for the ending of a rank.

    Args:
        what_follows: `Cause.num_ranks` and `Cause.is_free`, if known.
    """
    host, code = end.host or host_name(), end.exitcode or 1  # never 0, because the rank has failed
    return Cause(ending=dataclasses.replace(end.for_others(ROWS), host=host, exitcode=code), **what_follows)


def ending_of(cause: Cause) -> Ending:
    """Return the ending in a cause, without the host's name if it happened on this host."""
    end = cause.ending
    return dataclasses.replace(end, host="" if end.host == host_name() else end.host)


def with_own_kind(cause: Cause | None) -> Cause | None:
    """Return `cause`, with kind `OTHER_SIDE` if a rank failed because another side of the job owns the job's files."""
    if cause is None or cause.kind.rpartition(".")[2] != OTHER_SIDE:
        return cause
    words = dataclasses.replace(cause.ending.last_words, kind=OTHER_SIDE)
    return dataclasses.replace(cause, ending=dataclasses.replace(cause.ending, last_words=words))


def other_side(host: str) -> Cause:
    """Return the cause that ends this side of the job because an older side, which includes `host`, continues."""
    return _of_a_node(OTHER_SIDE, f"another side of this job is older, and {host} takes part in it", host)


def loss_of(view: View, node_rank: int, how: str, *, is_victim: bool = False) -> Cause:
    """Return the cause for the loss of a node of a view."""
    return _of_member(NODE_LOST, view, node_rank, f"was lost: {how}", is_victim=is_victim)


def interruption_of(view: View, node_rank: int) -> Cause:
    """Return the cause for Ctrl-C on a node of a view."""
    return _of_member(INTERRUPTED, view, node_rank, "was stopped by Ctrl-C, which ends the job")


def is_interruption(cause: Cause | None) -> bool:
    """Return whether the cause is Ctrl-C on a node."""
    return cause is not None and cause.kind == INTERRUPTED


def _of_member(kind: str, view: View, node_rank: int, what: str, *, is_victim: bool = False) -> Cause:
    """Return the cause for an event on a node of a view; `what` describes the event."""
    node, first = view.members[node_rank], view.first_rank(node_rank)
    ranks = named("rank", range(first, first + node.num_ranks))
    message = f"node {view.name_of(node_rank)} ({ranks}) {what}"
    return _of_a_node(kind, message, node.host, first, is_victim=is_victim)


def _of_a_node(kind: str, message: str, host: str, rank: int = -1, *, is_victim: bool = False) -> Cause:
    words = LastWords(kind, message, is_victim=is_victim, is_told=True)
    return Cause(ending=Ending(rank=rank, pid=-1, exitcode=1, last_words=words, host=host))


def cause_of_end(
    view: View, known: Mapping[str, State], gone: set[str], why_lost: Callable[[str], str]
) -> Cause | None:
    """Return the cause of an attempt's failure, found from the reports of all its nodes; None if it did not fail.

    Args:
        known: Latest state of each node of the view.
        gone: Ids of the nodes that have left after announcing it.
        why_lost: Function that returns how the node with the given id was lost; "" if the node was not lost.
    """
    causes = [state.failure for state in known.values() if state.failure is not None]
    for number, node in enumerate(view.members):
        if node.id in gone:
            continue
        if how := why_lost(node.id):
            causes.append(loss_of(view, number, how))
        elif known.get(node.id, State()).has_left:  # a victim: the node that it could not reach may be the cause
            causes.append(loss_of(view, number, "it could not reach the others for a while", is_victim=True))
    if gone:  # victims failed only because these nodes left on purpose
        causes = [cause for cause in causes if not cause.ending.is_victim]
    preempted = next((cause for cause in causes if cause.ending.preempted), None)
    if preempted is not None:  # a preemption was requested, so its consequences are no failure
        return preempted
    if (interruption := next(filter(is_interruption, causes), None)) is not None:
        return interruption
    return min(causes, key=lambda cause: (cause.ending.is_victim, not cause.ending.signal), default=None)


def num_ranks_after(cause: Cause | None, state: State) -> int:
    """Return the number of ranks of a node in the attempt that follows `cause`; 0: the node takes no part."""
    failure = state.failure
    if failure is not None and failure == cause and failure.num_ranks >= 0:
        return failure.num_ranks
    return state.num_ranks
