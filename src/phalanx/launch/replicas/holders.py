"""Chooses the other nodes that keep each node's snapshots.

A failure domain is the set of nodes with the same ``--host-label``; without a label, each host is a domain. A node's
snapshots are held by a node of the next failure domain in the view's order: the node with the same number within its
domain. If domains are equally large, each node holds the snapshots of one other node. A node that refuses, for lack of
memory, is passed over. So is a node that does not confirm an offer within 5 s. A connection alone proves nothing: the
kernel accepts it even if the process is suspended, or has ended and has not been restarted yet. A node that failed is
asked again after pauses that double. A snapshot is left with fewer replicas once every holder has refused, or has
failed three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.launch.nodes.views import Node

_MORE = 4  # further nodes to ask when the first ones refuse


def holders_of(members: Sequence[Node], me: Node, num_replicas: int) -> list[Node]:
    """Return the nodes to ask to keep a node's replicas, best first.

    Nodes of other failure domains come first: one node of each domain, then a second node of each, and so on. If
    domains are equally large, all nodes keep equally many replicas.

    Args:
        members: Nodes of a view, in its order.
        me: Node whose snapshots are replicated.
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
    """Return the facts about a view that the replicator needs, as a table for JSON."""
    holders = holders_of(members, me, num_replicas)
    return {
        "me": me.id,
        "holders": [{"id": k.id, "host": k.host, "address": k.address, "port": k.replica_port} for k in holders],
    }
