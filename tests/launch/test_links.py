"""What agents of nodes make of strangers: wrong jobs, other versions, noise."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import selectors
import socket
import struct
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import phalanx
from phalanx.failure.ending import Ending
from phalanx.failure.last_words import LastWords
from phalanx.host.ports import open_listener
from phalanx.launch.nodes.links import Links
from phalanx.launch.nodes.messages import read_state
from phalanx.launch.nodes.views import Cause, Group, Node, Result, State, View
from phalanx.wire.lines import as_line, read_line
from phalanx.wire.messages import GarbledError, read_value
from tests.launch.jobs import LIMIT_S, write_script
from tests.launch.test_nodes import LEAVE, MEET, nodes

__all__ = ["nodes"]  # a fixture
pytestmark = pytest.mark.usefixtures("warm_jobs")

NODE = Node("a1", "host-a", "10.0.0.1", 29500, 4, 2)
CAUSE = Cause(
    ending=Ending(
        rank=3, pid=4, exitcode=1, last_words=LastWords("ValueError", "x", ("x",)), folder="f", host="h",
        preempted=True,
    ),
    num_ranks=2, is_free=True,
)  # fmt: skip
VIEW = View((3, 4), "a1", (NODE,), 5, 2, CAUSE, (Group("b", ("b", "c")),), (("10.0.0.1", 29500),), "b")
STATE = State(
    term=3, leader="a1", in_office=True, key=(3, 4), is_settled=True, is_idle=False, has_left=True, is_leaving=True,
    is_done=True, failure=CAUSE, running=(3, 4), port=1234, result=Result(None), job="b", num_ranks=2, cause=CAUSE,
)  # fmt: skip


def test_what_is_sent_is_what_is_read():
    message = read_line(as_line({"node": NODE, "view": VIEW, "state": STATE}))
    assert read_value(message["node"], Node) == NODE
    assert read_value(message["view"], View) == VIEW
    assert read_state(message["state"]) == STATE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*json.loads(as_line({"v": VIEW}))["v"]]), inner),
)


@settings(max_examples=100)  # tests/test_messages.py tries the reader itself
@given(JSON, st.sampled_from([Node, View, read_state]))
def test_anything_else_is_no_message(told, shape):
    with pytest.raises(GarbledError):
        read_value(told, shape)


@settings(max_examples=100)  # tests/test_messages.py tries the reader itself
@given(st.sampled_from([*vars(VIEW)]), JSON)
@example("places", [["10.0.0.1", float("inf")]])
def test_a_view_with_one_wrong_thing_in_it_is_none_or_still_one(name, value):
    told = {**json.loads(as_line({"view": VIEW}))["view"], name: value}
    with contextlib.suppress(ValueError, TypeError):
        assert isinstance(read_value(told, View), View)


@pytest.mark.parametrize("num_ranks", [-1, 0, 1 << 20, "2", True])
def test_a_state_with_no_possible_number_of_ranks_is_none(num_ranks):
    told = json.loads(as_line({"state": STATE}))["state"]
    with pytest.raises(ValueError, match="ranks"):
        read_state({**told, "num_ranks": num_ranks})


def handshake(**changed):
    told = {"phalanx": phalanx.__version__, "protocol": 3, "job": "job", "nodes": [2, 2, 0], "node": vars(NODE)}
    return json.dumps({**told, **changed}).encode() + b"\n"


STRANGERS = {  # what they say, and what they are answered beside the handshake
    b"GET / HTTP/1.1\r\n\r\n": "",
    b"x" * 100_000 + b"\n": "",
    b"[" * 100_000 + b"\n": "",
    handshake(job="theirs"): "runs another job at this place: its --rdzv-id is 'job'",
    handshake(
        phalanx="0.0.1"
    ): f"has phalanx {phalanx.__version__} (protocol 3), and this host phalanx 0.0.1 (protocol 3)",
    handshake(
        protocol=2
    ): f"has phalanx {phalanx.__version__} (protocol 3), and this host phalanx {phalanx.__version__} (protocol 2)",
    handshake(nodes=[1, 5, 1]): "was started with --nnodes 2, and this host with --nnodes 1:5 --spares 1",
    handshake(nodes=["1"]): "was started with --nnodes 2, and this host with another --nnodes",
    handshake(backend="etcd"): "was started with --rdzv-backend static, and this host with etcd",
    handshake(backend="static", silence_s=15): "that allow 2 s of silence, and this host with 15 s: they must be",
    handshake(script={"name": "other.py"}): "runs train.py at this place, and this is other.py: give it an --rdzv-id",
    handshake(node={"id": 3}): "",
    handshake(node={**vars(NODE), "position": 1}) + b'{"state": {"term": "x"}}\n': "",
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


def test_strangers_at_the_listener_are_told_why_and_disturb_no_job(nodes):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    for said, answer in STRANGERS.items():
        assert answer in answer_to(said, group.place), said
    group.start()
    assert [code for code, _, _ in group.finish()] == [0, 0]


@pytest.mark.parametrize(("num_ranks", "is_right"), [(2, True), (3, False)])
def test_a_view_in_which_a_node_has_more_ranks_than_it_can_have_closes_the_connection(nodes, num_ranks, is_right):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    with socket.create_connection(group.place, timeout=10) as stranger, stranger.makefile("rb") as lines:
        here = read_value(json.loads(lines.readline())["node"], Node)
        view = View((9, 9), "a1", (NODE, dataclasses.replace(here, num_ranks=num_ranks)))
        message = as_line({"view": view, "is_started": False, "age": 0.0})
        stranger.sendall(handshake(backend="static", silence_s=2.0) + message)
        told = lines.read()
    assert b'"refused"' not in told
    assert (b'"key": [9, 9]' in told) == is_right


def test_a_node_that_is_none_of_the_job_is_told_so_and_ends(nodes):
    group = nodes(MEET + LEAVE)
    group.start()
    group.wait_for_rendezvous()
    group.start("--rdzv-id", "theirs")
    out, err = group.started[1].communicate(timeout=LIMIT_S)
    assert (group.started[1].returncode, out) == (1, "")
    assert re.search(r"not let in at \S+: \S+ runs another job at this place: its --rdzv-id is 'job'", err)
    group.start(rank=1)
    assert [code for code, _, _ in group.finish()][::2] == [0, 0]


class Noted:
    """Links of a node, and what they told."""

    def __init__(self, name, silence_s=60.0):
        self.selector = selectors.DefaultSelector()
        self.links = Links(self.selector, self, silence_s)
        self.told = []
        listener = open_listener(0)
        self.place = ("127.0.0.1", listener.getsockname()[1])
        self.links.introduce(Node(name, name, *self.place, 1), {})
        self.links.listen(listener)

    def linked(self, node):
        self.told.append(("linked", node.id))

    def unlinked(self, peer, *, has_ended, since_s):
        assert 0 < since_s <= time.monotonic()
        self.told.append(("unlinked", peer, has_ended))

    def received(self, peer, message):
        if message.get("bad"):
            raise ValueError
        self.told.append((peer, message))

    def problem_with(self, handshake):
        return ""


@pytest.fixture
def two():
    """Two nodes with links, which both have dialed the other at once."""
    nodes = Noted("a"), Noted("b")
    for node, peer in (nodes, nodes[::-1]):
        for _ in range(200):  # until the name is resolved
            node.links.dial(peer.place)
            if node.links._links:
                break
            node.links.wait(0.01)
    pump(nodes)
    yield nodes
    for node in nodes:
        for key in [*node.selector.get_map().values()]:
            key.fileobj.close()
        node.selector.close()


def pump(nodes):
    for _ in range(20):
        for node in nodes:
            node.links.wait(0.005)


def test_of_two_connections_one_stays_and_nobody_is_lost(two):
    for node, peer in (two, two[::-1]):
        assert len(node.links._links) == 1
        assert [what[0] for what in node.told] == ["linked"]
        node.links.tell_all(lambda name: {"to": name})
        pump(two)
        assert peer.told.pop()[1]["to"] == ("b" if node is two[0] else "a")


def test_a_line_that_a_connection_takes_in_pieces_arrives_whole(two):
    a, b = two
    [link] = a.links._links
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    a.links.tell("b", {"text": "x" * 3_000_000})
    assert link.goes  # b has not read yet
    deadline = time.monotonic() + 30
    while len(b.told) < 2:
        assert time.monotonic() < deadline
        pump(two)
    assert b.told[-1] == ("a", {"text": "x" * 3_000_000})


@pytest.mark.parametrize("kind", ["reset", "ended", "nonsense"])
def test_a_connection_that_ends_is_made_anew_and_nobody_hears_of_it(two, kind):
    a, b = two
    [link] = b.links._links
    if kind == "nonsense":
        a.links.tell("b", {"bad": True})
    else:
        if kind == "reset":
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        b.links._close(link)
    for _ in range(10):
        pump(two)
        for node in two:
            node.links.redial()
    assert link not in b.links._links
    for node, peer in (two, two[::-1]):
        assert [what[0] for what in node.told] == ["linked"]
        node.links.tell_all(lambda name: {"to": name})
        pump(two)
        assert peer.told.pop()[1]["to"] == ("b" if node is two[0] else "a")


def test_a_process_that_ends_is_dead_at_once(two):
    a, b = two
    for key in [*b.selector.get_map().values()]:
        b.selector.unregister(key.fileobj)
        key.fileobj.close()
    pump([a])
    assert a.told[-1] == ("unlinked", "b", True)


def test_a_node_that_is_silent_is_lost_and_not_dead(two):
    a, b = two
    a.links._silence_s = 0.2
    b.selector.unregister(b.links._listener)  # it takes and says nothing
    deadline = time.monotonic() + 10
    while a.told[-1] != ("unlinked", "b", False):
        assert time.monotonic() < deadline
        a.links.wait(0.01)
        a.links.lose_silent()
    b.links._listener.close()


def test_a_stranger_that_resets_its_connection_disturbs_nobody(two):
    for _ in range(20):
        with socket.create_connection(two[0].place) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pump(two)
    assert [what[0] for what in two[0].told] == ["linked"]


def test_a_script_of_another_name_is_not_let_in_and_the_job_is_undisturbed(nodes, tmp_path):
    group = nodes("print('training', flush=True)\nwhile not os.path.exists('end'): time.sleep(0.02)")
    flags = (
        "--nproc-per-node",
        "1",
        "--no-preload",
        "--max-restarts",
        "3",
        "--rdzv-id",
        "none",
        "--rdzv-conf",
        "last_call_timeout=0",
    )
    first = group.start(*flags, backend="c10d", nnodes="1:2")
    assert "training" in first.stdout.readline()
    stranger = group.start(*flags, backend="c10d", nnodes="1:2", script=write_script(tmp_path, "", "other.py"))
    out, err = stranger.communicate(timeout=LIMIT_S)
    assert (stranger.returncode, out) == (1, "")
    here = socket.gethostname()
    want = f"{here} runs train.py at this place, and this is other.py: give it an --rdzv-id or a port of its own"
    assert re.search(rf"not let in at \S+: {re.escape(want)}", err), err
    (tmp_path / "end").touch()
    (code, out, err), _ = group.finish()
    assert (code, out) == (0, "")
    assert "nodes of the job" not in err
    assert "other.py" not in err
