"""Groups of ranks by host: the ranks of one host, and rails of ranks that communicate across the slow link.

Rail i consists of the i-th rank of each host. A message between hosts is cut into one piece for each rail. So each host
sends the message only once, over all rails at the same time. Then the ranks of each host share the pieces that have
arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from phalanx import _env, _settings
from phalanx._ranges import share
from phalanx.host.network import host_identity
from phalanx.wire.rank_group import RankGroup, group_or_world


class HostGroups(NamedTuple):
    """Groups that this rank belongs to, made by `host_groups`.

    Attributes:
        host: Group of the ranks on this host; None if this rank counts as a host of its own.
        across: Group of this rank's rail, one rank of each host; None on a rank that is in no rail.
        num_hosts: Number of hosts.
        num_rails: Number of rails, which is the number of ranks on the smallest host.
        num_ranks: Number of ranks on all hosts together.

    Example:
        >>> groups = phalanx.host_groups()
        >>> dist.get_world_size(groups.host), groups.num_hosts
        (1, 1)
    """

    host: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    num_hosts: int
    num_rails: int
    num_ranks: int

    @property
    def rail(self) -> int:
        """Index of this rank on its host, from 0; also the index of its rail, if there are that many rails."""
        return dist.get_rank(self.host) if self.host is not None else 0

    @property
    def weight(self) -> float:
        """Number of ranks on this host, divided by the mean over the hosts; 1 if all hosts have the same number."""
        return (self.host.size() if self.host is not None else 1) * self.num_hosts / self.num_ranks


def host_groups(
    name: str | None = None, *, host_backend: str | None = None, across_backend: str | None = None
) -> HostGroups:
    """Return the group of this rank's host, and this rank's group across hosts. Every rank of the job must call this.

    If hosts have different numbers of ranks, there are as many rails as the smallest host has ranks. The remaining
    ranks of larger hosts have no ``across``; they get the results from the other ranks of their host.

    Args:
        name: Name of this rank's host. By default, two ranks share a host if they see the same host name, boot and
            network, and the launcher gave them the same ``GROUP_RANK``. Pass a name if the slow link is elsewhere, such
            as between data centers, or to simulate several hosts on one.
        host_backend: Backend of ``host``, such as ``"phalanx"`` in a job on Gloo; by default the job's.
        across_backend: Backend of ``across``; by default the job's.

    Raises:
        ValueError: There is no process group yet.

    Example:
        >>> groups = phalanx.host_groups()
        >>> dist.all_reduce(torch.ones(3), group=groups.host)
    """
    whole = group_or_world(None, "host_groups")
    world, timeout = RankGroup(whole), getattr(whole, "timeout", None)  # None: torch's default
    rank, world_size = world.rank, world.world_size
    names = world.gather(_this_host() if name is None else f"named {name}")
    hosts = [[r for r in range(world_size) if names[r] == host] for host in dict.fromkeys(names)]
    num_rails = min(map(len, hosts))
    rails = [[ranks[rail] for ranks in hosts] for rail in range(num_rails)]
    # Every rank must make every group, in the same order, even those that it is not in.
    by_host: list[Any] = [
        dist.new_group(ranks, timeout, host_backend, group_desc=f"host {i}") for i, ranks in enumerate(hosts)
    ]
    by_rail: list[Any] = [
        dist.new_group(ranks, timeout, across_backend, group_desc=f"rail {i}") for i, ranks in enumerate(rails)
    ]
    [host] = [group for group, ranks in zip(by_host, hosts, strict=True) if rank in ranks]
    across = [group for group, ranks in zip(by_rail, rails, strict=True) if rank in ranks]
    return HostGroups(host, across[0] if across else None, len(hosts), num_rails, world_size)


def _this_host() -> str:
    return f"{host_identity(_settings.read_settings().host)} {_env.environment().get('GROUP_RANK', '')}"


def pieces_of(flat: Tensor, groups: HostGroups) -> list[Tensor]:
    """View a flat tensor as one piece for each rail; their sizes differ by at most one element."""
    places = (share(flat.numel(), rail, groups.num_rails) for rail in range(groups.num_rails))
    return [flat[place.start : place.stop] for place in places]


def _sum(piece: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(piece, group=group)


def broadcast_each(parts: Iterable[tuple[int, Tensor]], group: dist.ProcessGroup) -> None:
    """Send each tensor from its source to all ranks of the group, and wait. Every rank must call this.

    Args:
        parts: Tensors to send or to receive into, each with its source, a rank in the group; empty tensors are skipped.
        group: Ranks that exchange the tensors.
    """
    works = [dist.broadcast(part, group=group, group_src=src, async_op=True) for src, part in parts if part.numel()]
    for work in works:
        work.wait()  # type: ignore[union-attr]


def share_out(pieces: list[Tensor], groups: HostGroups) -> None:
    """Send each rail's piece from the rail's rank on this host to all ranks of this host."""
    if groups.host is not None and groups.host.size() > 1:
        broadcast_each(enumerate(pieces), groups.host)


def cross_hosts(flat: Tensor, groups: HostGroups, cross: Callable[[Tensor, dist.ProcessGroup], object] = _sum) -> None:
    """Combine a flat tensor with the other hosts' tensors, in place. Every rank must call this.

    On each rail, the ranks combine their pieces across the hosts; then the ranks of each host share the pieces. All
    ranks of a host must have the same tensor.

    Args:
        flat: Tensor of shape ``(num_elems,)``.
        groups: Groups of this rank.
        cross: Function that combines a piece over a rail's group, in place; by default it sums.
    """
    pieces = pieces_of(flat, groups)
    if groups.across is not None:
        cross(pieces[groups.rail], groups.across)
    share_out(pieces, groups)


def gather_from_all(value: Any, groups: HostGroups) -> list[Any]:
    """Return the values of all ranks, ordered by host, and the same on every rank. Every rank must call this."""
    on_host = [value] if groups.host is None else RankGroup(groups.host).gather(value)
    everywhere: list[Any] = [None] * groups.num_hosts
    if groups.across is not None:
        everywhere = RankGroup(groups.across).gather(on_host)
    if groups.host is not None:
        dist.broadcast_object_list(everywhere, group=groups.host, group_src=0)
    return [item for host in everywhere for item in host]
