"""Which errors are those of a victim: a rank that failed because a peer had gone."""

from __future__ import annotations

from collections.abc import Iterable


def is_victim(kind_names: Iterable[str], message: str) -> bool:
    """Whether an error of these classes with this text says that a peer was gone."""
    if set(kind_names) & {"RankFailed", "GroupAborted", "GroupUnusable", "ConnectionError", "DistNetworkError"}:
        return True
    return any(clue in message for clue in ("closed by peer", "reset by peer", "Broken pipe"))
