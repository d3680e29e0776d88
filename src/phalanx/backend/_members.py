"""The members of a group: their ranks in the world, their processes and their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from phalanx._errors import Failure, Peer
from phalanx.backend._wording import describe

_Some = TypeVar("_Some", bound=Peer)


class Ranks(NamedTuple):
    """Which rank of a group this is, how many there are, and the number of each in the world."""

    rank: int
    size: int
    global_ranks: Sequence[int]


@dataclass(frozen=True)
class Members:
    """The members of a group that spans several hosts, and which of them this process is.

    Attributes:
        group: Group name used in messages.
        rank: This process's rank in the group.
        global_ranks: World rank of each member.
        hosts: Host name of each member.
        pids: Process ID of each member, on its own host.
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
        """Return the member of this rank in the group."""
        return Peer(rank=self.global_ranks[rank], pid=self.pids[rank], host=self.hosts[rank])

    def peers(self, ranks: Sequence[int]) -> tuple[Peer, ...]:
        return tuple(map(self.peer, ranks))

    def named(self, number: int) -> Peer:
        """Return the member of this world rank; for a rank outside the group, a peer with nothing but its rank."""
        return self._located(Peer(rank=number))

    def describe(self, rank: int) -> str:
        """Return ``rank 3 (pid 123) on host b``."""
        return describe(self.peer(rank))

    def whole_hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts all of whose ranks are among these."""
        return tuple(
            host
            for host in dict.fromkeys(self.hosts)
            if all(rank in ranks for rank, one in enumerate(self.hosts) if one == host)
        )

    def locate(self, failure: Failure) -> Failure:
        """Return a failure of the core, which knows one host, with the processes and hosts of those that it names.

        The numbers of the core's collectives, of which a call may take several, mean nothing to its caller.
        """
        sizes = failure.sizes
        return replace(
            failure,
            culprits=tuple(map(self._located, failure.culprits)),
            by=failure.by and self._located(failure.by),
            standings=tuple(replace(self._located(stand), last=None) for stand in failure.standings),
            calls=tuple(map(self._located, failure.calls)),
            sizes=sizes and replace(sizes, one=self._located(sizes.one), other=self._located(sizes.other)),
        )

    def _located(self, peer: _Some) -> _Some:
        if peer.rank not in self.global_ranks:
            return peer
        known = self.peer(self.global_ranks.index(peer.rank))
        return replace(peer, pid=known.pid, host=known.host)
