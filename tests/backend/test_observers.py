"""What watches collectives from outside: the Flight Recorder, DETAIL debug mode, the profiler, CommDebugMode, hooks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx import CollectiveMismatch
from phalanx._torch import version
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from tests.backend._calls import CALLS, Call, check_equal, gloo_group

pytestmark = pytest.mark.kept_ranks

needs_python_backends = pytest.mark.skipif(
    not HAS_PYTHON_BACKENDS, reason="before torch 2.14 only C++ backends reach the dispatcher's observers"
)
needs_flight_recorder = pytest.mark.skipif(
    version() < (2, 15), reason="before torch 2.15 the Flight Recorder is attached to torchcomms alone"
)


def record_flight(rank, world_size):
    tensor = torch.ones(6)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0, async_op=True).wait()
    dist.barrier()
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="phalanx"))
    return [(entry["profiling_name"], entry["retired"], entry["input_sizes"]) for entry in dump["entries"]]


def init_in_detail():
    """As TORCH_DISTRIBUTED_DEBUG=DETAIL does, which torch has read when it was imported."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("phalanx")


def debug_in_detail(rank, world_size):
    init_in_detail()
    gloo = gloo_group()
    for name in CALLS:
        for async_op in (False, True):
            for root in range(world_size):
                call = Call(name, dist.group.WORLD, (5, 2), root=root, seed=2, async_op=async_op)
                for got, want in zip(call.run(), call.on(gloo).run(), strict=True):
                    check_equal(got, want, f"{name} async={async_op}")
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    group = dist.new_group([0])
    if rank == 0:
        dist.barrier(group)
    dist.monitored_barrier()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    assert work.is_completed()
    return objects


def mismatch_in_detail(rank, world_size):
    init_in_detail()
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(3 + rank))
    return type(error.value).__name__, str(error.value)


def count_sequence(rank, world_size):
    group = dist.new_group()
    before = [g._get_sequence_number_for_group() for g in (dist.group.WORLD, group)]
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    after = [g._get_sequence_number_for_group() for g in (dist.group.WORLD, group)]
    return [b - a for a, b in zip(before, after, strict=True)]


def profile_collectives(rank, world_size):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        work = dist.all_gather_into_tensor(torch.empty(1000 * world_size), tensor, async_op=True)
        work.wait()
        assert work.is_completed()
    assert (tensor == world_size).all()
    dist.all_reduce(tensor)  # nothing stays behind when the profiler is gone
    return sorted({event.key for event in seen.key_averages()})


def count_communication(rank, world_size):
    from torch.distributed.tensor.debug import CommDebugMode

    mode = CommDebugMode()
    tensor = torch.ones(8)
    with mode:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(torch.empty(8 * world_size), tensor)
        torch.distributed._functional_collectives.all_reduce(tensor, "sum", dist.group.WORLD).wait()
    assert (tensor == world_size**2).all()
    return {str(op): count for op, count in mode.get_comm_counts().items()}, mode.get_total_counts()


def run_hooks(rank, world_size):
    """Hooks see every operation, also those that would otherwise take the shorter way."""
    seen = []
    dist.all_reduce(torch.ones(1))  # the shorter way, before anybody listens
    dist.group.WORLD.register_pre_hook(71, lambda args: seen.append("pre"))
    dist.group.WORLD.register_post_hook(71, lambda args: seen.append("post"))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return seen, tensor.tolist()


def ask_names(rank, world_size):
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    return dist.get_backend(), group.name(), backend.name(), group.size(), dist.get_backend(dist.new_group())


@needs_flight_recorder
def test_the_flight_recorder_has_the_operations(run_ranks):
    for entries in run_ranks(record_flight, 2, env={"TORCH_FR_BUFFER_SIZE": "100"}):
        assert [name.split(":")[-1] for name, _, _ in entries] == ["all_reduce", "broadcast", "barrier"]
        assert [retired for _, retired, _ in entries] == [True] * 3
        assert [sizes for _, _, sizes in entries] == [[[6]], [[6]], []]


@pytest.mark.parametrize("world_size", [1, 2])
def test_detail_debug_mode_runs_every_operation(run_ranks, world_size):
    assert run_ranks(debug_in_detail, world_size, init=False) == [list(range(world_size))] * world_size


def test_detail_debug_mode_reports_a_mismatch(run_ranks):
    for kind, text in run_ranks(mismatch_in_detail, 2, init=False):
        # torch's wrapper is asked first where it exists; both name the operation and the difference.
        assert kind in (CollectiveMismatch.__name__, "RuntimeError")
        assert "all_reduce" in text.lower() or "ALLREDUCE" in text
        assert "3" in text
        assert "4" in text


def test_sequence_numbers_count_the_collectives_of_each_group(run_ranks):
    assert run_ranks(count_sequence, 2) == [[0, 4]] * 2


def test_a_profiler_sees_collectives_and_does_no_harm(run_ranks):
    for names in run_ranks(profile_collectives, 2):
        for op in ("all_reduce", "broadcast", "all_gather"):
            assert any(op in name for name in names), names


def test_comm_debug_mode_counts(run_ranks):
    for counts, total in run_ranks(count_communication, 2):
        assert sum(counts.values()) == total
        assert total >= (4 if HAS_PYTHON_BACKENDS else 1), counts


@needs_python_backends
def test_hooks_see_operations_from_when_they_are_registered(run_ranks):
    for seen, result in run_ranks(run_hooks, 2):
        assert seen == ["pre", "post"]
        assert result == [2.0] * 4


def test_the_backend_tells_its_name(run_ranks):
    backend, group, inner, size, subgroup = run_ranks(ask_names, 1)[0]
    assert (backend, subgroup, size) == ("phalanx", "phalanx", 1)
    if HAS_PYTHON_BACKENDS:
        assert inner == "phalanx"
    assert group
