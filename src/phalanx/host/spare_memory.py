"""Checks whether there is enough memory for snapshots, so that snapshots never make the OOM killer end a job."""

from __future__ import annotations

from phalanx.host.cgroups import cgroup_memory, host_memory

_MAX_SHARE = 0.25  # fraction of the host's memory, and of each cgroup's limit, that all snapshots together may take
# fraction of the unused memory that all snapshots may take, because training will need the rest
_MAX_SHARE_OF_REST = 0.5


def shortage(what: str, total_bytes: int, held_bytes: int) -> str:
    """Return why snapshots of this size are too large for the host or a cgroup; empty if they are not too large.

    Args:
        what: Subject of the returned sentence: words for what would take the memory.
        total_bytes: Size of all snapshots that this host is to hold.
        held_bytes: Size of the current snapshots, which the host counts as used memory.
    """
    for whose, limits in (("this host", [host_memory()]), ("the cgroup", cgroup_memory())):
        for memory in limits:
            most, left = _MAX_SHARE * memory.limit_bytes, memory.left_bytes + held_bytes
            if total_bytes > most:
                of = f"{_MAX_SHARE:.0%} of {whose}'s {memory.limit_bytes >> 20} MiB"
            elif total_bytes > _MAX_SHARE_OF_REST * left:
                of = f"{_MAX_SHARE_OF_REST:.0%} of the {left >> 20} MiB that are left of {whose}'s"
            else:
                continue
            return f"{what} would take {total_bytes >> 20} MiB, more than {of}"
    return ""
