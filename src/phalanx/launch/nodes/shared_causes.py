"""The cause of an attempt's end, in the form in which nodes tell it to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx._env import host_name
from phalanx._text import named
from phalanx.failure.folding import ROWS, fold
from phalanx.failure.last_words import LastWords
from phalanx.failure.outcome import Outcome
from phalanx.launch.nodes.views import MOST_RANKS, Cause, State, View

NODE_LOST = "NodeLost"
"""Kind of a cause that is no rank's."""
OTHER_SIDE = "OtherSide"
"""Kind of a cause that ends a job which is the lesser side of another: its nodes join that."""
INTERRUPTED = "Interrupted"
"""Kind of a cause that ends a job: Ctrl-C on one of its nodes."""
_MOST_LINES = 42


def cause_of(end: Outcome) -> dict[str, Any]:
    """Return what other nodes need to name `end` as the cause."""
    return {
        "rank": end.rank,
        "pid": end.pid,
        "returncode": end.exitcode,
        "is_victim": end.is_victim,
        "num_ranks": -1,
        "is_free": False,
        "preempted": end.preempted,
        # Short enough for a packet, also where JSON writes twelve bytes for a character.
        "kind": end.last_words.kind[:200],
        "message": end.last_words.message[:1000],
        "lines": [line[:300] for line in fold(end.last_words.lines, ROWS)],
        "folder": end.folder,
        "host": end.host or host_name(),
    }


def end_of(cause: Cause) -> Outcome:
    """Return the end of the rank that a cause tells of, on whichever node."""
    words = LastWords(cause["kind"], cause["message"], tuple(cause["lines"]), is_victim=cause["is_victim"])
    here = cause["host"] == host_name()
    return Outcome(
        rank=cause["rank"],
        pid=cause["pid"],
        exitcode=cause["returncode"],
        last_words=words,
        folder=cause["folder"],
        host="" if here else cause["host"],
    )


def read_cause(told: Any) -> dict[str, Any]:
    """Return a cause that came from another process, well-formed whatever has come."""
    told = told if isinstance(told, dict) else {}
    limits = (("rank", -1, 1 << 31), ("pid", -1, 1 << 31), ("returncode", -64, 256), ("num_ranks", -1, MOST_RANKS))
    rank, pid, returncode, num_ranks = (
        number if type(number := told.get(name)) is int and least <= number < limit else -1
        for name, least, limit in limits
    )
    words = {name: str(told.get(name, ""))[:1000] for name in ("kind", "message", "folder", "host")}
    lines = told.get("lines")
    return {
        "rank": rank,
        "pid": pid,
        "returncode": returncode or 1,  # it has failed
        **words,
        "is_victim": told.get("is_victim") is True,
        "num_ranks": num_ranks,
        "is_free": told.get("is_free") is True,
        "preempted": told.get("preempted") is True,
        "lines": [str(line)[:300] for line in (lines if isinstance(lines, list) else [])[:_MOST_LINES]],
    }


def with_own_kind(cause: Cause | None) -> Cause | None:
    """Return a cause with our own kind where a rank was refused because another side of the job has its folder."""
    is_ours = cause is not None and cause["kind"].rpartition(".")[2] == OTHER_SIDE
    return {**(cause or {}), "kind": OTHER_SIDE} if is_ours else cause


def other_side(host: str) -> Cause:
    """Return the cause that another side of this job, in which `host` takes part, is older and goes on."""
    return _of_a_node(OTHER_SIDE, f"another side of this job is older, and {host} takes part in it", host)


def loss_of(view: View, node_rank: int, how: str) -> Cause:
    """Return the cause that a node of a view was lost."""
    node, first = view.members[node_rank], view.first_rank(node_rank)
    ranks = named("rank", range(first, first + node.num_ranks))
    return _of_a_node(NODE_LOST, f"node {view.name_of(node_rank)} ({ranks}) was lost: {how}", node.host, first)


def interruption_of(view: View, node_rank: int) -> Cause:
    """Return the cause that Ctrl-C on a node of a view ends the job."""
    node, first = view.members[node_rank], view.first_rank(node_rank)
    ranks = named("rank", range(first, first + node.num_ranks))
    message = f"node {view.name_of(node_rank)} ({ranks}) was stopped by Ctrl-C, which ends the job"
    return _of_a_node(INTERRUPTED, message, node.host, first)


def is_interruption(cause: Cause | None) -> bool:
    """Return whether a cause is Ctrl-C on a node."""
    return cause is not None and cause["kind"] == INTERRUPTED


def _of_a_node(kind: str, message: str, host: str, rank: int = -1) -> Cause:
    return {
        "rank": rank, "pid": -1, "returncode": 1, "is_victim": False, "kind": kind, "message": message,
        "lines": [], "folder": "", "host": host,
    }  # fmt: skip


def cause_of_end(
    view: View, known: Mapping[str, State], gone: set[str], why_lost: Callable[[str], str]
) -> Cause | None:
    """Return why an attempt failed, of all that nodes tell; None if it did not.

    Args:
        known: Last state that each node of the view told.
        gone: Ids of the nodes that have left as they had said.
        why_lost: Function that says how the node of an id was lost; empty: it was not.
    """
    causes = [state.failure for state in known.values() if state.failure is not None]
    for number, node in enumerate(view.members):
        if node.id in gone:
            continue
        if how := why_lost(node.id):
            causes.append(loss_of(view, number, how))
        elif known.get(node.id, State()).has_left:  # because of another, who may show
            loss = loss_of(view, number, "it could not reach the others for a while")
            causes.append({**loss, "is_victim": True})
    if gone:  # whoever fell victim did so to those
        causes = [cause for cause in causes if not cause["is_victim"]]
    room = next((cause for cause in causes if cause.get("preempted")), None)
    if room is not None:  # asked for: whatever came of it is no failure
        return room
    if (interruption := next(filter(is_interruption, causes), None)) is not None:
        return interruption
    return min(causes, key=lambda cause: (cause["is_victim"], cause["returncode"] > 0), default=None)


def num_ranks_after(cause: Cause | None, state: State) -> int:
    """Return the number of ranks of a node after an attempt that ended for `cause`; 0: it takes no part."""
    failure = state.failure
    if failure is not None and failure == cause and failure.get("num_ranks", -1) >= 0:
        return int(failure["num_ranks"])
    return state.num_ranks
