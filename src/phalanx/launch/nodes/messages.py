"""Messages between agents, as lines of JSON. Whatever comes from another host is checked before it is believed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.launch.nodes.shared_causes import read_cause
from phalanx.launch.nodes.views import MOST_RANKS, Group, Key, Node, State, View
from phalanx.wire.messages import parse_json

_T = TypeVar("_T")
_MOST_NODES = 10_000


def as_line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, default=dataclasses.asdict).encode() + b"\n"


def read_line(line: bytes | bytearray) -> dict[str, Any]:
    """Return the message that a line holds.

    Raises:
        ValueError: It holds none.
    """
    told = parse_json(line)
    if not isinstance(told, dict):
        raise ValueError("no message")
    return told


def _take(told: Any, name: str, kind: type[_T]) -> _T:
    value = told.get(name) if isinstance(told, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _key(told: Any, name: str) -> Key:
    term, number = _take(told, name, list)
    if type(term) is not int or type(number) is not int:
        raise ValueError(f"{name} is no key")
    return term, number


def _place(told: Any) -> tuple[str, int]:
    address, port = told
    if not (type(address) is str and "\0" not in address and type(port) is int and 0 < port < 65536):
        raise ValueError("no such place")
    return address, port


def read_node(told: Any) -> Node:
    """Return the node that a message tells of.

    Raises:
        ValueError: It tells of none.
    """
    name, host, address, label = (_take(told, field, str)[:300] for field in ("id", "host", "address", "label"))
    port, num_ranks, position, replica_port = (
        _take(told, field, int) for field in ("port", "num_ranks", "position", "replica_port")
    )
    are_ports = 0 <= port < 65536 and 0 <= replica_port < 65536
    if not (name and "\0" not in address and are_ports and 0 < num_ranks < MOST_RANKS):
        raise ValueError("no such node")
    return Node(name, host, address, port, num_ranks, position, label, replica_port)


def read_view(told: Any) -> View:
    """Return the view that a message tells of.

    Raises:
        ValueError: It tells of none.
    """
    members = tuple(read_node(node) for node in _take(told, "members", list)[:_MOST_NODES])
    leader, attempt, restarts = _take(told, "leader", str), _take(told, "attempt", int), _take(told, "restarts", int)
    bases = tuple(
        Group(_take(base, "leader", str), tuple(str(one) for one in _take(base, "ids", list)))
        for base in _take(told, "bases", list)
    )
    places = tuple(_place(place) for place in _take(told, "places", list))
    if leader not in {node.id for node in members}:
        raise ValueError("the leader is no member")
    key, cause, job = _key(told, "key"), _cause(told, "cause"), _take(told, "job", str)[:300]
    return View(key, leader, members, attempt, restarts, cause, bases, places, job)


def read_state(told: Any) -> State:
    """Return what a node tells of itself.

    Raises:
        ValueError: It tells nothing.
    """
    result = told.get("result") if isinstance(told, dict) else None
    num_ranks = _take(told, "num_ranks", int)
    if not 0 < num_ranks < MOST_RANKS:
        raise ValueError("no such number of ranks")
    return State(
        term=_take(told, "term", int),
        leader=_take(told, "leader", str),
        **{
            name: _take(told, name, bool)
            for name in ("in_office", "is_settled", "is_idle", "has_left", "is_leaving", "is_done")
        },
        key=_key(told, "key"),
        failure=_cause(told, "failure"),
        running=_key(told, "running"),
        port=_take(told, "port", int),
        result=None if result is None else {"cause": _cause(result, "cause")},
        job=_take(told, "job", str)[:300],
        num_ranks=num_ranks,
        cause=_cause(told, "cause"),
    )


def _cause(told: Any, name: str) -> dict[str, Any] | None:
    value = told.get(name) if isinstance(told, dict) else None
    return None if value is None else read_cause(value)
