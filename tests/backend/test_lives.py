"""A group over a store in which an earlier one has lived: nothing of that is believed."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import phalanx
from phalanx import PhalanxError, _core, _env
from phalanx._settings import read_settings
from phalanx.backend.hosts.joining import _hello
from phalanx.backend.hosts.meeting import Meeting
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.failure.ending import Ending
from phalanx.rendezvous import server
from phalanx.rendezvous.asked import read_url
from phalanx.rendezvous.launched import Launch
from phalanx.wire.messages import as_facts
from phalanx.wire.store import JsonStore
from phalanx.wire.waiting import wait_until
from tests.forked import TORCHRUN
from tests.ports import free_port

LIMIT_S = 60


def live(rank, world_size, store, name):
    """One life of a world and of every kind of group within it."""
    dist.init_process_group(name, store=store, rank=rank, world_size=world_size)
    everyone = [dist.group.WORLD, dist.new_group(), dist.new_group([1, 0])]
    if HAS_PYTHON_BACKENDS:
        everyone.append(dist.group.WORLD.split_group([0, 1]))
    everyone.append(make_by_hand(store, rank, world_size, name))
    totals = []
    for group in everyone:
        tensor = torch.full((1000,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        totals += tensor.unique().tolist()
    dist.destroy_process_group()
    return totals


def make_by_hand(store, rank, size, name):
    """Make a group as programs do that send weights to processes outside of their world."""
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        name,
        dist.PrefixStore("weights", store),
        group_name="weights",
        timeout=timedelta(seconds=LIMIT_S),
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def live_on(rank, world_size, name, folder, port, num_lives):
    """Return what many lives over each kind of store add up to."""
    if name == "gloo":
        phalanx.replace_gloo()
    served = dist.TCPStore("127.0.0.1", int(port), world_size, rank == 0)
    stores = [served, dist.FileStore(f"{folder}/kept", world_size), dist.PrefixStore("mine", served)]
    totals = [live(rank, world_size, store, name) for store in stores for _ in range(num_lives)]
    served.add("num_done", 1)
    while rank == 0 and served.add("num_done", 0) < world_size:
        time.sleep(0.01)
    return totals


@pytest.mark.parametrize("name", ["phalanx", "gloo"])
def test_every_life_over_a_kept_store_is_a_fresh_one(run_ranks, tmp_path, name):
    num_groups = 4 + HAS_PYTHON_BACKENDS
    for totals in run_ranks(live_on, 2, name, str(tmp_path), free_port(), 4, init=False, timeout_s=LIMIT_S):
        assert totals == [[3.0] * num_groups] * 12


def say_and_hear(store, size, act=lambda meeting: None):
    """Return what each rank of a group hears, or its error; the ranks are threads."""
    heard = [None] * size

    def meet(rank):
        deadline = time.monotonic() + LIMIT_S
        meeting = Meeting(
            JsonStore(store), rank, size, "default", list(range(size)), LIMIT_S, deadline, is_in_place=True
        )
        try:
            with meeting.joining():
                act(meeting)
                hellos, _ = meeting.gather({**_hello(read_settings(), {}), "host": f"life of {meeting.token}"})
                heard[rank] = [meeting.life, *(hello["host"] for hello in hellos)]
        except PhalanxError as error:
            heard[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def leave_a_life(store, size, process):
    """Leave in a store what ranks that were killed in a meeting have written, each at its furthest."""
    say_and_hear(store, size)
    hello = {**_hello(read_settings(), {}), "token": "life-dead", "process": process}
    hellos = [
        {**hello, "token": "life-dead" if rank == 0 else f"life-{rank}", "answers": "life-dead"} for rank in range(size)
    ]
    failed = {"kind": "refused", "rank": 1, "group": "default", "op": "join", "detail": "of another life"}
    for rank, one in enumerate(hellos):
        store.set(f"hello/{rank}", json.dumps(one))
    for key, value in {
        "came": {"hellos": hellos, "place": None},
        "failed": failed,
        "life-dead/came": {"hellos": hellos, "place": {"nonce": "0" * 32, "offset": 1 << 40}},
        "life-dead/failed": failed,
        "life-dead/segment/0/offer": {"nonce": "0" * 32, "socket": "nobody"},
        "life-dead/segment/0/placed": {"offset": 1 << 40, "ranks": list(range(size))},
    }.items():
        store.set(key, json.dumps(value))
    for rank in range(size):  # and a group of Gloo's
        store.set(f"0/{rank}", "an address")


class LateStore:
    """A store that takes the first value of a key, and replies only when told to."""

    def __init__(self, store, key):
        self.store, self.key = store, key
        self.may_reply = threading.Event()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def set(self, key, value):
        self.store.set(key, value)
        if key == self.key:
            assert self.may_reply.wait(LIMIT_S)


@pytest.mark.parametrize("is_answer", [True, False], ids=["answer", "first word"])
def test_a_hello_whose_delivery_is_confirmed_late_counts(is_answer):
    """Otherwise the rank would say hello again, without an answer, when rank 0 no longer looks for hellos."""
    store = dist.HashStore()
    late = LateStore(store, "hello/1")
    json_store = JsonStore(late)
    json_store.answer_s = 0.05
    meetings = [
        Meeting(one, rank, 2, "default", [0, 1], LIMIT_S, time.monotonic() + LIMIT_S)
        for rank, one in enumerate((JsonStore(store), json_store))
    ]
    heard = {}

    def meet(rank):
        heard[rank], _ = meetings[rank].gather(_hello(read_settings(), {}))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    first, second = threads if is_answer else threads[::-1]
    first.start()
    wait_until(lambda: store.check([f"hello/{int(not is_answer)}"]) or None, time.monotonic() + LIMIT_S)
    second.start()
    if is_answer:  # rank 0 has all hellos and is gone before rank 1 hears that its own was delivered
        threads[0].join()
    wait_until(lambda: json_store.is_silent or None, time.monotonic() + LIMIT_S)
    late.may_reply.set()
    for thread in threads:
        thread.join()
    assert [[hello["token"] for hello in heard[rank]] for rank in (0, 1)] == [[m.token for m in meetings]] * 2
    for meeting in meetings:
        meeting.store.close()


@pytest.mark.parametrize("is_alive", [False, True], ids=["killed", "alive"])
def test_nothing_of_another_life_is_believed(is_alive):
    store, size = dist.HashStore(), 3
    pid, started, namespace = _core.identity()
    leave_a_life(store, size, (pid, started if is_alive else started + 1, namespace))
    heard = say_and_hear(store, size)
    assert heard[0] == heard[1] == heard[2]
    lives = [text.removeprefix("life of ") for text in heard[0]]
    assert lives[0] == lives[1]  # of rank 0
    assert len({*lives}) == size
    assert "life-dead" not in lives


def test_a_rank_that_can_not_join_tells_those_of_its_own_life():
    store, size = dist.HashStore(), 3
    leave_a_life(store, size, _core.identity())

    def fail(meeting):
        if meeting.rank == 1:
            raise meeting.refusal("no room here", ranks=(1,), entry="refused")

    for rank, error in enumerate(say_and_hear(store, size, fail)):
        assert isinstance(error, PhalanxError)
        assert str(error).startswith(f"rank {rank}: ")
        assert "no room here" in str(error)
    heard = say_and_hear(store, size)
    assert heard[0] == heard[1] == heard[2]


def test_a_rank_may_find_rank_0_at_any_moment_of_its_wait():
    store, has_looked = dist.HashStore(), threading.Event()

    def come_while_the_other_looks(meeting):
        if meeting.rank == 0:
            assert has_looked.wait(LIMIT_S)
            return
        look = meeting.look

        def look_when_rank_0_has_come():
            has_looked.set()
            while not store.check(["hello/0"]):
                time.sleep(0.001)
            look()

        meeting.look = look_when_rank_0_has_come

    heard = say_and_hear(store, 2, come_while_the_other_looks)
    assert heard[0] == heard[1] is not None


def send_weights(rank, world_size, port):
    """Rank 0 makes a group with another process, here rank 2, that is rank 1 there; rank 1 of the job has ended."""
    launch = Launch.of(_env.environment()[_env.LAUNCH_VARIABLE])
    if rank == 1:
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)
    if rank == 0:
        look, looks = Meeting.look, []

        def count(self):
            look(self)
            looks.extend(launch.ended())
            if len(looks) == 3:
                store.set("has looked", "")

        Meeting.look = count
    else:
        store.wait(["has looked"], timedelta(seconds=LIMIT_S))
    group = make_by_hand(store, rank // 2, 2, "phalanx")
    weights = torch.full((4,), 7.0 - rank)
    dist.broadcast(weights, src=0, group=group)
    dist.barrier(group=group)
    return weights.tolist()


def test_a_rank_that_is_no_member_may_end_while_a_group_is_made(run_ranks):
    outcomes = run_ranks(send_weights, 3, free_port(), expect_failures=True, timeout_s=LIMIT_S)
    assert [outcome.value for outcome in outcomes] == [[7.0] * 4, None, [7.0] * 4], outcomes


def test_only_where_the_launcher_said_are_the_ranks_known_by_number(monkeypatch, tmp_path):
    launch = Launch("phalanx run", str(tmp_path / "notes"), 0, 2, "127.0.0.1", 4321)
    launch._note("ended", as_facts(Ending(rank=1, pid=77, exitcode=0)))
    monkeypatch.setenv(_env.LAUNCH_VARIABLE, launch.to_text())
    monkeypatch.setenv(_env.PROCESS_VARIABLE, str(os.getpid()))
    for url, is_known in (("tcp://127.0.0.1:4321", True), ("tcp://127.0.0.1:4322", False), ("file:///meet", False)):
        asked = read_url(f"{url}?rank=0&world_size=2", None, "train.py:1")
        assert (server.who_left(asked) is not None) == is_known


RESTARTED = """
import os, torch, torch.distributed as dist
for _ in range(3):
    dist.init_process_group("gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    world = dist.group.WORLD
    assert type(world).__name__ == "PhalanxGroup"
    assert dist.get_backend() == world._get_backend_name() == "gloo"
    assert isinstance(world._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    inside = torch.ones(1)
    dist.all_reduce(inside, group=dist.new_group(backend="gloo"))
    objects = [None, None]
    dist.all_gather_object(objects, dist.get_rank())
    assert (inside.item(), objects) == (2.0, [0, 1])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise ValueError("once")
    dist.all_reduce(total)
    dist.destroy_process_group()
print("three lives")
"""


def test_torchruns_store_serves_every_attempt_and_every_life_in_the_place_of_gloo(forked, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    done = forked.run(
        *TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", free_port(),
        "--monitor-interval", "0.1", script, env={**os.environ, "PHALANX_REPLACE": "gloo", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("three lives") == 2
    assert "phalanx: " not in done.stderr, done.stderr


def test_ranks_that_do_not_come_are_told_soon_and_then_ever_more_seldom(monkeypatch):
    told = []
    monkeypatch.setattr("phalanx.backend.hosts.meeting.report_stall", lambda failure, _: told.append(failure.ranks))
    meeting = Meeting(JsonStore(dist.HashStore()), 0, 2, "default", [0, 1], 900.0, time.monotonic() + 900, stall_s=10.0)
    meeting._hello = {"token": meeting.token}
    num_told = []
    for waited_s in (5, 15, 30, 50, 80, 110):  # due after 10, 40 and 100 s
        meeting._begin_s = time.monotonic() - waited_s
        meeting._report_stall()
        num_told.append(len(told))
    assert num_told == [0, 1, 1, 2, 2, 3]
    assert set(told) == {(1,)}
