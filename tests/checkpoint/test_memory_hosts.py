"""Snapshots in memory across several hosts: any host can be lost, and hosts that join get the snapshots."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.checkpoint as ckpt
from phalanx.checkpoint.memory import layout, snapshots
from phalanx.host import spare_memory
from phalanx.host.cgroups import Memory
from phalanx.testing import run_ranks
from tests.replicas import LIMIT_S, ReplicaHost


@pytest.fixture
def new_host():
    """``new_host()`` returns the path of an empty memory, as the supervisor of a host has one."""
    fds = []

    def make():
        fds.append(os.memfd_create("phalanx-snapshots"))
        return f"/proc/{os.getpid()}/fd/{fds[-1]}"

    yield make
    for fd in fds:
        os.close(fd)


def take_place(rank, sizes, hosts):
    """Make this rank one of those of a host, as its launcher would."""
    number = next(number for number in range(len(sizes)) if rank < sum(sizes[: number + 1]))
    os.environ |= {
        "PHALANX_SNAPSHOTS": hosts[number],
        "GROUP_RANK": str(number),
        "LOCAL_RANK": str(rank - sum(sizes[:number])),
        "LOCAL_WORLD_SIZE": str(sizes[number]),
        "WORLD_SIZE": str(sum(sizes)),
    }


class Own:
    """A number of each rank's own."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def state_at(step, rank):
    generator = torch.Generator().manual_seed(step)
    large = torch.rand(300, 500, generator=generator)
    return {"large": large, "small": torch.full((3,), float(step)), "step": step, "own": Own((step, rank))}


def go_on(rank, world_size, folder, sizes, hosts, num_steps, step_at_last=None):
    """Load what there is, compare it, and take as many snapshots more; return what was loaded."""
    take_place(rank, sizes, hosts)
    state = state_at(0, rank)
    found = ckpt.load(folder, state, missing="ignore")
    if found is not None:
        want = state_at(found.step, 0)
        assert torch.equal(state["large"], want["large"])
        assert torch.equal(state["small"], want["small"])
    begin = found.step if found else 0
    for step in range(begin + 1, begin + 1 + num_steps):
        assert ckpt.snapshot(folder, state_at(step, rank), step) == ""
    return (found.step, found.source, tuple(state["own"].number)) if found else None


def run(tmp_path, sizes, hosts, num_steps):
    world_size = sum(sizes)
    return run_ranks(go_on, world_size, str(tmp_path), sizes, hosts, num_steps, hosts=sizes)


@pytest.mark.parametrize("sizes", [[2, 2], [1, 2], [2, 1, 1]])
def test_every_rank_finds_its_own_again_where_all_hosts_are_there(tmp_path, new_host, sizes):
    hosts = [new_host() for _ in sizes]
    assert run(tmp_path, sizes, hosts, 3) == [None] * sum(sizes)
    assert run(tmp_path, sizes, hosts, 2) == [(3, "memory", (3, rank)) for rank in range(sum(sizes))]
    assert run(tmp_path, sizes, hosts, 0) == [(5, "memory", (5, rank)) for rank in range(sum(sizes))]


@pytest.mark.parametrize("lost", [0, 1])
def test_any_host_can_be_lost(tmp_path, new_host, lost):
    hosts = [new_host(), new_host()]
    run(tmp_path, [2, 1], hosts, 3)
    left, size = (hosts[1], 1) if lost == 0 else (hosts[0], 2)
    first = 2 if lost == 0 else 0
    assert run(tmp_path, [size], [left], 2) == [(3, "memory", (3, first))] * size
    assert run(tmp_path, [size], [left], 0) == [(5, "memory", (5, rank)) for rank in range(size)]


def test_a_host_that_joins_gets_what_it_lacks_and_can_then_be_the_only_one(tmp_path, new_host):
    old, new = new_host(), new_host()
    run(tmp_path, [2, 2], [old, new_host()], 3)
    for hosts in ([new, old], [old, new]):
        found = run(tmp_path, [2, 2], hosts, 0)
        assert [one[:2] for one in found] == [(3, "memory")] * 4
    assert [one[:2] for one in run(tmp_path, [2], [new], 0)] == [(3, "memory")] * 2


def test_what_a_host_kept_while_others_went_on_without_it_is_old_whatever_its_step(tmp_path, new_host):
    cut_off, other = new_host(), new_host()
    run(tmp_path, [1, 1], [cut_off, other], 3)
    run(tmp_path, [1], [cut_off], 4)  # to step 7; it had to stop
    hosts = [new_host(), other]
    run(tmp_path, [1, 1], hosts, 1)  # from step 3 to step 4, as an attempt as late as that
    run(tmp_path, [1, 1], hosts, 1)  # to step 5, as a later one
    found = run(tmp_path, [1, 1, 1], [cut_off, *hosts], 0)
    assert [one[:2] for one in found] == [(5, "memory")] * 3


def without_room(rank, world_size, folder, sizes, hosts):
    take_place(rank, sizes, hosts)
    if rank == 0:
        spare_memory.host_memory = lambda: Memory(1 << 20, 1 << 20)
    with warnings.catch_warnings(record=True) as caught:
        found = ckpt.load(folder, state_at(0, rank))
    return found.step, found.source, " ".join(str(one.message) for one in caught)


def test_a_host_that_has_no_room_for_a_snapshot_lets_all_load_from_disk(tmp_path, new_host):
    old = new_host()
    ckpt.save(tmp_path, state_at(2, 0), 2, wait=True)
    run(tmp_path, [1, 1], [old, new_host()], 1)  # step 3
    found = run_ranks(without_room, 2, str(tmp_path), [1, 1], [new_host(), old], hosts=[1, 1])
    assert [one[:2] for one in found] == [(2, "disk")] * 2
    assert "two of all ranks would take 1 MiB, more than 25% of this host's 1 MiB" in found[0][2]


# ---------------------------------------------------------------- parts of the state on each host


@pytest.fixture
def new_replica_host():
    """``new_replica_host(name, num_replicas)`` returns a host with a replicator."""
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(contextlib.closing(ReplicaHost(*args)))


def connect(hosts):
    """Let each host's replicator know the next ones."""
    for number, host in enumerate(hosts):
        host.follow([(other.name, other.port) for other in (*hosts[number + 1 :], *hosts[:number])])


def train(rank, world_size, folder, sizes, paths, steps, num_copied, has_fetched):
    """Load what there is, compare it, and take a snapshot of each step; the first few are copied before the next."""
    take_place(rank, sizes, paths)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    weight = dist.tensor.distribute_tensor(torch.zeros(300, 7), mesh, [dist.tensor.Shard(0)])
    state = {"weight": weight, "large": torch.zeros(300, 500), "own": Own(None), "step": 0}
    found = ckpt.load(folder, state, missing="ignore")
    assert snapshots.memory().is_urgent == (found is not None and has_fetched)
    if found is not None:
        assert state["weight"].full_tensor().eq(found.step).all()
        assert state["large"].eq(found.step).all()
    for number, step in enumerate(steps):
        weight.to_local().fill_(step)
        state |= {"large": torch.full((300, 500), float(step)), "own": Own((step, rank)), "step": step}
        assert ckpt.snapshot(folder, state, step) == ""
        assert not snapshots.memory().is_urgent
        deadline = time.monotonic() + LIMIT_S
        while number < num_copied and snapshots.memory()._is_copying():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        dist.barrier()
    own = state["own"].number if not steps and found else None
    if steps:
        return snapshots.memory().replicas()
    return found and (found.step, found.source, own and tuple(own))


def run_parted(tmp_path, hosts, steps=(), num_copied=0, *, has_fetched=False):
    sizes = [1] * len(hosts)
    paths = [host.path for host in hosts]
    return run_ranks(train, len(hosts), str(tmp_path), sizes, paths, steps, num_copied, has_fetched, hosts=sizes)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_host_can_be_lost_with_its_part(tmp_path, new_replica_host, lost):
    hosts = [new_replica_host(name) for name in "abc"]
    connect(hosts)
    assert run_parted(tmp_path, hosts, [1, 2, 3], 3)[0].startswith("replicas on another host, copied in ")
    del hosts[lost]
    assert [one[:2] for one in run_parted(tmp_path, hosts, has_fetched=True)] == [(3, "memory")] * 2


def test_a_spare_gets_what_the_lost_rank_had_and_all_others_their_own(tmp_path, new_replica_host):
    hosts = [new_replica_host(name) for name in "abc"]
    connect(hosts)
    run_parted(tmp_path, hosts, [1, 2], 2)
    hosts[1] = new_replica_host("d")
    connect(hosts)
    assert run_parted(tmp_path, hosts, has_fetched=True) == [(2, "memory", (2, rank)) for rank in range(3)]
    # What was lost is kept twice again, and what was fetched is freed.
    run_parted(tmp_path, hosts, [3, 4], 2, has_fetched=True)
    regions = [one for host in hosts for one in layout.whole_regions(host.fd)]
    assert not any(layout.is_fetched(one.offset) for one in regions)
    assert sorted(one.number for one in regions if one.head.step == 4) == [0, 0, 1, 1, 2, 2]


NUM_ROWS, ROW_BYTES = 3000, 1024


def sharded_state(world_size, value=0.0):
    """A state of 8.8 MiB of which each rank has a part: a weight and two of an optimizer's tensors for it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    shards = [dist.tensor.Shard(0)]
    rows = torch.arange(NUM_ROWS, dtype=torch.float32)[:, None].expand(NUM_ROWS, ROW_BYTES // 4)
    return {name: dist.tensor.distribute_tensor(rows + value + i, mesh, shards) for i, name in enumerate("wmv")}


def keep_sharded(rank, world_size, folder, sizes, paths):
    take_place(rank, sizes, paths)
    assert ckpt.snapshot(folder, sharded_state(world_size, 7.0), 1) == ""
    deadline = time.monotonic() + LIMIT_S
    while snapshots.memory()._is_copying():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return snapshots.memory().size_bytes


def load_sharded(rank, world_size, folder, sizes, paths, most_bytes=0):
    """Load, compare, and return where it came from and how many bytes of it other hosts have sent to this one."""
    take_place(rank, sizes, paths)
    if most_bytes and rank == 0:
        spare_memory.host_memory = lambda: Memory(most_bytes, 0)
    state = sharded_state(world_size)
    with warnings.catch_warnings(record=True) as caught:
        found = ckpt.load(folder, state)
    for name, want in sharded_state(world_size, 7.0).items():
        assert torch.equal(state[name].to_local(), want.to_local())
    return found.source, snapshots.memory().fetched_bytes, " ".join(str(one.message) for one in caught)


def run_sharded(fn, tmp_path, hosts, *args):
    sizes = [1] * len(hosts)
    return run_ranks(fn, len(hosts), str(tmp_path), sizes, [host.path for host in hosts], *args, hosts=sizes)


def test_a_host_fetches_what_its_ranks_read_and_nobody_takes_the_rest_for_filled(tmp_path, new_replica_host):
    hosts = [new_replica_host(name) for name in "abc"]
    connect(hosts)
    run_sharded(keep_sharded, tmp_path, hosts)
    image_bytes, slack_bytes = 3 * NUM_ROWS * ROW_BYTES // 3, 64 << 10  # of headers and pages
    own = run_sharded(load_sharded, tmp_path, hosts)  # a rank has failed, and all hosts are there
    assert [source for source, _, _ in own] == ["memory"] * 3
    assert max(num_bytes for _, num_bytes, _ in own) < slack_bytes
    left = [hosts[0], hosts[2]]  # hosts[2] has the replica of hosts[1]
    before = [os.fstat(host.fd).st_blocks * 512 for host in left]
    halves = run_sharded(load_sharded, tmp_path, left)
    assert [source for source, _, _ in halves] == ["memory"] * 2
    assert image_bytes // 2 < halves[0][1] < image_bytes // 2 + slack_bytes
    assert halves[1][1] < slack_bytes
    for host, told, held_bytes in zip(left, halves, before, strict=True):
        assert os.fstat(host.fd).st_blocks * 512 - held_bytes < told[1] + slack_bytes
        assert not any(layout.is_fetched(region.offset) for region in layout.whole_regions(host.fd))
    again = run_sharded(load_sharded, tmp_path, [*left, new_replica_host("d")])
    assert [source for source, _, _ in again] == ["memory"] * 3


def test_a_host_without_room_for_what_its_ranks_need_lets_all_load_from_disk(tmp_path, new_replica_host):
    hosts = [new_replica_host(name) for name in "ab"]
    connect(hosts)
    run_sharded(keep_sharded, tmp_path, hosts)
    run_sharded(save_sharded, tmp_path, hosts)
    found = run_sharded(load_sharded, tmp_path, [new_replica_host("c"), hosts[1]], 1 << 20)
    assert [source for source, _, _ in found] == ["disk"] * 2
    assert "with what its ranks need of other hosts, snapshots would take 4 MiB, more than 25% of" in found[0][2]


def save_sharded(rank, world_size, folder, sizes, paths):
    ckpt.save(folder, sharded_state(world_size, 7.0), 0, wait=True)


def load_into_another_form(rank, world_size, folder, sizes, paths):
    take_place(rank, sizes, paths)
    state = {**sharded_state(world_size), "bias": torch.zeros(3)}
    with pytest.raises(phalanx.CheckpointError, match="the checkpoint has no 'bias'; it has 'w', 'm', 'v'"):
        ckpt.load(folder, state)
    want = sharded_state(world_size)
    return all(torch.equal(state[name].to_local(), want[name].to_local()) for name in want)


def test_what_does_not_fit_is_said_before_anything_is_fetched_or_changed(tmp_path, new_replica_host):
    hosts = [new_replica_host(name, 0) for name in "ab"]
    run_sharded(keep_sharded, tmp_path, hosts)
    assert run_sharded(load_into_another_form, tmp_path, hosts) == [True, True]


def test_two_hosts_at_once_can_be_lost_where_two_others_hold_each_part(tmp_path, new_replica_host):
    hosts = [new_replica_host(name, 2) for name in "abcd"]
    connect(hosts)
    run_parted(tmp_path, hosts, [1, 2], 2)
    assert [one[:2] for one in run_parted(tmp_path, hosts[:2], has_fetched=True)] == [(2, "memory")] * 2


def test_a_host_lost_before_its_part_is_copied_costs_the_steps_since_the_last_that_is(tmp_path, new_replica_host):
    hosts = [new_replica_host(name) for name in "ab"]
    connect(hosts)
    run_parted(tmp_path, hosts, [1, 2], 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts[1].follow([("silent", silent.getsockname()[1])])
        run_parted(tmp_path, hosts, [3, 4, 5, 6])
        assert [one[:2] for one in run_parted(tmp_path, hosts[:1])] == [(2, "memory")]


def test_the_report_says_for_how_long_nobody_made_replicas(tmp_path, new_replica_host):
    hosts = [new_replica_host(name) for name in "ab"]
    connect(hosts)
    layout.note_replicator_ended(hosts[0].fd)
    layout.note_replicator_started(hosts[0].fd)
    words = [told.partition("; ")[2] for told in run_parted(tmp_path, hosts, [1, 2], 2)]
    assert words == ["none were made for 0.0 s, since the process that copies had ended", ""]


def test_without_replicas_a_rank_can_be_lost_and_no_host(tmp_path, new_replica_host):
    hosts = [new_replica_host(name, 0) for name in "ab"]
    run_parted(tmp_path, hosts, [1, 2, 3])
    assert run_parted(tmp_path, hosts[:1]) == [None]
    assert [one[:2] for one in run_parted(tmp_path, hosts, has_fetched=True)] == [(3, "memory")] * 2


def snapshots_of_two_regions(rank, world_size, folder, sizes, paths):
    """Take snapshots where there is no memory for a third region; return which one is asked to be copied at the end."""
    take_place(rank, sizes, paths)
    spare_memory.host_memory = lambda: Memory(80 << 20, 0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    weight = dist.tensor.distribute_tensor(torch.zeros(4 << 20), mesh, [dist.tensor.Shard(0)])
    kept = snapshots.memory()
    for step in (1, 2, 3, 4):
        assert ckpt.snapshot(folder, {"weight": weight}, step) == ""
        if step == 2:  # the first has been copied, and the second is not asked to be
            layout.note_copied(kept._fd, layout.Copied(1, 1, 1, 0))
        dist.barrier()
    return kept.problem, layout.asked_copy(kept._fd).step, sorted(kept._regions)


def test_without_memory_for_a_third_region_a_snapshot_is_left_out_and_the_next_one_is_taken(tmp_path, new_host):
    paths = [new_host(), new_host()]
    for path in paths:
        with open(path, "r+b") as file:
            layout.want_replicas(file.fileno(), 1)
    found = run_ranks(snapshots_of_two_regions, 2, str(tmp_path), [1, 1], paths, hosts=[1, 1])
    assert found == [("", 4, [0, 1])] * 2


def test_where_one_host_may_keep_no_snapshots_none_does_and_nobody_waits(tmp_path, new_host):
    hosts = [new_host(), new_host()]
    run(tmp_path, [1, 1], hosts, 2)
    with open(hosts[1], "r+b") as file:
        layout.forbid(file.fileno())
    found = run_ranks(snapshot_problem, 2, str(tmp_path), [1, 1], hosts, hosts=[1, 1])
    assert found == [
        (2, "another host can keep none: see what its launcher says"),
        (2, "the kernel has killed an earlier attempt because memory ran out"),
    ]


def snapshot_problem(rank, world_size, folder, sizes, hosts):
    take_place(rank, sizes, hosts)
    found = ckpt.load(folder, state_at(0, rank))
    return found.step, {ckpt.snapshot(folder, state_at(step, rank), step) for step in (3, 4)}.pop()
