"""What another host tells may be anything: it is read whole, or refused, and what was read can be judged and printed.

Short here; PHALANX_TEST_LONG=1 (`make stress`, through tests/stress) tries 10,000 messages for each reader.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from phalanx.doctor import report
from phalanx.doctor.examination import HostRole
from phalanx.doctor.finding import problem
from phalanx.doctor.hosts import job, links, messages
from phalanx.doctor.hosts.bulletin import Bulletin, come_to_bulletin
from phalanx.doctor.hosts.hosts import hold
from phalanx.wire.messages import GarbledError, read_value, understand

NUM_EXAMPLES = 10_000 if os.environ.get("PHALANX_TEST_LONG") == "1" else 150
MEMBERS = [0, 1, 2]
fuzzed = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=NUM_EXAMPLES < 10_000,
    suppress_health_check=list(HealthCheck),
)

FACTS = {
    "name": "host-a",
    "versions": {"torch": "2.15.0", "phalanx": "0.1.0", "python": "3.11.7", "gloo": True},
    "host": 1,
    "address": "10.0.0.1",
    "interface": "eth0",
    "port": 4711,
    "token": "ab" * 16,
    "findings": [problem("memory", "none left", "buy", size_bytes=1).as_dict() | {"host": 1}],
}
MEASURED = {
    "links": {
        "0": {"round_trip_s": 1e-4, "clock_ahead_s": -0.5, "bytes_per_s": 1e9},
        "2": {"error": "no answer", "todo": "look"},
    },
    "gloo": [{"interface": "", "error": "no"}, {"interface": "eth0", "seconds": 0.1}],
}
READERS = {
    "facts": (messages.facts, FACTS),
    "hosts": (messages.hosts, [FACTS]),
    "measured": (lambda told: messages.measured(told, MEMBERS), MEASURED),
    "members": (messages.members, MEMBERS),
    "level": (messages.level, "warning"),
    "finding": (messages.finding, FACTS["findings"][0]),
    "refused": (messages.text, "node rank 1 was given twice"),
    "expected": (messages.whole, 3),
}
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf")])
)
texts = st.one_of(
    st.text(st.characters()),
    st.sampled_from(["\x1b[2J", "\ud800", "a" * 5000, "fe80::1%eth0", "0", "\u0661", "9" * 5000]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


def places(told, at=()):
    """Every place in a message, as the keys that lead there."""
    yield at
    inside = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for key, value in inside:
        yield from places(value, (*at, key))


def changed(told, at, value, how):
    """The message with one place replaced, removed or added to."""
    if not at:
        return value
    told = copy.deepcopy(told)
    holder = told
    for key in at[:-1]:
        holder = holder[key]
    if how == "remove":
        del holder[at[-1]]
    elif how == "rename" and isinstance(holder, dict):
        holder[str(value)] = holder.pop(at[-1])
    else:
        holder[at[-1]] = value
    return told


def mutated(valid):
    hows = st.sampled_from(["replace", "remove", "rename"])
    one = st.builds(
        lambda at, value, how: changed(valid, at, value, how), st.sampled_from(list(places(valid))), values, hows
    )
    return st.one_of(one.map(json.dumps), values.map(json.dumps), st.binary(), st.text(), st.just("[" * 100_000))


def read(name, data):
    """Return what a reader makes of a message; None if it refuses it."""
    try:
        return understand(data, READERS[name][0])
    except GarbledError:
        return None


@pytest.mark.parametrize("name", READERS)
def test_every_reader_reads_what_the_doctor_tells(name):
    reader, told = READERS[name]
    assert understand(json.dumps(told), reader) is not None


@pytest.mark.parametrize("name", READERS)
def test_every_reader_reads_a_message_whole_or_refuses_it(name, capsys):
    @fuzzed
    @given(mutated(READERS[name][1]))
    def run(data):
        told = read(name, data)
        if told is None:
            return
        json.dumps(told if name != "finding" else told.as_dict()).encode()
        if name == "facts":
            job.compare_versions([FACTS, told])
        if name == "measured":
            hosts = [{**FACTS, "host": rank} for rank in MEMBERS]
            report._print_lines([(found, "job") for found in job.judge(hosts, {0: MEASURED, 1: told})], True)
        if name == "finding":
            report._print_lines(report.merged([told]), True)
            assert told.found.isprintable()
        capsys.readouterr()

    run()


def talk(data, call):
    """Call with one end of a connection at whose other end somebody says `data` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        ours.settimeout(5)

        def answer():
            with theirs:
                try:
                    theirs.sendall(data)
                    theirs.shutdown(socket.SHUT_WR)
                    while theirs.recv(1 << 20):
                        pass
                except OSError:  # the other end has hung up
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            return call(ours)
        finally:
            ours.close()
            thread.join(10)


stamps = st.lists(st.one_of(st.floats(), st.floats(0, 2e9)), max_size=24).map(
    lambda all_: struct.pack(f"!{len(all_)}d", *all_)
)
counts = st.builds(
    lambda num, s: struct.pack("!Qd", num, s), st.integers(0, 2**64 - 1), st.one_of(st.floats(), st.floats(0, 1))
)


@fuzzed
@given(st.one_of(stamps, st.binary(max_size=400)))
def test_a_measured_trip_is_finite_whatever_answers(data):
    try:
        trip = talk(data, links.measure_trip)
    except OSError:
        return
    read_value(trip.round_trip_s, messages.amount)
    read_value(trip.clock_ahead_s, messages.number)


@fuzzed
@given(st.one_of(counts, st.binary(max_size=40)))
def test_a_measured_stream_is_finite_whatever_answers(data):
    try:
        rate = talk(data, lambda connection: links.measure_stream(connection, 0.0))
    except OSError:
        return
    assert 0 <= rate <= 1e30


def test_a_listener_answers_whatever_it_is_asked_and_lives():
    listener = links.Listener()
    token = bytes.fromhex(listener.token)

    @fuzzed
    @given(st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(lambda rest: token + rest)))
    def run(data):
        talk(data, lambda connection: listener._answer(connection))

    try:
        run()
        with links.connect("127.0.0.1", listener.port, listener.token) as connection:
            assert 0 < links.measure_trip(connection).round_trip_s < 5
    finally:
        listener.close()


def role_of(rank, port):
    place = HostRole(
        num_hosts=2,
        least_hosts=2,
        node_rank=rank,
        serves=rank == 0,
        master_port=port,
        timeout_s=5.0,
        address="127.0.0.1",
    )
    return dataclasses.asdict(place)


def hold_meeting(rank, port):
    """Return the findings of a host and what it says at the end."""
    packets = []
    hold(role_of(rank, port), {"facts": {"name": "me", "versions": {}}, "findings": []}, packets.append)
    return [messages.finding(packet["finding"]) for packet in packets if "finding" in packet], packets[-1]


def meet_with_garbage(rank, world_size, port):
    if rank == 0:
        return hold_meeting(0, port)
    bulletin, _ = come_to_bulletin("127.0.0.1", port, time.monotonic() + 10, lambda packet: None)
    bulletin.set("facts/1", "host 1")
    return None


def test_a_host_that_tells_garbage_is_named_by_host_0(run_ranks):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (findings, end), _ = run_ranks(meet_with_garbage, 2, port, backend=None, init=False)
    assert end["job"] == "problem"
    assert [finding.found for finding in findings] == [
        "host 1 sent something that this phalanx doctor does not understand: 'host 1' is not a table"
    ]


def meet_a_garbling_host_0(rank, world_size, told):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bulletin = Bulletin(store)
    bulletin.set("phalanx-doctor", 2)
    bulletin.set("hosts", [FACTS])
    bulletin.set("members", told)
    return store.port, *hold_meeting(1, store.port)


@pytest.mark.parametrize("told", ["both", [0, 1], [0], [[]], None])
def test_a_host_0_that_tells_garbage_is_named_by_the_others(run_ranks, told):
    ((port, findings, end),) = run_ranks(meet_a_garbling_host_0, 1, told, backend=None, init=False)
    assert end["job"] == "problem"
    (finding,) = findings
    assert f"host 0 at 127.0.0.1:{port} sent something that this phalanx doctor does not understand: " in finding.found
