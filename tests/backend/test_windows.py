"""Shared tensors and windows: what is put is seen, who dies leaves a valid mapping, a mistake meets all ranks."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

from phalanx import CollectiveMismatch, CollectiveTimeout, GroupAborted, OutOfSharedMemory, RankFailed
from phalanx._errors import ArgumentError, PhalanxError
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.backend.windows.tensors import POOL
from phalanx.host.shared_blocks import held_bytes
from phalanx.testing import await_release, reached

pytestmark = pytest.mark.kept_ranks

CPU = torch.device("cpu")


def error_of(call):
    """Return the error of a call, without the frames that would keep its tensors."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was refused")


def make(size=8, dtype=torch.float32, group=None):
    tensor = (group or dist.group.WORLD).allocate_tensor(size, dtype=dtype)
    return tensor.fill_(dist.get_rank(group))


# ---- what they do ------------------------------------------------------------------------------------------------


def pass_around(rank, world_size, is_async):
    tensor, after, before = make(), (rank + 1) % world_size, (rank - 1) % world_size
    new = getattr(dist, "_new_window", lambda given: dist.group.WORLD.new_window(given))
    window = new(tensor)
    strided = torch.arange(6.0).reshape(2, 3).t() + 10 * rank  # (3, 2), not contiguous
    works = [window.put(strided, after, 1, is_async), window.signal(after, is_async)]
    works.append(window.wait_signal(before, is_async))
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    seen = window.map_remote_tensor(before).tolist()
    dist.barrier()
    window.map_remote_tensor(after)[0] = -1.0  # a view, not a copy
    dist.barrier()
    return tensor.tolist(), seen


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_put_and_its_signal_reach_the_other_rank(run_ranks, world_size, is_async):
    found = run_ranks(pass_around, world_size, is_async)
    values = [[10.0 * rank + x for x in (0, 3, 1, 4, 2, 5)] for rank in range(world_size)]
    for rank, (own, seen) in enumerate(found):
        before = (rank - 1) % world_size
        assert own == [-1.0, *values[before], float(rank)]
        # rank `before` may have been written by its own neighbour before or after this rank looked
        assert seen[0] == before


def count_signals(rank, world_size):
    window = dist.group.WORLD.new_window()
    if rank == 0:
        for _ in range(1000):  # more than any ring has room for
            window.signal(1)
        window.wait_signal(1).wait()
        return True
    works = [window.wait_signal(0, True) for _ in range(1000)]
    last = works[-1].get_future()
    assert last.wait() == []
    assert all(work.is_completed() for work in works)
    late = window.wait_signal(0, True)
    assert not late.is_completed()
    assert type(error_of(lambda: late.wait(timedelta(milliseconds=5)))) is TimeoutError
    window.signal(0)
    return True


def test_signals_are_counted_and_never_block_their_sender(run_ranks):
    assert all(run_ranks(count_signals, 2))


def every_dtype(rank, world_size):
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint16):
        tensor = dist.group.WORLD.allocate_tensor(4, dtype=dtype)
        tensor.zero_()
        window = dist.group.WORLD.new_window(tensor[1:])  # a part of a tensor
        window.put(torch.ones(2, dtype=dtype), 1 - rank, 1)
        dist.barrier()
        assert tensor.to(torch.complex64).real.tolist() == [0, 0, 1, 1], dtype
        window.put(torch.ones(0, dtype=dtype), rank, 3)  # nothing, at the end
        dist.barrier()
    empty = dist.group.WORLD.new_window(torch.empty(0) if rank else make(2))
    assert empty.map_remote_tensor(1).shape == (0,)
    seen = empty.map_remote_tensor(0).tolist()
    dist.barrier()
    return seen


def test_windows_hold_every_dtype_parts_of_tensors_and_tensors_of_different_sizes(run_ranks):
    assert run_ranks(every_dtype, 2) == [[0.0, 0.0]] * 2


def train_with_fsdp(rank, world_size, is_shared):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
        if is_shared:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = POOL.state
    for step in range(3):
        model(torch.full((4, 64), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    used = POOL.state != before
    return used, [p.full_tensor().tolist() for p in model.parameters()]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "allocate_tensor"),
    reason="this torch has no such method on its backends",
)
def test_fsdp_takes_its_communication_memory_from_the_group(run_ranks):
    shared, plain = (run_ranks(train_with_fsdp, 2, is_shared) for is_shared in (True, False))
    for rank in range(2):
        assert (shared[rank][0], plain[rank][0]) == (True, False)
        assert shared[rank][1] == plain[rank][1]  # bit for bit


# ---- memory --------------------------------------------------------------------------------------------------------


def free_what_peers_map(rank, world_size):
    tensor = make(1 << 16)
    window = dist.group.WORLD.new_window()
    window.tensor_register(tensor, owning=False)
    view = window.map_remote_tensor(1 - rank)
    dist.barrier()
    del tensor
    gc.collect()
    other = make(1 << 16).fill_(7)  # must not be the memory that the peer still maps
    dist.barrier()
    assert view.unique().tolist() == [1 - rank]
    window.put(torch.full((4,), 5.0), 1 - rank, 0)
    dist.barrier()
    assert other.unique().tolist() == [7.0]
    window.tensor_deregister()
    return view[:5].tolist()


def test_what_its_owner_frees_stays_valid_for_those_who_map_it(run_ranks):
    assert run_ranks(free_what_peers_map, 2) == [[5.0] * 4 + [1.0], [5.0] * 4 + [0.0]]


def allocate_again(rank, world_size):
    group = dist.group.WORLD
    POOL.give_back()
    first = group.allocate_tensor(1 << 18)
    address = first.data_ptr()
    del first
    again = group.allocate_tensor((1 << 18) - 5)  # of about its size
    is_reused = again.data_ptr() == address
    used, kept = POOL.state
    window = group.new_window(again)
    del window, again
    gc.collect()
    closed = POOL.state
    return is_reused, used, kept, closed, held_bytes().get("tensors", 0)


def test_memory_that_nobody_else_knows_is_used_again_and_other_memory_is_closed(run_fresh_ranks):
    for is_reused, used, kept, closed, held in run_fresh_ranks(allocate_again, 1):
        assert is_reused
        assert (used, kept) == (1 << 20, 0)
        assert closed == (0, 0)
        assert held == 0


def run_out_of_addresses(rank, world_size):
    group = dist.group.WORLD
    tensor = make(1 << 22)
    window = group.new_window()
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), hard))
    alone = error_of(lambda: group.allocate_tensor(1 << 22)) if rank == 1 else None
    together = error_of(lambda: window.tensor_register(tensor))
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    window.tensor_register(tensor)  # nothing is lost
    seen = window.map_remote_tensor(1 - rank)[0].item()
    dist.barrier()
    return (type(alone), str(alone)), (type(together), str(together)), seen


def test_too_little_address_space_is_the_same_error_on_every_rank(run_fresh_ranks):
    found = run_fresh_ranks(run_out_of_addresses, 2)
    assert found[1][0][0] is OutOfSharedMemory
    assert "no 16 MiB of shared memory" in found[1][0][1]
    for rank, (_, (kind, text), peer) in enumerate(found):
        assert kind is OutOfSharedMemory
        assert f"rank {rank}: tensor_register" in text
        assert "rank 1: the memory of another rank can't be mapped: Cannot allocate memory" in text
        assert peer == 1 - rank


# ---- mistakes ------------------------------------------------------------------------------------------------------


def make_mistakes(rank, world_size):
    group, mine = dist.group.WORLD, make()
    window, other = group.new_window(), group.new_window()
    found = [
        error_of(lambda: window.put(mine, 0, 0)),
        error_of(lambda: window.tensor_register(mine if rank == 0 else torch.ones(8))),
        error_of(lambda: window.tensor_register(mine if rank == 0 else make(dtype=torch.int32))),
        error_of(lambda: (window if rank == 0 else other).tensor_register(mine)),
        error_of(lambda: group.new_window(*([mine] if rank == 0 else []))),
        error_of(window.tensor_deregister if rank == 0 else group.new_window),
        error_of(window.tensor_deregister),
    ]
    group.new_window()  # has one number on all ranks, though one has called it once more
    window.tensor_register(mine)
    found += [
        error_of(lambda: window.tensor_register(mine)),
        error_of(lambda: window.put(torch.ones(3), 1, 6)),
        error_of(lambda: window.put(torch.ones(3), 1, -1)),
        error_of(lambda: window.put(torch.ones(3, dtype=torch.float64), 1, 0)),
        error_of(lambda: window.put(torch.ones(3), world_size, 0)),
        error_of(lambda: window.signal(-1)),
        error_of(lambda: window.map_remote_tensor(True)),
        error_of(lambda: group.allocate_tensor(-1)),
        error_of(lambda: group.allocate_tensor(4, device=torch.device("cuda", 0))),
        error_of(lambda: group.allocate_tensor(4, device="nonsense")),
        error_of(lambda: group.allocate_tensor(4, dtype="float")),
        error_of(lambda: group.allocate_tensor(4, dtype=torch.qint8)),
        error_of(lambda: group.allocate_tensor(1 << 55)),
    ]
    dist.all_reduce(torch.ones(1))  # the group lives on
    return [(type(error), str(error)) for error in found]


MISTAKES = [
    (ArgumentError, "no tensor is registered; every rank calls tensor_register() first"),
    (
        ArgumentError,
        "rank 1: the tensor is not in memory that other ranks can map; take one from group.allocate_tensor",
    ),
    (ArgumentError, "the tensors of a window must have one dtype: rank 0 float32 and rank 1 int32"),
    (CollectiveMismatch, "rank 0: tensor_register of window 1\n  rank 1: tensor_register of window 2"),
    (CollectiveMismatch, "rank 0: new_window(tensor) of window 3\n  rank 1: new_window() of window 3"),
    (CollectiveMismatch, "rank 0: tensor_deregister of window 1\n  rank 1: new_window() of window 3"),
    (ArgumentError, "rank 0: no tensor is registered; rank 1: no tensor is registered"),
    (ArgumentError, "a tensor is registered already; call tensor_deregister() first"),
    (ArgumentError, "3 elements at target_offset_nelems=6 do not lie in the window of rank 1, which has 8"),
    (ArgumentError, "target_offset_nelems=-1 do not lie"),
    (ArgumentError, "the window holds torch.float32, got a tensor of torch.float64"),
    (ArgumentError, "dst_rank must lie in [0, 2), got 2"),
    (ArgumentError, "peer_rank must lie in [0, 2), got -1"),
    (ArgumentError, "rank must lie in [0, 2), got True"),
    (ArgumentError, "size must be a number of elements, at least 0, got -1"),
    (ArgumentError, "hands out CPU memory, which the ranks of a host share; got device cuda:0"),
    (ArgumentError, "hands out CPU memory, which the ranks of a host share; got device nonsense"),
    (ArgumentError, "dtype must be a torch.dtype such as torch.float32, got 'float'"),
    (ArgumentError, "can't hand out torch.qint8"),
    (OutOfSharedMemory, "shared memory for 36028797018963968 elements of torch.float32"),
]


def test_mistakes_are_errors_on_every_rank_and_lose_nothing(run_ranks):
    for rank, found in enumerate(run_ranks(make_mistakes, 2)):
        for (kind, words), (found_kind, text) in zip(MISTAKES, found, strict=True):
            assert found_kind is kind, text
            assert text.startswith(f"rank {rank}: ")
            assert words in text


def answer_torch(rank, world_size):
    backend = dist.group.WORLD._get_backend(CPU)
    assert dist.group.WORLD.supports_window is True
    assert backend.supports_tensor_alloc(CPU) is True
    assert backend.supports_tensor_alloc(torch.device("cuda")) is False
    attr = dist.group.WORLD.new_window().get_attr(0) if hasattr(dist, "_new_window") else None
    return tuple(backend.allocate_tensor(5, dtype=torch.int16, device=CPU).shape), str(attr and attr.access_type)


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch before 2.14 has other backends")
def test_torch_is_told_what_groups_can_do(run_ranks):
    unified = "WindowAccessType.UNIFIED" if hasattr(dist, "_new_window") else "None"
    assert run_ranks(answer_torch, 1) == [((5,), unified)]


# ---- the end of a rank, or of the group ------------------------------------------------------------------------------


def outlive_a_rank(rank, world_size, call):
    window = dist.group.WORLD.new_window(make(1 << 16))
    view = window.map_remote_tensor(2)
    reached("up")
    await_release("on")
    calls = {
        "put": lambda: window.put(torch.ones(4), 2, 0),
        "map_remote_tensor": lambda: window.map_remote_tensor(2),
        "signal": lambda: window.signal(2),
        "wait_signal": lambda: window.wait_signal(2),
        "async wait_signal": lambda: window.wait_signal(2, True).wait(),
    }
    before = view.sum().item()
    error = error_of(calls[call])
    view[0] = 3.0  # no SIGBUS
    return before, view[0].item(), type(error), error.ranks, str(error), getattr(error, "signal", None)


@pytest.mark.parametrize("call", ["put", "map_remote_tensor", "signal", "wait_signal", "async wait_signal"])
def test_a_rank_that_is_killed_leaves_its_memory_and_is_named_by_the_next_call(spawn_ranks, call):
    with spawn_ranks(outlive_a_rank, 3, call, group_timeout_s=60) as ranks:
        ranks.wait_until_reached("up")
        watch = os.pidfd_open(ranks.pids[2])
        ranks.kill(2)
        assert select.select([watch], [], [], 30)[0], "rank 2 has not ended"
        os.close(watch)
        ranks.release("on")
        outcomes = ranks.join(30)
    for rank in range(2):
        assert outcomes[rank].ok, outcomes[rank]
        before, after, kind, named, text, number = outcomes[rank].value
        assert after == 3.0
        assert before in (2.0 * (1 << 16), 2.0 * (1 << 16) + 1)  # the other survivor may have written already
        assert kind is RankFailed
        assert named == (2,)
        assert number in (signal.SIGKILL, None)  # None: its parent had collected the status
        assert f"{call.removeprefix('async ')} of group 'default'" in text


def end_waits(rank, world_size):
    slow, aborted, left = (dist.new_group() for _ in range(3))
    windows = [group.new_window() for group in (slow, aborted, left)]
    found = []
    dist.barrier()
    if rank == 0:
        options = getattr(c10d, "WaitSignalOptions", None)
        if options is not None:
            options = options()
            options.timeout = timedelta(milliseconds=200)
        else:
            slow.set_timeout(timedelta(milliseconds=200))
        found.append(error_of(lambda: windows[0].wait_signal(1, False, options)))
        found.append(error_of(lambda: windows[1].wait_signal(1)))
        found.append(error_of(lambda: windows[2].wait_signal(1)))
        found.append(error_of(lambda: windows[2].signal(1)))
    else:
        aborted.abort()
        dist.destroy_process_group(left)
        found.append(error_of(lambda: windows[2].signal(0)))
    dist.barrier()
    return [(type(error), str(error)) for error in found]


def test_waits_for_signals_end_by_deadline_abort_and_the_departure_of_the_peer(run_ranks):
    zero, one = run_ranks(end_waits, 2)
    assert zero[0][0] is CollectiveTimeout, zero[0]
    assert "wait_signal of group" in zero[0][1]
    assert "needs a signal() by that rank" in zero[0][1]
    assert zero[1][0] is GroupAborted, zero[1]
    assert zero[2][0] is RankFailed, zero[2]
    assert "left the group" in zero[2][1]
    assert issubclass(zero[3][0], PhalanxError)
    assert "was destroyed on this rank" in one[0][1]


def meet_between_hosts(rank, world_size):
    window = dist.group.WORLD.new_window(make())
    window.put(torch.full((2,), 4.0), rank, 0)
    if rank:  # ranks 1 and 2 share a host
        window.signal(3 - rank)
        window.wait_signal(3 - rank)
    far = 0 if rank else 1
    calls = (
        lambda: window.map_remote_tensor(far),
        lambda: window.put(torch.ones(2), far, 0),
        lambda: window.signal(far),
        lambda: window.wait_signal(far),
    )
    dist.barrier()
    seen, texts = window.map_remote_tensor(2 if rank else 0)[:3].tolist(), [str(error_of(call)) for call in calls]
    dist.barrier()
    return seen, texts


def test_ranks_of_another_host_are_refused_by_name(run_ranks):
    for rank, (seen, texts) in enumerate(run_ranks(meet_between_hosts, 3, hosts=[1, 2])):
        assert seen == [4.0, 4.0, 2.0 if rank else 0.0]
        for op, text in zip(("map_remote_tensor", "put", "signal", "wait_signal"), texts, strict=True):
            assert f"rank {rank}: {op}" in text
            assert f"rank {0 if rank else 1} is on another host" in text
