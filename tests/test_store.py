"""The store in which processes meet: JSON of a checked shape, and no wait that a stopped server could make endless."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx import CollectiveTimeout, PhalanxError
from phalanx.backend.hosts.meeting import Meeting
from phalanx.doctor.hosts.bulletin import Bulletin, NotMetError
from phalanx.rendezvous.asked import read_url
from phalanx.rendezvous.patience import Patience
from phalanx.rendezvous.roll_call import RollCall
from phalanx.wire.messages import GarbledError, one_of, understand
from phalanx.wire.store import JsonStore, StoreGoneError, connect_within
from phalanx.wire.waiting import StoreSilentError, wait_until

SERVE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server():
    """A process that serves a store, and the port."""
    with subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, int(process.stdout.readline())
        process.kill()
    gc.collect()  # errors hold frames, and frames hold stores


def connect(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def took(call, error):
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    return time.monotonic() - begin, str(caught.value)


def test_no_wait_hangs_on_a_store_whose_server_is_stopped(server):
    process, port = server
    stores = [connect(port) for _ in range(4)]
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until then it may answer
    asked = read_url(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", timedelta(seconds=0.5), "train.py:1")
    patience = Patience(asked)
    meeting = Meeting(JsonStore(stores[0]), 1, 2, "default", [0, 1], 0.5, time.monotonic() + 0.5)
    plain = JsonStore(stores[1])
    waits = [
        (lambda: plain.get("x", str), StoreSilentError, "does not answer"),
        (lambda: plain.has("x"), StoreSilentError, "has not answered yet"),
        (lambda: meeting.get("hello/0", "rank 0 did not answer"), CollectiveTimeout, "within the timeout"),
        (lambda: meeting.set("hello/1", {}), CollectiveTimeout, "the job's store did not answer within the timeout"),
        (lambda: RollCall(stores[2], asked, patience).answer(), CollectiveTimeout, f"{port} does not answer"),
        (
            lambda: Bulletin(stores[3]).wait_for("x", str, time.monotonic() + 0.5, "host 0"),
            NotMetError,
            "gave up waiting for host 0",
        ),
    ]
    try:
        for wait, error, text in waits:
            took_s, said = took(wait, error)
            assert took_s < 15  # the machine may be busy; endless is what must not be
            assert text in said
        os.kill(process.pid, signal.SIGCONT)
        plain.set("x", ["y"], 20)  # it goes on: nothing was lost
        assert plain.get("x", [str]) == ["y"]
        assert Bulletin(stores[3]).wait_for("x", [str], time.monotonic() + 20, "host 0") == ["y"]
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_store_that_has_gone_is_asked_once(server):
    process, port = server
    store = JsonStore(connect(port))
    assert store.get("x", str) is None
    assert (store.add("n"), store.add("n"), store.count("n")) == (1, 2, 2)
    process.kill()
    process.wait()
    with pytest.raises(StoreGoneError):
        store.has("x")
    with pytest.raises(StoreGoneError, match="failed before"):
        wait_until(lambda: store.get("x", str), time.monotonic() + 60)
    store.close()


def test_what_is_read_has_its_shape_or_is_refused():
    shape = {"rank": int, "hosts": [str], "process": (str, int), "level": one_of("ok", "bad")}
    told = '{"rank": 1, "hosts": ["a"], "process": ["b", 2], "level": "ok", "more": null}'
    assert understand(told, shape)["more"] is None
    for wrong in ("", "[", "[" * 100_000, "1", told.replace("1", "true"), told.replace('"ok"', "[]"), told[:-30] + "}"):
        with pytest.raises(GarbledError):
            understand(wrong, shape)


def test_a_rank_that_the_roll_call_refuses_raises_what_it_was_told(tmp_path):
    """Nothing that anybody writes into the store raises another error than that."""
    store = dist.HashStore()
    asked = read_url("tcp://127.0.0.1:1?rank=1&world_size=2", 5, "train.py:1", "init_process_group")
    call = RollCall(store, asked, Patience(asked))
    key = f"phalanx-roll/word/{call._mine['token']}"
    for garbage in ("{", "[]", '{"kind": "os", "text": "t", "ranks": [], "facts": {}}', '{"prefix": 1}'):
        store.set(key, garbage)
        assert call._word() is None
    store.set(key, '{"kind": "PhalanxError", "text": "two of one rank", "ranks": [1], "facts": {}}')
    with pytest.raises(PhalanxError, match="two of one rank"):
        call._word()
    call._store.close()


class StoreThatIsOvertaken:
    """A store between whose check of a key and whose get something happens, once."""

    def __init__(self, store, key, happen):
        self._store, self._key, self._happen = store, key, happen

    def check(self, keys):
        found = self._store.check(keys)
        if keys == [self._key]:
            happen, self._happen = self._happen, lambda: None
            happen()
        return found

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_roll_that_ends_while_a_rank_looks_takes_no_key_from_it():
    store = dist.HashStore()
    asked = [read_url(f"tcp://127.0.0.1:1?rank={rank}&world_size=2", 5, "train.py:1") for rank in (0, 1)]
    first, second = (RollCall(store, one, Patience(one)) for one in asked)
    first._arrive()
    second._arrive()
    assert second._reply() is None
    second._store.raw = StoreThatIsOvertaken(second._store.raw, "rank/0", first._call)
    second._look()
    assert str(second._reply()) == f"phalanx-{first._mine['token']}"
    for call in (first, second):
        call._store.close()


def test_a_rank_waits_for_a_store_that_is_silent_when_it_arrives():
    asked = read_url("tcp://127.0.0.1:1?rank=0&world_size=1", 60, "train.py:1")
    call = RollCall(dist.HashStore(), asked, Patience(asked))
    silent = threading.Event()
    call._store.raw = StoreThatIsOvertaken(call._store.raw, "server", lambda: silent.wait(60))
    call._store.answer_s = 0.01
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(call.answer)
        while not call._store.is_silent and not answer.done():
            time.sleep(0.001)
        call._store.answer_s = 60
        silent.set()
        assert str(answer.result()) == f"phalanx-{call._mine['token']}"


def test_a_signal_handler_may_ask_in_the_middle_of_a_question():
    store = JsonStore(dist.HashStore())
    store.set("x", 1)
    answers = []
    former = signal.signal(signal.SIGUSR1, lambda *_: answers.append(store.get("x", int)))
    try:
        with store._clerk._lock:  # as whoever is asking has it
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert answers == [1]
    store.close()


def test_a_question_waits_for_that_of_another_thread():
    store = JsonStore(dist.HashStore())
    is_asked = threading.Event()

    def ask_slowly(_):
        is_asked.set()
        time.sleep(0.3)

    other = threading.Thread(target=lambda: store.ask(ask_slowly))
    other.start()
    is_asked.wait(10)
    assert not store.has("x")
    other.join()
    store.close()


def test_who_waits_for_a_connection_learns_that_the_process_has_ended():
    release = threading.Event()

    def look():
        raise ConnectionRefusedError("its process has ended")

    try:
        with pytest.raises(ConnectionRefusedError, match="has ended"):
            connect_within(600, release.wait, look)
    finally:
        release.set()
