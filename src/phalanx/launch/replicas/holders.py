"""Chooses the other nodes that keep each node's snapshots.

The holder of a node's snapshots is a node of the next failure domain in the view's order (``--host-label``; without a
label, each host is one): the one with the same number within its domain. If domains are equally large, each node holds
for one other. A node that refuses, for lack of memory, is passed over. So is one that does not confirm an offer within
5 s: a connection alone proves nothing, since the kernel accepts it also for a process that is stopped or not yet
started again. A node that failed is asked again after pauses that double. A snapshot is left with fewer replicas once
every holder has refused, or failed three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.launch.nodes.views import Node

_MORE = 4  # nodes to ask when the first ones refuse


def holders_of(members: Sequence[Node], me: Node, num_replicas: int) -> list[Node]:
    """Return the nodes to ask to keep a node's replicas, best first.

    Nodes of other failure domains come first, one of each domain before a second of any. If domains are equally large,
    all nodes keep equally much.

    Args:
        members: Nodes of a view, in its order.
        me: Node whose replicas they are.
    """
    domains: dict[str, list[Node]] = {}
    for node in members:
        domains.setdefault(node.domain, []).append(node)
    names = list(domains)
    own = names.index(me.domain)
    mine = [node.id for node in domains[me.domain]].index(me.id)
    others = [domains[name] for name in (*names[own + 1 :], *names[:own])]
    found = []
    for depth in range(max(map(len, domains.values()))):
        found += [nodes[(mine + depth) % len(nodes)] for nodes in others if depth < len(nodes)]
    found += [*domains[me.domain][mine + 1 :], *domains[me.domain][:mine]]
    return [node for node in found if node.replica_port][: num_replicas + _MORE if num_replicas else 0]


def told_of(members: Sequence[Node], me: Node, num_replicas: int) -> dict[str, Any]:
    """Return what the replicator has to know of a view, as JSON."""
    holders = holders_of(members, me, num_replicas)
    return {
        "me": me.id,
        "holders": [{"id": k.id, "host": k.host, "address": k.address, "port": k.replica_port} for k in holders],
    }
