"""The short way from torch's front end into the core: which calls take it, and that it looks like any other method."""

from __future__ import annotations

import inspect
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.profiler import ProfilerActivity, profile

import phalanx
from phalanx._torch.options import Layout
from phalanx.backend.torch import dispatch
from phalanx.backend.torch.adapters import PhalanxGroup

pytestmark = pytest.mark.kept_ranks

OURS = str(Path(phalanx.__file__).parent)
OPTIONS = sorted(
    {operation.options for operation in vars(dispatch).values() if isinstance(operation, dispatch.Operation)} - {None},
    key=str,
)


def functions_of_ours(call):
    """Return the names of phalanx's Python functions that a call runs, but for the first time."""
    call()  # finds the names of the callers' files, which are known from then on
    seen = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def usual_calls(rank, world_size):
    one, all_of_them = torch.ones(2), torch.ones(world_size, 2)
    parts = list(all_of_them.clone())
    calls = {
        "all_reduce": lambda: dist.all_reduce(one, dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(one, 1),
        "barrier": lambda: dist.barrier(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(all_of_them, one),
        "all_gather": lambda: dist.all_gather(parts, one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, all_of_them),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts),
        "reduce": lambda: dist.reduce(one, 1),
        "gather": lambda: dist.gather(one, parts if rank == 1 else None, 1),
        "scatter": lambda: dist.scatter(one, parts if rank == 1 else None, 1),
        "all_to_all_single": lambda: dist.all_to_all_single(all_of_them, all_of_them.clone()),
    }
    dist.barrier()  # the first call of a group finds out whether anything listens
    operations = dist.group.WORLD._operations
    before = operations.num_barriers
    seen = {name: functions_of_ours(call) for name, call in calls.items()}
    return seen, operations.num_barriers - before


def test_a_usual_call_runs_no_python_function_of_ours(run_ranks):
    for seen, num_barriers in run_ranks(usual_calls, 2):
        assert {name for names in seen.values() for name in names} <= {"rank"}, seen  # torch asks for it in a gather
        assert num_barriers == 2


def unusual_calls(rank, world_size):
    dist.barrier()
    group, options = dist.group.WORLD, c10d.AllreduceOptions()
    options.asyncOp, options.timeout = False, timedelta(seconds=20)
    total = torch.zeros(2)

    def all_reduce(tensor, **given):
        dist.all_reduce(total.copy_(tensor) if tensor.is_contiguous() else tensor, **given)

    def in_a_profile():
        with profile(activities=[ProfilerActivity.CPU]):
            all_reduce(torch.ones(2))

    calls = {
        "asynchronous": lambda: dist.all_reduce(total.fill_(1), async_op=True).wait(),
        "timeout": lambda: group.allreduce([total.fill_(1)], options),
        "no options": lambda: group.allreduce([total.fill_(1)]).wait(),
        "premultiplied": lambda: all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(1.0)),
        "not contiguous": lambda: all_reduce(total.fill_(1).repeat(2, 1).t()),
        "profiler": in_a_profile,
    }
    return {name: bool(functions_of_ours(call)) for name, call in calls.items()}, total.tolist()


def test_any_other_call_runs_the_python_method(run_ranks):
    for seen, total in run_ranks(unusual_calls, 2):
        assert all(seen.values()), seen
        assert total == [2, 2]


class Counted(PhalanxGroup):
    num_calls = 0

    def allreduce(self, *args, **named):
        self.num_calls += 1
        return super().allreduce(*args, **named)


def override(rank, world_size):
    group = dist.group.WORLD
    group.__class__ = Counted
    dist.all_reduce(total := torch.ones(1))
    method = group.broadcast
    method([total.fill_(rank)], c10d.BroadcastOptions()).wait()
    return group.num_calls, total.tolist(), method.__self__ is group


def test_a_subclass_overrides_and_calls_an_entry_point(run_ranks):
    assert run_ranks(override, 2) == [(1, [0], True)] * 2


@pytest.mark.parametrize("name", ["allreduce", "barrier", "all_to_all_single", "send"])
def test_an_entry_point_looks_like_a_function(name):
    method = getattr(PhalanxGroup, name)
    assert inspect.isfunction(method)
    assert (method.__name__, method.__qualname__) == (name, f"PhalanxGroup.{name}")
    assert repr(method).startswith(f"<function PhalanxGroup.{name} at")
    assert list(inspect.signature(method).parameters) == ["self", "args", "named"]
    assert inspect.getsourcefile(method) == dispatch.__file__
    with pytest.raises(AttributeError, match="nothing"):
        method.nothing  # noqa: B018


@pytest.mark.parametrize("options", OPTIONS)
def test_torchs_options_have_a_layout(options):
    found = Layout.of(options)
    assert found is not None
    names = ("asyncOp", "timeout", "reduceOp", "rootRank")
    assert [offset >= 0 for offset in found] == [hasattr(options, name) for name in names]


class Elsewhere:
    """Options that hold their values in a dictionary."""

    def __init__(self):
        self.asyncOp, self.timeout, self.rootRank = True, timedelta(milliseconds=-1), 0

    asyncOp = timeout = rootRank = None


class Fixed(Elsewhere):
    """Options whose values do not change."""

    def __setattr__(self, name, value):
        pass


@pytest.mark.parametrize("options", [Elsewhere, Fixed])
def test_unknown_options_have_no_layout(options):
    assert Layout.of(options) is None
