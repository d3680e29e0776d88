"""Messages between agents, as lines of JSON. Whatever comes from another host is checked before it is believed."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from phalanx.launch.nodes.views import Node, State, View
from phalanx.wire.messages import read_value, require

_T = TypeVar("_T")
_MOST_NODES = 10_000

_OF_STATE = {field.name for field in dataclasses.fields(State)}  # each is told, also one that has a default


def read_node(told: Any) -> Node:
    """Return the node that a message tells of.

    Raises:
        ValueError: It tells of none.
    """
    node: Node = read_value(told, Node)
    return node


def read_view(told: Any) -> View:
    """Return the view that a message tells of.

    Raises:
        ValueError: It tells of none.
    """
    view: View = read_value(told, View)
    return view


def read_state(told: Any) -> State:
    """Return what a node tells of itself.

    Raises:
        ValueError: It tells nothing.
    """
    require(isinstance(told, dict) and told.keys() >= _OF_STATE, "the state of a node", told)
    state: State = read_value(told, State)
    return state
