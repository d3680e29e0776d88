"""Who a rank of a group is, in numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Ranks(NamedTuple):
    """Which rank of a group this is, how many there are, and the number of each in the world."""

    rank: int
    size: int
    global_ranks: Sequence[int]


@dataclass(frozen=True)
class Place:
    """Who a rank of a group on several hosts is.

    Attributes:
        group: Name of the group in messages.
        rank: In the group.
        global_ranks: Number of each rank in the world.
        hosts: Name of each rank's host, one for each host.
        pids: Process of each rank, there.
    """

    group: str
    rank: int
    global_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def global_rank(self) -> int:
        return self.global_ranks[self.rank]

    def describe(self, rank: int) -> str:
        """Return ``rank 3 (pid 123) on host b``."""
        return f"rank {self.global_ranks[rank]} (pid {self.pids[rank]}) on host {self.hosts[rank]}"

    def describe_all(self, ranks: Sequence[int]) -> str:
        return listed([self.describe(rank) for rank in ranks])

    def describe_by_host(self, ranks: Sequence[int]) -> str:
        """Return ``host b (ranks 2 and 3)`` for a host all of whose ranks are meant, else ``rank 2 on host b``."""
        named = []
        for host in dict.fromkeys(self.hosts[rank] for rank in ranks):
            meant = [rank for rank in ranks if self.hosts[rank] == host]
            numbers = f"rank{'s' * (len(meant) > 1)} {listed([self.global_ranks[rank] for rank in meant])}"
            is_whole = len(meant) == self.hosts.count(host)
            named.append(f"host {host} ({numbers})" if is_whole else f"{numbers} on host {host}")
        return listed(named)


def listed(items: Sequence[object]) -> str:
    """Return ``a, b and c``."""
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
