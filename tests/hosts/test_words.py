"""Whatever anybody writes to a mailbox or into the store is a message, nothing, or an error that names a rank."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import PhalanxError
from phalanx._errors import Failure
from phalanx._errors.facts import MadeCall, Peer, SizeDispute, Standing
from phalanx.backend.failures.wording import error_of
from phalanx.backend.hosts import notices as notices_module
from phalanx.backend.hosts.mailbox import Mailbox, post
from phalanx.backend.hosts.meeting import _SHAPES, Meeting
from phalanx.backend.hosts.notices import Notices, group_failure_in
from phalanx.wire.messages import fits
from phalanx.wire.store import JsonStore

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
many = settings(max_examples=10_000 if LONG else 150, deadline=None, database=None)
TOKEN_LINE_BYTES = 33

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
)
HELLO = {"pid": 1, "host": "a", "kernel": "k", "network": "n", "torch": "2", "bridge": "gloo", "segments": ["s"]}
CALLS = (MadeCall(rank=0, op="barrier"), MadeCall(rank=1, host="b", op="recv", count=1, sizes=(1, 2), tag=0))
GROUP_FAILURES = [
    Failure(kind="calls_differ", rank=1, op="barrier", seq=3, site="a.py:1", calls=CALLS),
    Failure(kind="rank_lost", rank=0, culprits=(Peer(rank=1, pid=7, host="b"), Peer(rank=2)), hosts=("b",)),
    Failure(kind="rank_missing", rank=0, seq=3, timeout_s=1.5, standings=(Standing(rank=1, last=2), Standing(rank=2))),
    Failure(kind="unusable", rank=0, cause=Failure(kind="no_memory", rank=1, by=Peer(rank=2), size_bytes=4096)),
    Failure(
        kind="sizes_differ", rank=0, sizes=SizeDispute(one=Peer(rank=0), count=1, other=Peer(rank=1), other_count=2)
    ),
]


@st.composite
def almost(draw, whole):
    """Return the bytes of what is said, with a part of it replaced or left out, or cut off; or any bytes."""
    said = dict(whole)
    for key in draw(st.lists(st.sampled_from(sorted(whole)), max_size=2)):
        said[key] = draw(values)
        if draw(st.booleans()):
            del said[key]
    text = json.dumps(said).encode()
    return draw(st.sampled_from([text, text[: draw(st.integers(0, len(text)))], b"[" * 5_000])) if said else b""


@pytest.fixture
def mailbox():
    box = Mailbox("127.0.0.1")
    yield box
    box.close()


def test_a_store_whose_server_has_gone_is_silent_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(notices_module, "RECONNECT_S", 0.01)
    has_answered = threading.Event()

    class Gone:
        def clone(self):
            has_answered.wait()

    notices = Notices(Gone(), None, None, {})
    assert notices.group_failure(is_patient=False) is None
    has_answered.set()
    notices._store.close()


def connect(box, data=b""):
    """Return a connection to a mailbox, over which `data` went."""
    link = socket.create_connection(box.name[:2])
    link.sendall(data)
    return link


@many
@given(
    st.binary(max_size=200)
    | st.sampled_from(GROUP_FAILURES).flatmap(lambda failure: almost(failure.to_facts()))
    | values.map(lambda value: json.dumps(value).encode())
)
def test_a_group_failure_is_understood_or_nothing(text):
    failure = group_failure_in(text)
    if failure is not None:
        error = error_of(failure)
        assert str(error).startswith(f"rank {failure.rank}")
        assert error.ranks == failure.ranks


@pytest.mark.parametrize("failure", GROUP_FAILURES, ids=lambda failure: failure.kind)
def test_a_group_failure_arrives_whole(failure):
    assert group_failure_in(json.dumps(failure.to_facts()).encode()) == failure


def test_a_group_failure_nested_for_ever_is_nothing():
    text = b'{"kind":"unusable","rank":0,"cause":' * 5_000 + b"null" + b"}" * 5_000
    assert group_failure_in(text) is None


@many
@given(
    st.sampled_from(sorted(_SHAPES)),
    st.binary(max_size=200) | almost(HELLO) | values.map(lambda value: json.dumps(value).encode()),
)
def test_what_a_rank_says_is_understood_or_names_it(name, text):
    store = dist.HashStore()
    key = {"came": "came", "offer": "segment/1/offer", "placed": "segment/1/placed"}.get(name, f"{name}/1")
    store.set(key, text)
    meeting = Meeting(JsonStore(store), 0, 2, "default", [5, 7], 1.0, time.monotonic() + 1.0)
    try:
        said = meeting.get(key, "nobody came")
    except PhalanxError as error:
        told = error
    else:
        assert fits(said, _SHAPES[name])
        return
    assert told.ranks == ((5,) if name == "came" else (7,))
    assert "can't parse what rank " in str(told)


@contextmanager
def without_collector():
    """Keep the garbage collector from running: with torch loaded it takes longer than what is measured."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@settings(many, max_examples=10_000 if LONG else 50)
@given(st.binary(max_size=99) | almost(GROUP_FAILURES[0].to_facts()), st.booleans())
def test_a_mailbox_takes_a_message_or_nothing(data, is_known):
    box = Mailbox("127.0.0.1")
    with closing(box), connect(box, (box.name[2].encode() + b"\n") * is_known + data) as link:
        link.shutdown(socket.SHUT_WR)
        with without_collector():
            began_s = time.thread_time()  # which a busy machine does not change
            message = box.read()
            took_s = time.thread_time() - began_s
    assert message is None or (is_known and json.loads(data) == message)
    assert took_s < 0.2


def test_a_stranger_who_drips_does_not_hold_up_a_message(mailbox):
    is_over = threading.Event()

    def drip():
        with connect(mailbox) as link:
            while not is_over.wait(0.02):
                link.send(b"x")

    strangers = [threading.Thread(target=drip) for _ in range(8)]
    for stranger in strangers:
        stranger.start()
    took_s = []
    for number in range(20):
        began_s = time.monotonic()
        assert not post([mailbox.name], {"left": number}, 5)
        while (message := mailbox.read()) is None:
            pass
        assert message == {"left": number}
        took_s.append(time.monotonic() - began_s)
    is_over.set()
    for stranger in strangers:
        stranger.join()
    assert max(took_s) < 1.0
    assert sum(took_s) < 3.0  # strangers are waited for one second in all


def test_a_flood_takes_no_memory_and_lets_a_message_through(mailbox):
    with connect(mailbox) as flood:
        flood.setblocking(False)
        num_sent = 0
        for _ in range(50):
            try:
                num_sent += flood.send(b"x" * (1 << 20))
            except BlockingIOError:  # nobody reads it
                mailbox.read()
            except ConnectionError:
                break
        links = [connect(mailbox) for _ in range(300)]
        assert not post([mailbox.name], {"left": 1}, 5)
        deadline = time.monotonic() + 5
        while (message := mailbox.read()) is None and time.monotonic() < deadline:
            pass
        assert message == {"left": 1}
        assert sum(len(letter._data) for letter in mailbox._open) <= 64 * TOKEN_LINE_BYTES
        for link in links:
            link.close()


def test_a_message_that_is_too_long_is_dropped(mailbox):
    with connect(mailbox, mailbox.name[2].encode() + b"\n") as link:
        link.setblocking(False)
        num_sent = 0
        while True:
            try:
                num_sent += link.send(b"[" * 100_000)
            except BlockingIOError:
                assert mailbox.read() is None
            except ConnectionError:
                break
        assert num_sent < 20 << 20


def say_nonsense(rank, world_size, folder):
    """Rank 1 says a hello that is none."""
    if rank == 1:
        gather = Meeting.gather
        Meeting.gather = lambda self, hello, *place: gather(self, {**hello, "pid": "none"}, *place)
    began_s = time.monotonic()
    with pytest.raises(PhalanxError) as told:
        dist.init_process_group(
            "phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
    return str(told.value), told.value.ranks, time.monotonic() - began_s


def test_a_hello_that_is_not_understood_is_named_on_every_rank(run_ranks, tmp_path):
    for rank, (text, ranks, took_s) in enumerate(run_ranks(say_nonsense, 3, str(tmp_path), hosts=[1, 2], init=False)):
        assert text.startswith(f"rank {rank}: init_process_group: ")
        assert "can't parse what rank 1 wrote under hello/1: " in text
        assert ranks == (1,)
        assert took_s < 20
