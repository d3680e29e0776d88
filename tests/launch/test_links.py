"""What agents of nodes make of strangers: wrong jobs, other versions, noise."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx.launch.agreement import Group, Node, State, View
from phalanx.launch.messages import as_line, read_line, read_node, read_state, read_view
from tests.launch.jobs import LIMIT_S
from tests.launch.test_nodes import LEAVE, MEET, nodes

__all__ = ["nodes"]  # a fixture

NODE = Node("a1", "host-a", "10.0.0.1", 29500, 4, 2)
CAUSE = {
    "rank": 3, "pid": 4, "returncode": 1, "kind": "ValueError", "message": "x", "folder": "f", "host": "h",
    "is_victim": False, "lines": ["x"],
}  # fmt: skip
VIEW = View((3, 4), "a1", (NODE,), 5, 2, CAUSE, (Group("b", ("b", "c")),), (("10.0.0.1", 29500),))
STATE = State(3, "a1", True, (3, 4), True, False, False, True, CAUSE, (3, 4), 1234, {"cause": None})


def test_what_is_sent_is_what_is_read():
    message = read_line(as_line({"node": NODE, "view": VIEW, "state": STATE}))
    assert read_node(message["node"]) == NODE
    assert read_view(message["view"]) == VIEW
    assert read_state(message["state"]) == STATE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*json.loads(as_line({"v": VIEW}))["v"]]), inner),
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.sampled_from([read_node, read_view, read_state]))
def test_anything_else_is_no_message(told, read):
    with pytest.raises((ValueError, TypeError)):
        read(told)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*vars(VIEW)]), JSON)
def test_a_view_with_one_wrong_thing_in_it_is_none_or_still_one(name, value):
    told = {**json.loads(as_line({"view": VIEW}))["view"], name: value}
    with contextlib.suppress(ValueError, TypeError):
        assert isinstance(read_view(told), View)


def greeting(**changed):
    told = {"phalanx": phalanx.__version__, "protocol": 1, "job": "job", "nodes": [2, 2], "node": vars(NODE)}
    return json.dumps({**told, **changed}).encode() + b"\n"


STRANGERS = {  # what they say, and what they are answered beside the greeting
    b"GET / HTTP/1.1\r\n\r\n": "",
    b"x" * 100_000 + b"\n": "",
    b"[" * 100_000 + b"\n": "",
    greeting(job="theirs"): "runs another job at this place: its --rdzv-id is 'job'",
    greeting(phalanx="0.0.1"): f"has phalanx {phalanx.__version__}, and this host 0.0.1",
    greeting(nodes=[1, 5]): "was started with --nnodes 2:2, and this host with another",
    greeting(node={"id": 3}): "",
    greeting(node={**vars(NODE), "position": 1}) + b'{"state": {"term": "x"}}\n': "",
    b'{"refused": "go away"}\n': "",
}


def answer_to(said, place):
    """Return what an agent answers before it closes the connection."""
    with socket.create_connection(place, timeout=5) as stranger:
        stranger.sendall(said)
        came = b""
        try:
            while more := stranger.recv(1 << 16):
                came += more
        except ConnectionResetError:  # it has not read all that was sent
            pass
        return came.decode()


def test_strangers_at_the_door_are_told_why_and_disturb_no_job(nodes):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    for said, answer in STRANGERS.items():
        assert answer in answer_to(said, group.place), said
    group.start()
    assert [code for code, _, _ in group.finish()] == [0, 0]


def test_a_node_that_is_none_of_the_job_is_told_so_and_ends(nodes):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    group.start("--rdzv-id", "theirs")
    out, err = group.started[1].communicate(timeout=LIMIT_S)
    assert (group.started[1].returncode, out) == (1, "")
    assert "runs another job at this place: its --rdzv-id is 'job'" in err
    group.start(rank=1)
    assert [code for code, _, _ in group.finish()][::2] == [0, 0]
