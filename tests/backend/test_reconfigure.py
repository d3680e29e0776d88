"""A living group gets other ranks: torch's reconfigure and shrink_group."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import _torch
from phalanx.backend import membership
from phalanx.wire.waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure since 2.14")

IN_PLACE = pytest.mark.parametrize("backend", ["phalanx", "gloo"])
GLOO = {"PHALANX_REPLACE": "gloo"}
LIMIT = timedelta(seconds=40)
SOON = timedelta(seconds=1)


class Office:
    """A store of the test alone, in which ranks hand out their handles."""

    def __init__(self, path, rank, size):
        self.store, self.rank, self.size = dist.FileStore(path, -1), rank, size
        self.num = 0

    def exchange(self, text):
        """Return what each rank says, in its place."""
        self.num += 1
        self.store.set(f"{self.num}/{self.rank}", text)
        return [self.store.get(f"{self.num}/{rank}").decode() for rank in range(self.size)]

    def collect(self, group=None, ranks=None):
        """Return the handles of all ranks, each in its place."""
        self.num += 1
        if ranks is None or self.rank in ranks:
            self.store.set(f"{self.num}/{self.rank}", dist._get_reconfigure_handle(group))
        ranks = range(self.size) if ranks is None else ranks
        return [self.store.get(f"{self.num}/{rank}").decode() for rank in ranks]

    def leave(self):
        """Wait until all ranks leave: the ranks meet in the process of one of them, which must live until then."""
        self.store.set(f"left/{self.rank}", "")
        self.store.wait([f"left/{rank}" for rank in range(self.size)], LIMIT)


def total(group=None):
    tensor = torch.tensor([(group or dist.group.WORLD).rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def place(group=None):
    group = group or dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    sizes = {group.size(), backend.size(), dist.get_world_size(group)}
    ranks = {group.rank(), backend.rank(), dist.get_rank(group)}
    assert len(sizes) == len(ranks) == 1
    return ranks.pop(), sizes.pop()


def refusal(*args, **named):
    try:
        dist._reconfigure(*args, **named)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def mean_of(models, rank):
    """Return the mean of rank + 1 over the ranks, which torch's reducer divides by the number of ranks in C++."""
    means = set()
    for model in models:
        model.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        (weight,) = model.parameters()
        means.add(weight.grad[0, 0].item())
    assert len(means) == 1
    return means.pop()


def live_on(rank, size, backend, path):
    office = Office(path, rank, size)
    store = dist.HashStore()  # each has its own: the handles are all that the ranks need of each other
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT, enable_reconfigure=True)
    with pytest.raises(phalanx.GroupUnusable, match="has no ranks yet"):
        dist.all_reduce(torch.ones(1))
    dist.set_timeout(LIMIT) if hasattr(dist, "set_timeout") else None
    seen = []
    dist._reconfigure(10 + rank, [dist._get_reconfigure_handle()]).wait()
    seen.append((*place(), total()))
    dist._reconfigure(20, office.collect(), timeout=LIMIT).wait()
    seen.append((*place(), total()))
    ways = torch.nn.parallel.DistributedDataParallel, phalanx.DistributedDataParallel
    models = [wrap(torch.nn.Linear(2, 1, bias=False)) for wrap in ways]
    mean_of(models, rank)
    comm = phalanx.communicator()
    work = dist._reconfigure(21, office.collect()[::-1])
    assert dist.group.WORLD.maker.build.keywords["processes"] == dist.group.WORLD.processes
    assert dist.group.WORLD.processes[dist.get_rank()][0] == os.getpid()
    assert work.is_completed()
    assert work.is_success()
    seen.append((*place(), total(), comm.rank, dist.get_process_group_ranks(dist.group.WORLD)))
    window = dist._new_window()
    dist.group.WORLD.abort()
    dist._reconfigure(22, set(office.collect())).wait()  # a set: in the order of former ranks
    with pytest.raises(phalanx.GroupUnusable, match="ranks have changed since the window was made"):
        window.signal(rank)
    seen.append((*place(), total()))
    handles = office.collect()
    if rank == 2:
        dist._reconfigure(23, handles[2:]).wait()
    else:
        dist._reconfigure(24, handles[:2]).wait()
    seen.append((*place(), total(), mean_of(models, rank)))
    dist._reconfigure(25, office.collect()).wait()
    message = torch.full((2,), float(rank))
    if rank == 1:
        dist.send(message, 2)
    elif rank == 2:
        dist.recv(message, 1)
    seen.append((*place(), message.tolist(), mean_of(models, rank)))
    part = dist.group.WORLD.split_group([0, 2])
    seen.append(total(part) if part is not None else None)
    dist.destroy_process_group()
    return seen


@IN_PLACE
def test_ranks_join_leave_split_and_merge_with_nothing_but_handles(run_ranks, tmp_path, backend):
    for rank, seen in enumerate(run_ranks(live_on, 3, backend, str(tmp_path / "office"), init=False, env=GLOO)):
        alone, everyone, turned, as_set, parted, again, part = seen
        assert alone == (0, 1, 1.0)
        assert everyone == (rank, 3, 6.0)
        assert turned == (2 - rank, 3, 6.0, 2 - rank, [0, 1, 2])
        assert as_set == (2 - rank, 3, 6.0)
        assert parted == ((0, 1, 1.0, 3.0) if rank == 2 else (rank, 2, 3.0, 1.5))
        assert again == (rank, 3, [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]][rank], 2.0)
        assert part == (None if rank == 1 else 3.0)


def outlive(rank, size, backend, path):
    """Rank 0, which serves the store, is killed; rank 3 takes its place."""
    office = Office(path, rank, size)
    at = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if rank == 3 else {}
    at = at or {"store": dist.PrefixStore("first", office.store), "rank": rank, "world_size": 3}
    dist.init_process_group(backend, timeout=LIMIT, enable_reconfigure=True, **at)
    if rank < 3:
        dist._reconfigure(1, office.collect(ranks=(0, 1, 2))).wait()
    else:
        office.num += 1
    handles = office.collect()
    if rank == 0:
        office.store.get("in flight")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        office.store.get("failed")
    else:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        office.store.set("in flight", "") if rank == 1 else None
        with pytest.raises(phalanx.RankFailed):
            work.wait()
        assert "has ended; leave out the handle" in refusal(2, handles[:3])
        office.store.set("failed", "")
    _torch.world.group_count += rank  # as if each had made another number of groups
    dist._reconfigure(3, [handles[3], handles[1], handles[2]]).wait()
    part = dist.group.WORLD.split_group([0, 2])
    seen = (*place(), total(), total(part) if part is not None else None, total(dist.new_group([0, 1, 2])))
    dist.destroy_process_group()
    return seen


@IN_PLACE
def test_a_new_process_takes_the_place_of_a_killed_one(run_ranks, tmp_path, backend):
    endings = run_ranks(
        outlive, 4, backend, str(tmp_path / "office"), init=False, env=GLOO, expect_failures=True, timeout_s=60
    )
    seen = [(1, 3, 6.0, None, 6.0), (2, 3, 6.0, 3.0, 6.0), (0, 3, 6.0, 3.0, 6.0)]
    assert [ending.value for ending in endings[1:]] == seen


def leave_waiting(rank, size, path):
    office = Office(path, rank, size)
    handles = office.collect()
    if rank == 2:  # is left out while it waits for the others
        with pytest.raises(phalanx.GroupAborted, match=r"rank . aborted the group"):
            dist.all_reduce(torch.ones(1))
        return None
    works = [dist.all_reduce(torch.ones(1), async_op=True)] if rank == 0 else []  # rank 1 never comes to it
    dist._reconfigure(1, handles[:2]).wait()
    for work in works:
        with pytest.raises(phalanx.GroupAborted):
            work.wait()
    return (*place(), total())


def test_what_runs_ends_with_an_error_on_every_former_rank(run_ranks, tmp_path):
    assert run_ranks(leave_waiting, 3, str(tmp_path / "office")) == [(0, 2, 3.0), (1, 2, 3.0), None]


def pass_wrong_ones(rank, size, path):
    handles = Office(path, rank, size).collect()
    other_version = handles[1].replace('"phalanx": "', '"phalanx": "9')
    other_group = handles[1].replace('"default"', '"other"')
    seen = [
        refusal(1, []),
        refusal(1, [*handles, handles[0]]),
        refusal(1, ["gloo:0:1:2:"]),
        refusal(1, ["phalanx:{"]),
        refusal(1, [handles[1 - rank]]),
        refusal(1, [handles[0], other_version]),
        refusal(1, [handles[0], other_group]),
        refusal(1, handles, timeout=timedelta(seconds=-1)),
        refusal(1, handles, timeout=timedelta(0)),
    ]
    return seen, total(), refusal(1, handles), total()


def test_wrong_handles_are_refused_everywhere_and_change_nothing(run_ranks, tmp_path):
    words = (
        "one handle per rank",
        "occurs twice",
        "is not a handle of phalanx",
        "can't parse a handle",
        "own handle is not among",
        "different versions of phalanx",
        "different groups",
        *["timeout must be more than 0"] * 2,
    )
    for seen, before, then, after in run_ranks(pass_wrong_ones, 2, str(tmp_path / "office")):
        for got, want in zip(seen, words, strict=True):
            assert want in got
        assert (before, then, after) == (3.0, "done", 3.0)


def meet_in_vain(rank, size, path):
    office = Office(path, rank, size)
    former = office.collect()
    dist._reconfigure(1, former).wait()
    now = office.collect()
    seen = {"old": refusal(2, [now[0], former[1]])}
    dist._reconfigure(3, now).wait()
    now = office.collect()
    seen["used"], seen["works on"] = refusal(3, now), total()
    now = office.collect()
    if rank == 0:
        seen["late"] = refusal(4, now, timeout=SOON)
        with pytest.raises(phalanx.GroupUnusable, match=r"has no ranks since reconfigure\(\) began"):
            dist.all_reduce(torch.ones(1))
    dist._reconfigure(5, office.collect()).wait()
    return seen, total()


def test_what_one_rank_alone_knows_is_raised_on_all(run_ranks, tmp_path):
    outcomes = run_ranks(meet_in_vain, 2, str(tmp_path / "office"))
    for seen, after in outcomes:
        assert "the handle of rank 1" in seen["old"]
        assert "is from before it got other ranks" in seen["old"]
        assert "uuid 3 was already used" in seen["used"]
        assert seen["works on"] == after == 3.0
    assert "CollectiveTimeout" in outcomes[0][0]["late"]
    assert "rank 1 did not come" in outcomes[0][0]["late"]


def give_up(rank, size, path):
    office = Office(path, rank, size)
    handles = office.collect()
    if rank == 1:
        office.store.get("given up")
    said = refusal(1, handles, timeout=SOON if rank == 0 else LIMIT)
    if rank != 1:
        office.store.set("given up", "")
    office.leave()
    return said


def test_the_first_rank_that_gives_up_tells_the_others_who_is_missing(run_ranks, tmp_path):
    first, late, waiting = run_ranks(give_up, 3, str(tmp_path / "office"))
    assert "rank 1 did not come within the timeout. " in first
    assert "CollectiveTimeout" in late
    for said in (late, waiting):
        assert "rank 1 did not come within the timeout of rank 0, which gave up. " in said


def stop_the_server(rank, size, path):
    office = Office(path, rank, size)
    handles, pids = office.collect(), office.exchange(str(os.getpid()))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    is_stopped = lambda: Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T" or None  # noqa: E731
    assert wait_until(is_stopped, time.monotonic() + 30)
    said = refusal(1, handles, timeout=SOON)
    os.kill(int(pids[0]), signal.SIGCONT)
    return said


def test_a_stopped_process_in_which_the_ranks_meet_is_named_in_time(run_ranks, tmp_path):
    _, said = run_ranks(stop_the_server, 2, str(tmp_path / "office"))
    assert "the ranks meet in the process of rank 0 (pid" in said
    assert "it accepts connections, but did not answer within" in said


def reconfigure_in_a_thread(rank, size, path):
    office = Office(path, rank, size)
    handles = office.collect()
    if rank == 1:
        office.store.get("destroyed")
        return refusal(1, handles), ""
    said, is_inside, join = [], threading.Event(), membership.join_group
    membership.join_group = lambda *args, **named: (is_inside.set(), join(*args, **named))[1]
    thread = threading.Thread(target=lambda: said.append(refusal(1, handles, timeout=LIMIT)))
    thread.start()
    assert is_inside.wait(30)
    said.append(refusal(2, handles, timeout=SOON))
    dist.destroy_process_group()
    office.store.set("destroyed", "")
    thread.join()
    return said


def test_one_thread_reconfigures_and_a_group_that_is_destroyed_meanwhile_stays_so(run_ranks, tmp_path):
    (second, first), (other, _) = run_ranks(reconfigure_in_a_thread, 2, str(tmp_path / "office"))
    assert "another thread of this process is giving the group other ranks" in second
    assert "the group was destroyed on this rank" in first
    assert other == "done"


def meet_where_nobody_listens(rank, size, path):
    office = Office(path, rank, size)
    handles = office.collect()
    with socket.socket() as taken:  # and never listens
        taken.bind(("127.0.0.1", 0))
        facts = json.loads(handles[0].removeprefix("phalanx:")) | {"port": taken.getsockname()[1]}
        said = refusal(1, [f"phalanx:{json.dumps(facts)}", handles[1]], timeout=LIMIT)
    office.leave()
    return said


def test_ranks_do_not_wait_for_a_process_that_has_left_its_last_group(run_ranks, tmp_path):
    server, other = run_ranks(meet_where_nobody_listens, 2, str(tmp_path / "office"))
    assert "this process has left its last group since" in server
    assert "it does not answer" in other
    assert "refused" in other


def differ(rank, size, path):
    office = Office(path, rank, size)
    orders = [0, 1, 2], [0, 2, 1], [2, 0, 1]
    told = [
        refusal(uuid, [handles[other] for other in orders[(rank == 2) * order]], timeout=LIMIT)
        for uuid, (order, handles) in enumerate([(1, office.collect()), (2, office.collect())])
    ]
    office.leave()
    return told


def test_the_same_handles_in_another_order_are_refused_on_all(run_ranks, tmp_path):
    for told in (everyone := run_ranks(differ, 3, str(tmp_path / "office"))):
        for said in told:
            assert "the ranks were given different handles, or the same in another order" in said, everyone


def meet_twice(rank, size, path):
    office, made, store_of = Office(path, rank, size), [], dist.TCPStore
    office.collect()  # serves the rank's own store

    def make(*args, **named):
        made.append(args)
        return store_of(*args, **named)

    dist.TCPStore = make
    try:
        for uuid in range(2):
            dist._reconfigure(uuid, office.collect()).wait()
    finally:
        dist.TCPStore = store_of
    return len(made)


def test_ranks_that_meet_again_in_the_same_process_keep_their_connections(run_ranks, tmp_path):
    assert run_ranks(meet_twice, 3, str(tmp_path / "office")) == [0, 1, 1]


def change_hosts(rank, size, path):
    office = Office(path, rank, size)
    seen = [total()]
    handles = office.collect()
    if rank != 1:
        dist._reconfigure(1, [handle for r, handle in enumerate(handles) if r != 1]).wait()
        seen.append((*place(), total()))
    handles = office.collect()
    dist._reconfigure(2, handles[::-1]).wait()
    seen.append((*place(), total()))
    return seen


def test_groups_of_several_hosts_get_other_ranks(run_ranks, tmp_path):
    outcomes = run_ranks(change_hosts, 4, str(tmp_path / "office"), hosts=[2, 2])
    assert [seen[-1] for seen in outcomes] == [(3 - rank, 4, 10.0) for rank in range(4)]
    assert [seen[1] for seen in outcomes if len(seen) == 3] == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def change_part(rank, size, path):
    office = Office(path, rank, size)
    part = dist.new_group([0, 1, 2])
    handles = office.collect(part)
    if rank == 0:
        return None
    twice = [handles[1], handles[2].replace('"rank": 2', '"rank": 1')]
    assert "two handles are of rank 1 of the world" in refusal(1, twice, group=part)
    dist._reconfigure(1, [handles[2], handles[1]], group=part).wait()
    tensor = torch.full((1,), float(rank))
    dist.broadcast(tensor, src=2, group=part)
    return (*place(part), dist.get_process_group_ranks(part), tensor.item(), place())


def test_a_part_of_the_world_gets_other_ranks_and_the_world_keeps_its_own(run_ranks, tmp_path):
    outcomes = run_ranks(change_part, 3, str(tmp_path / "office"))
    assert outcomes == [None, (1, 2, [2, 1], 2.0, (1, 3)), (0, 2, [2, 1], 2.0, (2, 3))]


def count_anew(rank, size, path):
    office = Office(path, rank, size)
    parts = {ranks: dist.new_group(ranks) for ranks in [(1, 3), (0, 2)]}
    handles = office.collect()
    if rank == 0:
        return None
    former = office.collect(parts[(1, 3)], ranks=(1, 3)) if rank != 2 else []
    dist._reconfigure(1, [handles[3], handles[1], handles[2]]).wait()
    if former:  # they say what number each had in the world
        assert "from before it got other ranks" in refusal(1, former, group=parts[(1, 3)], timeout=LIMIT)
    part = parts[(1, 3) if rank != 2 else (0, 2)]
    value = torch.tensor([float(rank)])
    if rank != 2:
        dist.broadcast(value, src=1, group=part)
    return dist.get_rank(part), dist.get_process_group_ranks(part), value.item()


def test_groups_made_before_count_their_ranks_by_the_new_numbers_of_the_world(run_fresh_ranks, tmp_path):
    assert run_fresh_ranks(count_anew, 4, str(tmp_path / "office")) == [
        None,
        (0, [1, 0], 1.0),
        (1, [2], 2.0),
        (1, [1, 0], 1.0),
    ]


def shrink(rank, size, flags):
    part = dist.new_group([1, 2, 3])
    wrong = [[[], 0], [[0, 1, 2, 3], 0], [[1, 1], 0], [[rank], 0], [[9], 0], [[1], 7]]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"shrink"):
            backend.shrink(*arguments)
    if rank == 1:
        with pytest.raises(phalanx.PhalanxError):
            dist.all_reduce(torch.ones(1))
        return None
    smaller = None
    if rank != 0:
        smaller = dist.shrink_group([0], part)
        assert dist.get_process_group_ranks(smaller) == [2, 3]
        assert total(smaller) == 3.0
    world = dist.shrink_group([1], shrink_flags=flags)
    assert phalanx.communicator(world).size == 3
    assert world is dist.group.WORLD
    seen = (*place(), total(), dist.get_process_group_ranks(world), total(dist.new_group()))
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("flags", [0, 1], ids=["default", "abort"])
def test_shrink_group_makes_a_group_of_the_others(run_ranks, flags):
    outcomes = run_ranks(shrink, 4, flags)
    assert [seen[:4] for seen in outcomes if seen] == [(place, 3, 6.0, [0, 1, 2]) for place in range(3)]
    assert [seen[4] for seen in outcomes if seen] == [6.0] * 3


def outlive_host(rank, size, path, victim):
    office = Office(path, rank, size)
    handles = office.collect()
    total()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.RankFailed, match=f"rank {victim}"):
        total()
    del handles[victim]
    dist._reconfigure(1, handles).wait()
    return (*place(), total())


@pytest.mark.parametrize("victim", [0, 3])
def test_the_others_go_on_when_a_rank_of_one_of_several_hosts_is_killed(run_ranks, tmp_path, victim):
    endings = run_ranks(outlive_host, 4, str(tmp_path / "office"), victim, hosts=[2, 2], expect_failures=True)
    living = [ending.value or ending for rank, ending in enumerate(endings) if rank != victim]
    assert living == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


def keep_ranks(rank, size, path, backend, is_wrapped):
    office = Office(path, rank, size)
    at = {"rank": rank, "world_size": size, "timeout": LIMIT}
    dist.set_debug_level(dist.DebugLevel.DETAIL if is_wrapped else dist.DebugLevel.OFF)
    stores = (dist.PrefixStore(name, office.store) for name in ("awaits", "has"))
    if backend == "gloo":  # in its place, such a group stays on Gloo
        dist.init_process_group(backend, store=next(stores), enable_reconfigure=True, **at)
        assert not isinstance(dist.group.WORLD, phalanx.backend.groups.PhalanxGroup)
        office.exchange("")  # Gloo of the debug wrapper still connects
        dist.destroy_process_group()
    else:
        with pytest.raises(phalanx.PhalanxError, match="Unset them, or name one backend"):
            dist.init_process_group(backend, store=next(stores), enable_reconfigure=True, **at)
    dist.init_process_group(backend, store=next(stores), **at)
    assert not dist.group.WORLD.supports_reconfigure
    with pytest.raises(NotImplementedError, match="this group keeps its ranks"):
        dist._get_reconfigure_handle()
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([1 - rank])
    said = refusal(1, ["phalanx:{"])
    office.exchange("")  # as above
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    return said


@IN_PLACE
@pytest.mark.parametrize("why", ["TORCH_DISTRIBUTED_DEBUG", "PHALANX_VERIFY"])
def test_a_group_that_is_verified_or_wrapped_keeps_its_ranks(run_ranks, tmp_path, backend, why):
    env = GLOO | ({why: "gloo"} if why == "PHALANX_VERIFY" else {})
    said = run_ranks(keep_ranks, 2, str(tmp_path / "store"), backend, why not in env, init=False, env=env)
    assert all("this group keeps its ranks" in one for one in said)
