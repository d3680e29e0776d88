"""The identity of a group's ranks: their numbers in the world, their processes and their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from phalanx._errors import Failure
from phalanx._errors.facts import Peer
from phalanx.backend.failures.wording import describe

_Some = TypeVar("_Some", bound=Peer)


class Ranks(NamedTuple):
    """This rank's number in a group, the number of ranks in the group, and the rank of each of them in the world."""

    rank: int
    size: int
    global_ranks: Sequence[int]


@dataclass(frozen=True)
class Members:
    """The ranks of a group on several hosts, seen from one of them.

    Attributes:
        group: Name of the group in messages.
        rank: Number of this rank in the group.
        global_ranks: Rank in the world of each rank of the group.
        hosts: Name of each rank's host; different hosts have different names.
        pids: Process id of each rank on its host.
    """

    group: str
    rank: int
    global_ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]

    @property
    def global_rank(self) -> int:
        return self.global_ranks[self.rank]

    def peer(self, rank: int) -> Peer:
        """Return the identity of a rank of the group."""
        return Peer(rank=self.global_ranks[rank], pid=self.pids[rank], host=self.hosts[rank])

    def peers(self, ranks: Sequence[int]) -> tuple[Peer, ...]:
        return tuple(map(self.peer, ranks))

    def named(self, number: int) -> Peer:
        """Return the identity of a rank of the world; only its number if it is not in the group."""
        return self._located(Peer(rank=number))

    def describe(self, rank: int) -> str:
        """Return the text that names a rank, such as ``rank 3 (pid 123) on host b``."""
        return describe(self.peer(rank))

    def whole_hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts whose ranks are all in `ranks`."""
        return tuple(
            host
            for host in dict.fromkeys(self.hosts)
            if all(rank in ranks for rank, one in enumerate(self.hosts) if one == host)
        )

    def locate(self, failure: Failure) -> Failure:
        """Return a failure that the core reported, with each rank's process and host, which the core does not know."""
        sizes = failure.sizes
        return replace(
            failure,
            culprits=tuple(map(self._located, failure.culprits)),
            by=failure.by and self._located(failure.by),
            standings=tuple(map(self._located, failure.standings)),
            circle=tuple(map(self._located, failure.circle)),
            calls=tuple(map(self._located, failure.calls)),
            sizes=sizes and replace(sizes, one=self._located(sizes.one), other=self._located(sizes.other)),
        )

    def _located(self, peer: _Some) -> _Some:
        if peer.rank not in self.global_ranks:
            return peer
        known = self.peer(self.global_ranks.index(peer.rank))
        return replace(peer, pid=known.pid, host=known.host)
