"""Groups: many, overlapping, reversed, split, made again and again, by every way of meeting."""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout, PhalanxError
from phalanx._torch import version
from phalanx.testing import await_release, reached
from phalanx.wire.waiting import wait_until
from tests.backend._calls import CALLS, Call, check_equal, gloo_group

pytestmark = pytest.mark.kept_ranks


def total(group=None, num=3):
    tensor = torch.full((num,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def holdings():
    """Return the number of descriptors, mappings and threads of this process."""
    with open("/proc/self/maps") as maps:
        segments = sum("phalanx" in line or "memfd" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments, len(os.listdir("/proc/self/task"))


def refuse_groups(rank, world_size):
    """Make groups whose ranks disagree; return how much larger the memory of the world has become."""
    before = dist.group.WORLD._operations.memory_stats()["segment_bytes_mapped"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_ONE_SHOT_BYTES", str(1024 << rank))
        for _ in range(3):
            with pytest.raises(PhalanxError, match="the ranks run different values of PHALANX_ONE_SHOT_BYTES"):
                dist.new_group(backend="phalanx")
    dist.barrier()
    after = dist.group.WORLD._operations.memory_stats()["segment_bytes_mapped"]
    assert total(dist.new_group(backend="phalanx")) == sum(range(world_size))
    return after - before


def holdings_later(before):
    """Return what this process holds once that is as before: a thread that has ended is listed for some ms longer."""
    wait_until(lambda: holdings() == before or None, time.monotonic() + 10)
    return holdings()


def use_every_subset(rank, world_size):
    """All subsets at once, each used in turn, interleaved."""
    subsets = [c for n in range(1, world_size + 1) for c in itertools.combinations(range(world_size), n)]
    groups = {subset: dist.new_group(list(subset)) for subset in subsets}
    for num in (1, 20_000, 70_000):
        works = []
        for subset, group in groups.items():
            if rank in subset:
                tensor = torch.full((num,), float(rank))
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, subset))
        for work, tensor, subset in reversed(works):
            work.wait()
            assert tensor.unique().item() == sum(subset), subset
    for subset, group in groups.items():
        if rank in subset:
            assert dist.get_process_group_ranks(group) == list(subset)
            assert total(group) == sum(subset)
            dist.barrier(group)
    return len(groups)


def use_a_reversed_group(rank, world_size):
    order = list(reversed(range(world_size)))
    ours, gloo = dist.new_group(order, sort_ranks=False), gloo_group(order)
    assert dist.get_group_rank(ours, rank) == world_size - 1 - rank
    for name in CALLS:
        for root in (0, world_size - 1):
            call = Call(name, ours, (4, 2), root=root, seed=1)
            for got, want in zip(call.run(), call.on(gloo).run(), strict=True):
                check_equal(got, want, f"{name} in a reversed group")


def make_subgroups(rank, world_size):
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == world_size // 2
    first = total(mine)
    rows = [[r for r in range(world_size) if r % 2 == parity] for parity in (0, 1)]
    parity, _ = dist.new_subgroups_by_enumeration(rows)
    return first, total(parity)


def split_groups(rank, world_size):
    world = dist.group.WORLD
    halves = dist.split_group(world, [[0, 1], [2, 3]])
    first = total(halves), dist.get_process_group_ranks(halves), dist.get_rank(halves)
    odd = dist.split_group(world, [[1, 3]])
    second = total(odd) if odd not in (None, dist.GroupMember.NON_GROUP_MEMBER) else None
    again = dist.split_group(halves, [[0], [1]])
    third = total(again)
    dist.destroy_process_group(halves)
    return first, second, third, total()


def make_and_destroy_subgroups(rank, world_size):
    before = None
    for turn in range(12):
        pair = dist.new_group([0, world_size - 1])
        whole = dist.new_group()
        if rank in (0, world_size - 1):
            assert total(pair, 90_000) == world_size - 1
        assert total(whole, 40_000) == sum(range(world_size))
        if rank in (0, world_size - 1):
            dist.destroy_process_group(pair)
        dist.destroy_process_group(whole)
        if turn == 2:
            before = holdings()
    after = holdings_later(before)
    assert total() == sum(range(world_size))
    return before, after


def init_again_and_again(rank, world_size, folder, turns):
    """The same process is a rank of one job after another; nothing of the old ones stays."""
    before = None
    for turn in range(turns):
        dist.init_process_group("phalanx", init_method=f"file://{folder}/{turn}", rank=rank, world_size=world_size)
        group = dist.new_group()
        assert total() == sum(range(world_size))
        assert total(group, 100_000) == sum(range(world_size))
        works = [dist.isend(torch.ones(5), (rank + 1) % world_size), dist.irecv(torch.ones(5), (rank - 1) % world_size)]
        works.append(dist.all_reduce(torch.ones(5), async_op=True))
        for work in works:
            work.wait()
        dist.destroy_process_group()
        del group, works, work
        if turn == 4:
            before = holdings()
    return before, holdings_later(before)


def init_by_url(rank, world_size, url):
    dist.init_process_group("phalanx", init_method=url, rank=rank, world_size=world_size)
    assert dist.get_backend() == "phalanx"
    return total()


def init_by_environment(rank, world_size):
    dist.init_process_group("phalanx")
    return total()


def init_by_store(rank, world_size, kind, where):
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    elif kind == "file":
        store = dist.FileStore(where, world_size)
    else:
        store = dist.HashStore()
    dist.init_process_group("phalanx", store=dist.PrefixStore("job", store), rank=rank, world_size=world_size)
    return total()


def init_by_devices(rank, world_size, backend):
    dist.init_process_group(backend)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    inside = total(group) if rank < 2 else None
    config = dist.get_backend_config() if hasattr(dist, "get_backend_config") else None
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        dist.all_reduce(torch.ones(3, device="meta"))
    assert total() == sum(range(world_size))
    return tensor.tolist(), inside, str(config)


def world_of_one(rank, world_size):
    results = [Call(name, dist.group.WORLD, (50_000,), seed=4).run() for name in CALLS]
    assert all(len(tensors) <= 3 for tensors in results)
    gathered = [None]
    dist.all_gather_object(gathered, "me")
    dist.monitored_barrier()
    return gathered, total(dist.new_group([0]))


def destroy_while_others_work(rank, world_size):
    """Ranks may leave at different times, as long as nobody waits for them."""
    group = dist.new_group()
    assert total(group) == 3
    if rank == 0:
        dist.destroy_process_group(group)
        reached("left")
    else:
        await_release("go")
        dist.destroy_process_group(group)
    return total()


def never_come(rank, world_size, url):
    if rank == 2:
        await_release("end")
        return
    with pytest.raises(CollectiveTimeout) as error:
        dist.init_process_group(
            "phalanx", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=1)
        )
    reached("failed", (str(error.value), error.value.ranks, error.value.op))
    return


def init_with_unknown_variable(rank, world_size):
    os.environ["PHALANX_TEST_ANYTHING"] = "allowed"
    os.environ["PHALANX_STALL"] = "5"
    with pytest.raises(ValueError, match=r"PHALANX_STALL, did you mean PHALANX_STALL_S\?") as error:
        dist.init_process_group("phalanx")
    assert "PHALANX_TEST_ANYTHING" not in str(error.value)
    del os.environ["PHALANX_STALL"]
    for text in ("ten", "-1", "nan", "inf"):
        os.environ["PHALANX_STALL_S"] = text
        with pytest.raises(ValueError, match=rf"PHALANX_STALL_S must be a number.*{text}"):
            dist.init_process_group("phalanx")
    os.environ["PHALANX_STALL_S"] = "5"
    dist.init_process_group("phalanx")
    return total()


def make_groups_from_threads(rank, world_size):
    """Group names and numbers of calls are told by torch; a group's own threads end with it."""
    groups = [dist.new_group() for _ in range(8)]
    for group in groups:
        dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
        dist.all_reduce(torch.ones(200_000), group=group, async_op=True)
        dist.barrier(group)
    assert len({group.group_name for group in groups}) == 8
    for group in groups:
        dist.destroy_process_group(group)
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return [name for name in names if name.startswith("phalanx")], threading.active_count()


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_subset_of_the_ranks_is_a_group_at_the_same_time(run_ranks, world_size):
    assert run_ranks(use_every_subset, world_size) == [2**world_size - 1] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_reversed_group_numbers_its_ranks_as_gloo_does(run_ranks, world_size):
    run_ranks(use_a_reversed_group, world_size)


def test_groups_that_are_refused_take_no_memory(run_ranks):
    assert run_ranks(refuse_groups, 3) == [0, 0, 0]


def test_subgroups_by_size_and_by_enumeration(run_ranks):
    assert run_ranks(make_subgroups, 4) == [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]


@pytest.mark.skipif(version() < (2, 15), reason="before torch 2.15 split_group() refuses groups without a GPU")
def test_groups_are_split_off_groups(run_ranks):
    results = run_ranks(split_groups, 4)
    halves = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [first for first, *_ in results] == [(float(sum(h)), h, r % 2) for r, h in enumerate(halves)]
    assert [second for _, second, _, _ in results] == [None, 4.0, None, 4.0]
    assert [third for _, _, third, _ in results] == [0.0, 1.0, 2.0, 3.0]
    assert [whole for *_, whole in results] == [6.0] * 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_destroyed_subgroups_give_everything_back(run_ranks, world_size):
    for before, after in run_ranks(make_and_destroy_subgroups, world_size):
        assert after == before


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_process_joins_job_after_job_and_keeps_nothing_of_them(run_ranks, tmp_path, world_size):
    for before, after in run_ranks(init_again_and_again, world_size, str(tmp_path), 20, init=False):
        assert after == before


@pytest.mark.parametrize("init_method", ["file", "tcp", "env"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_meet_by_every_method(run_ranks, init_method, world_size):
    assert run_ranks(total_of_ranks, world_size, init_method=init_method) == [sum(range(world_size))] * world_size


def total_of_ranks(rank, world_size):
    return total()


def test_ranks_meet_by_a_file_url(run_ranks, tmp_path):
    assert run_ranks(init_by_url, 2, f"file://{tmp_path}/meeting", init=False) == [1.0, 1.0]


def test_ranks_meet_by_the_environment_alone(run_ranks):
    assert run_ranks(init_by_environment, 2, init=False) == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "world_size"), [("tcp", 3), ("file", 3), ("hash", 1)])
def test_ranks_meet_in_a_store_of_their_own(run_ranks, tmp_path, kind, world_size):
    results = run_ranks(init_by_store, world_size, kind, str(tmp_path / "store"), init=False)
    assert results == [sum(range(world_size))] * world_size


@pytest.mark.parametrize("backend", ["cpu:phalanx", "cpu:phalanx,cuda:gloo", "cuda:gloo,cpu:phalanx"])
def test_a_backend_for_each_device(run_ranks, backend):
    for rank, (tensor, inside, config) in enumerate(run_ranks(init_by_devices, 3, backend, init=False)):
        assert tensor == [3.0] * 3
        assert inside == (1.0 if rank < 2 else None)
        assert "phalanx" in config


def test_a_world_of_one_has_every_operation(run_ranks):
    assert run_ranks(world_of_one, 1) == [(["me"], 0.0)]


def test_a_rank_may_leave_while_others_stay(spawn_ranks):
    with spawn_ranks(destroy_while_others_work, 3) as ranks:
        ranks.wait_until_reached("left", [0])
        ranks.release("go", ranks=[1, 2])
        assert [outcome.value or str(outcome) for outcome in ranks.join(30)] == [3.0] * 3


def test_a_rank_that_never_comes_is_named_at_init(spawn_ranks, tmp_path):
    with spawn_ranks(never_come, 3, f"file://{tmp_path}/meeting", init=False) as ranks:
        for rank, (text, named, op) in enumerate(ranks.wait_until_reached("failed", [0, 1])):
            assert f"rank {rank}: init_process_group" in text
            assert op == "join"
            assert "WORLD_SIZE" in text
            assert named == (2,)
            assert "rank 2 did not come" in text
        ranks.release("end", ranks=[2])
        assert all(outcome.ok for outcome in ranks.join(30))


def test_an_unknown_or_malformed_variable_is_an_error(run_ranks):
    assert run_ranks(init_with_unknown_variable, 1, init=False) == [0.0]


def test_the_threads_of_a_group_end_with_it(run_ranks):
    for native, _ in run_ranks(make_groups_from_threads, 2):
        assert native == []
