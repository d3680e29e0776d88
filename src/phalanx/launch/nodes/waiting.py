"""Messages about what a node is waiting for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phalanx._text import in_runs, plural
from phalanx.launch.nodes.views import Node, Rules, View


def why_not_in(view: View, rules: Rules, me: Node) -> str:
    """Return why a node takes no part in a running job; "" if it is about to take part."""
    if len(view.members) < rules.max_nodes:
        return ""
    if rules.has_positions:
        return f"all nodes of the job are there: another one has --node-rank {me.position}, as this one has"
    return (
        f"all {len(view.members)} nodes of the job are there: this one is a spare, and waits to take the place of one "
        "that is lost"
    )


def missing(nodes: Sequence[Node], rules: Rules) -> str:
    """Return what is missing before `nodes` can start the job; "" if nothing is known to be missing."""
    here = ", ".join(node.host for node in nodes)
    if rules.has_positions:
        positions = [node.position for node in nodes]
        if twice := sorted({one for one in positions if positions.count(one) > 1}):
            owners = ", ".join(node.host for node in nodes if node.position == twice[0])
            return f"several nodes have --node-rank {twice[0]}: {owners}"
        absent = {*range(rules.max_nodes)} - {*positions}
        noun = plural(len(absent), "node")
        return f"waiting for the {noun} with --node-rank {in_runs([*absent])}; so far: {here}" if absent else ""
    if len(nodes) < rules.min_nodes:
        return f"waiting for nodes: {len(nodes)} of at least {rules.min_nodes} are here ({here})"
    return ""


def why_no_majority(view: View, reached: Collection[str], here: Sequence[Node]) -> str:
    """Return which nodes of a view are being waited for; "" if all are here.

    Args:
        reached: Ids of the nodes of the view that this node can reach.
        here: This node and the nodes linked to it.
    """
    lost = [node.host for node in view.members if node.id not in reached]
    left = [node.host for node in view.members if node.id in reached]
    names = {node.id: view.name_of(number) for number, node in enumerate(view.members)}
    new = {node.host for node in here}
    again = [host for host in lost if host in new and host not in left]
    if not lost:
        return ""
    if not again:
        lost_names = ", ".join(name for node, name in names.items() if node not in reached)
        left_names = ", ".join(name for node, name in names.items() if node in reached)
        return (
            f"of {len(view.members)} nodes, {lost_names} can't be reached; those that are left "
            f"({left_names}) are no majority, so others may be going on: waiting for them"
        )
    has = "has" if len(again) == 1 else "have"
    return (
        f"{', '.join(again)} {has} been started again and can't tell what became of the job, which others may be "
        "going on with: waiting for them. If no host trains any more, end this command on all, then start it again"
    )
