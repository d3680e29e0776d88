"""Replicas of snapshots: which nodes hold them, what is sent, and what is not taken for whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import select
import signal
import socket
import threading
import time

import pytest

from phalanx.checkpoint.memory import layout
from phalanx.checkpoint.memory.layout import Copied, region_of_others, region_offset
from phalanx.launch.nodes.views import Node
from phalanx.launch.replicas.holders import holders_of
from phalanx.launch.replicas.process import Replicas
from phalanx.launch.replicas.receiver import Receiver
from phalanx.launch.replicas.wire import PIECE, Wire
from phalanx.launch.screen.events import EventLoop
from tests.replicas import FOLDER, ReplicaHost, write_snapshot

LIMIT_S = 60


# ---------------------------------------------------------------- which nodes


def nodes(*labels, port=1):
    return [Node(f"id{n}", f"host{n}", "", 1, 1, -1, label, port) for n, label in enumerate(labels)]


def first_holders(members):
    return [members.index(holders_of(members, node, 1)[0]) for node in members]


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (["", "", ""], [1, 2, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "a"], [1, 0]),
    ],
)
def test_each_node_holds_for_one_other_in_another_domain(labels, wanted):
    assert first_holders(nodes(*labels)) == wanted


def test_a_second_replica_goes_to_a_third_domain_before_a_second_node_of_one():
    members = nodes("a", "b", "b", "c", "a")
    assert [node.label for node in holders_of(members, members[0], 2)] == ["b", "c", "b", "a"]


def test_nodes_that_take_none_are_left_out():
    members = [*nodes("", ""), *nodes("", "", "", port=0)[2:]]
    assert holders_of(members, members[0], 1) == [members[1]]
    assert holders_of(members, members[0], 0) == []


# ---------------------------------------------------------------- real processes


@pytest.fixture
def new_host():
    """``new_host(name)`` starts a host."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(ReplicaHost(*args, **options)))


def test_what_ranks_have_written_comes_to_the_holders(new_host):
    a, b, c = new_host("a", 2), new_host("b"), new_host("c")
    a.follow([("b", b.port), ("c", c.port)])
    contents = [os.urandom(3_000_000), os.urandom(5)]
    a.write((1, 7), contents, first_rank=2, world_size=6)
    assert a.await_copied((1, 7))[:3] == Copied(1, 7, 2, 0)[:3]
    for holder in (b, c):
        assert holder.kept() == {(1, 7, 2): contents[0], (1, 7, 3): contents[1]}


def test_a_holder_that_is_gone_or_does_not_want_is_passed_over_and_named(new_host):
    a, b = new_host("a"), new_host("b")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    a.follow([("gone", gone), ("not b", b.port), ("b", b.port)])
    a.write((1, 1), [b"content"])
    assert a.await_copied((1, 1)).num_replicas == 1
    assert b.kept() == {(1, 1, 0): b"content"}
    a.follow([("not b", b.port)])
    a.write((1, 2), [b"content"])
    assert a.await_copied((1, 2)).num_replicas == 0
    said = "not b keeps no replica (another node has this address)"
    assert a.channel.wait() == {"say": f"replicas of this host's snapshots: {said}"}


def test_a_holder_that_has_failed_too_often_is_asked_again(new_host):
    a = new_host("a", pauses_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    a.follow([("b", port)])
    a.write((1, 1), [b"content"])
    assert a.await_copied((1, 1)).num_replicas == 0
    assert "b accepts none now" in a.channel.wait()["say"]
    b = new_host("b", port=port)
    for step in itertools.count(2):
        a.write((1, step), [b"content"])
        if a.await_copied((1, step)).num_replicas == 1:
            break
    assert a.channel.wait() == {"say": "replicas of this host's snapshots are being kept again"}
    assert b.kept() == {(1, step, 0): b"content"}


def test_what_ranks_write_over_while_it_is_sent_is_never_said_to_be_whole(new_host):
    a = new_host("a")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        a.follow([("b", listener.getsockname()[1])])
        a.write((1, 1), [b"content"])
        with contextlib.closing(Wire(listener.accept()[0])) as wire:
            assert wire.hear()["numbers"] == [0]
            wire.tell({"has": False})
            (length,) = PIECE.unpack(wire.receive(PIECE.size))
            assert wire.receive(length) == b"content"
            os.pwrite(a.fd, bytes(8), region_offset(0, 1) + 8)  # a rank begins to write
            wire.send(b".")
            with pytest.raises(ConnectionResetError):
                wire.receive(PIECE.size)
        assert layout.last_copied(a.fd) is None


# ---------------------------------------------------------------- the holder, as a sender sees it


def offer(wire, step, sizes, *, safe=(0, 0), holder="b", numbers=None, world_size=4):
    """Offer images and return the answer."""
    numbers = list(range(len(sizes))) if numbers is None else numbers
    said = {"run_id": "job", "holder": holder, "attempt": 1, "step": step, "folder": FOLDER.hex()}
    return wire.ask(
        {**said, "world_size": world_size, "first_rank": 0, "numbers": numbers, "sizes": sizes, "safe": list(safe)}
    )


def send(wire, content):
    wire.send(PIECE.pack(len(content)) + content)
    wire.await_byte()


@pytest.fixture
def holder(new_host):
    return new_host("b", most_mib=8)


@pytest.fixture
def wire(holder):
    with contextlib.closing(Wire.to("127.0.0.1", holder.port)) as wire:
        assert offer(wire, 0, [1]) == {"has": False}
        send(wire, b"0")
        wire.commit()
        yield wire


def test_a_torn_copy_leaves_the_one_before(holder, wire):
    assert offer(wire, 1, [6, 4], safe=(1, 0)) == {"has": False}
    send(wire, b"abc")
    wire.close()
    with contextlib.closing(Wire.to("127.0.0.1", holder.port)) as again:
        assert offer(again, 2, [1]) == {"has": False}  # when it answers, it has let go of what was torn
        assert holder.kept() == {(1, 0, 0): b"0"}


def test_what_is_safe_stays_whatever_comes(holder, wire):
    for step in (1, 2, 3):
        assert offer(wire, step, [1], safe=(1, 0)) == {"has": False}
        send(wire, b"%d" % step)
        wire.commit()
        assert holder.kept() == {(1, 0, 0): b"0", (1, step, 0): b"%d" % step}
    assert offer(wire, 4, [1], safe=(1, 3)) == {"has": False}
    assert holder.kept() == {(1, 3, 0): b"3"}


def test_what_is_there_already_is_not_sent_again(holder, wire):
    assert offer(wire, 0, [1]) == {"has": True}
    assert holder.kept() == {(1, 0, 0): b"0"}


def test_what_was_kept_for_an_attempt_before_that_of_the_safe_one_is_freed(holder, wire):
    assert offer(wire, 5, [1], safe=(1, 4), numbers=[3]) == {"has": False}
    assert (1, 0, 0) in holder.kept()
    wire.close()
    with contextlib.closing(Wire.to("127.0.0.1", holder.port)) as again:
        assert offer(again, 6, [1], safe=(2, 4), numbers=[3]) == {"has": False}
        assert holder.kept() == {}
        assert os.pread(holder.fd, 8, region_of_others(0, 0)) in (b"", bytes(8))


def test_a_holder_without_memory_refuses_and_keeps_what_it_has(holder, wire):
    answer = offer(wire, 1, [(1 << 36) - 8192] * 4)
    assert answer["refused"].startswith("with them, snapshots would take 26214")
    assert holder.kept() == {(1, 0, 0): b"0"}


def test_a_sender_that_knows_a_holder_before_it_does_itself_is_not_refused(new_host):
    a, b = new_host("a"), new_host("b", is_known=False)
    a.follow([("b", b.port)])
    a.write((1, 1), [b"content"])
    with contextlib.closing(Wire.to("127.0.0.1", b.port)) as wire:
        wire.tell({"run_id": "job", "holder": "another"})
        assert not select.select([wire.fileno()], [], [], 0.2)[0]
        b.follow([])
        assert "refused" in wire.hear()
    assert a.await_copied((1, 1)).num_replicas == 1


@pytest.mark.parametrize("wrong", ["another", ""])
def test_who_looks_for_another_node_is_refused(wire, wrong):
    assert offer(wire, 1, [1], holder=wrong) == {"refused": "another node has this address"}


@pytest.mark.parametrize("wrong", [{"sizes": [-1]}, {"sizes": [1 << 40]}, {"numbers": [4]}, {"sizes": [], "step": 1}])
def test_who_offers_nonsense_is_left(wire, wrong):
    with pytest.raises(ConnectionResetError):
        offer(wire, wrong.get("step", 1), wrong.get("sizes", [1]), numbers=wrong.get("numbers"))


def test_a_process_that_is_killed_is_started_again_and_copies_and_the_report_says_so():
    said = []
    events = EventLoop(said.append)
    holder, fd = ReplicaHost("b"), os.memfd_create("snapshots")
    keep_list = []
    replicas = Replicas(events, said.append, fd, "job", 1, keep_list)
    told = [{"id": "b", "host": "b", "address": "127.0.0.1", "port": holder.port}]
    replicas.follow({"me": "a", "holders": told})
    for step in (1, 2):
        first_pid = replicas.pid
        write_snapshot(fd, (1, step), [b"x" * 9000])
        deadline = time.monotonic() + LIMIT_S
        while (copied := layout.last_copied(fd)) is None or copied.step != step:
            assert time.monotonic() < deadline
            events.wait(0.01)
        assert copied.num_replicas == 1
        assert (1, step, 0) in holder.kept()
        os.kill(first_pid, signal.SIGKILL)
        while replicas.pid == first_pid:
            assert time.monotonic() < deadline
            events.wait(1)
        assert keep_list == [replicas.pid]
    again = "the process that copies snapshots to other hosts has ended: no new replicas are made until it is started"
    assert said == [f"{again} again, in 0.5 s", f"{again} again, in 1 s"]
    gaps = layout.gaps_in_copying(fd)
    assert gaps.num == 2
    assert 500 <= gaps.total_ms < LIMIT_S * 1000
    assert gaps.since_ms  # the second time it is not back yet
    replicas.close()
    events.close()
    holder.close()
    os.close(fd)


@pytest.mark.parametrize("number", [1 << 22, 1 << 26, 1 << 50])
def test_images_beyond_the_address_space_are_no_offer(wire, number):
    with pytest.raises(ConnectionResetError):
        offer(wire, 1, [1], numbers=[number], world_size=1 << 62)


@pytest.fixture
def stranger():
    """Yield a socket and the wire at its other end."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as end,
        contextlib.closing(Wire(listener.accept()[0])) as heard,
    ):
        yield end, heard


def test_a_line_that_nests_too_deeply_is_no_message(stranger):
    end, heard = stranger
    end.sendall(b"[" * 60_000 + b"\n")
    with pytest.raises(ValueError, match="nested too deeply"):
        heard.hear()


def test_a_stranger_that_says_nothing_is_left(stranger, monkeypatch):
    monkeypatch.setattr("phalanx.launch.replicas.wire.REPLICA_SILENCE_S", 0.05)
    end, heard = stranger
    serving = threading.Thread(target=object.__new__(Receiver)._serve, args=(heard,), daemon=True)
    serving.start()
    end.settimeout(LIMIT_S)
    assert end.recv(1) == b""
    serving.join(LIMIT_S)
    assert not serving.is_alive()


def test_a_stranger_that_sends_a_byte_at_a_time_is_left_after_the_same_time(stranger, monkeypatch):
    monkeypatch.setattr("phalanx.launch.replicas.wire.REPLICA_SILENCE_S", 0.3)
    end, heard = stranger
    serving = threading.Thread(target=object.__new__(Receiver)._serve, args=(heard,), daemon=True)
    serving.start()
    deadline = time.monotonic() + LIMIT_S
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            end.sendall(b" ")
            serving.join(0.01)
    serving.join(LIMIT_S)
    assert not serving.is_alive()


class FullDoor:
    """A listener in a process that has no descriptor left, until it is looked at for the third time."""

    def __init__(self):
        self.looks_s = []

    def accept(self):
        self.looks_s.append(time.monotonic())
        if len(self.looks_s) == 3:
            raise SystemExit
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_holder_without_descriptors_does_not_spin():
    receiver = object.__new__(Receiver)
    receiver._listener = FullDoor()
    with pytest.raises(SystemExit):
        receiver._accept()
    first_s, second_s, third_s = receiver._listener.looks_s
    assert min(second_s - first_s, third_s - second_s) >= 0.1


def test_a_holder_without_descriptors_takes_what_waits_at_its_listener_once_it_has_one(holder, wire):
    pid = holder.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min({*range(len(taken) + 1)} - taken), before[1]))
    with contextlib.closing(Wire.to("127.0.0.1", holder.port)) as late:
        assert offer(wire, 0, [1]) == {"has": True}  # who is inside is served
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert offer(late, 0, [1]) == {"has": True}


def test_a_holder_that_is_stopped_is_passed_over_and_asked_again(new_host):
    a, b, c = new_host("a", heard_s=0.5), new_host("b"), new_host("c")
    a.follow([("b", b.port), ("c", c.port)])
    a.write((1, 1), [b"1"])
    a.await_copied((1, 1))
    assert b.kept() == {(1, 1, 0): b"1"}
    b.process.send_signal(signal.SIGSTOP)
    step, deadline = 1, time.monotonic() + LIMIT_S
    while not select.select([a.channel.fileno()], [], [], 0)[0]:  # it says nothing yet
        assert time.monotonic() < deadline
        step += 1
        a.write((1, step), [b"2"])
        assert a.await_copied((1, step)).num_replicas == 1
        assert (1, step, 0) in c.kept()
    said = "b accepts none now (no answer within 0.5 s): it will be asked again after increasing pauses"
    assert a.channel.wait() == {"say": f"replicas of this host's snapshots: {said}"}
    b.process.send_signal(signal.SIGCONT)
    while (1, step, 0) not in b.kept():
        assert time.monotonic() < deadline
        step += 1
        a.write((1, step), [b"3"])
        a.await_copied((1, step))


def test_what_follows_a_line_is_left_to_be_read(stranger):
    end, heard = stranger
    for said in (b'{"a"', b": 1}\nbc", b"d"):
        end.sendall(said)
    assert heard.hear() == {"a": 1}
    assert heard.receive(3) == b"bcd"


def test_what_strangers_cost_is_not_what_copies_cost():
    receiver = object.__new__(Receiver)
    receiver._is_known, receiver.spent_s, receiver.me, receiver._run_id = threading.Event(), 0.0, "b", "job"
    receiver._fd, receiver._lock = os.memfd_create("snapshots"), threading.Lock()
    receiver._receiving, receiver._lengths = {}, {}

    @contextlib.contextmanager
    def served():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            end, heard = socket.create_connection(listener.getsockname()), listener.accept()[0]
        serving = threading.Thread(target=receiver._serve, args=(Wire(heard),))
        serving.start()
        with contextlib.closing(Wire(end)) as wire:
            yield wire
        serving.join(LIMIT_S)

    for _ in range(3):
        with served() as wire:
            assert "refused" in offer(wire, 1, [1] * 4000, holder="another")
    assert receiver.spent_s == 0.0
    with served() as wire:
        assert offer(wire, 1, [1]) == {"has": False}
        send(wire, b"1")
        wire.commit()
    assert receiver.spent_s > 0.0
    os.close(receiver._fd)
