"""Tensors of every kind that torch can make x every operation x sync and async: moved rightly, or refused clearly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from tests.backend._kinds import EMPTY, MOVED, REFUSED, RUNS, attempt, values_of

pytestmark = pytest.mark.kept_ranks

needs_dispatcher = pytest.mark.skipif(
    not HAS_PYTHON_BACKENDS, reason="before torch 2.14 the dispatcher can't lead back to a Python backend"
)
_FIRST_WORDS = {"messages": ("send", "recv"), "all_reduce_coalesced": ("all_reduce",)}


def move_a_kind(rank, world_size, kind):
    """Return what differed from plain tensors."""
    faults = []
    for name in RUNS:
        for async_op in (False, True):
            end, results = attempt(MOVED[kind], name, rank, world_size, async_op)
            plain_end, plain = attempt(torch.clone, name, rank, world_size, async_op)
            assert plain_end == "done", plain
            if end != "done":
                faults.append(f"{name}, async {async_op}: {results!r}")
            elif [values_of(t) for t in results] != [values_of(t) for t in plain]:
                faults.append(f"{name}, async {async_op}: {results} is not {plain}")
    return faults


def refuse_a_kind(rank, world_size, kind):
    """Return where a tensor was not refused with words that name rank and operation."""
    faults = []
    for name in RUNS:
        for async_op in (False, True):
            end, error = attempt(REFUSED[kind], name, rank, world_size, async_op)
            wants = [f"rank {rank}: {op}" for op in _FIRST_WORDS.get(name, (name,))]
            if kind == "meta" and name == "messages" and async_op and HAS_PYTHON_BACKENDS:
                wants = ["No backend type associated with device type meta"]  # torch's own, before us
            if end == "done" or not any(want in str(error) for want in wants):
                faults.append(f"{name}, async {async_op}: {end} {error!r}")
    dist.barrier()  # the group still works
    return faults


def touch_tensors_without_values(rank, world_size):
    for name in RUNS:
        for async_op in (False, True):
            end, error = attempt(EMPTY["fake"], name, rank, world_size, async_op)
            # torch has no fake kernel for this one.
            assert end == "done" or "allreduce_coalesced_" in str(error), f"{name}: {error!r}"
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist()


def reduce_under_transforms(rank, world_size):
    def summed(x):
        y = x * 1.0
        dist.all_reduce(y)
        return (y * y).sum()

    gradient = torch.func.grad(summed)(torch.arange(3.0))
    _, tangent = torch.func.jvp(lambda x: x * 2, (torch.arange(3.0),), (torch.ones(3),))
    texts = []
    for transform in (torch.vmap, torch.func.functionalize):
        try:
            transform(lambda x: (dist.all_reduce(x), x)[1])(torch.ones(2, 2))
            texts.append("done")
        except RuntimeError as error:
            texts.append(str(error))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        dist.all_reduce(dual)
        primal = torch.autograd.forward_ad.unpack_dual(dual).primal.tolist()
    return gradient.tolist(), tangent.tolist(), texts, primal


def move_under_modes(rank, world_size):
    """Return what operations give inside modes that watch or replace torch's functions."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    sums = []
    for mode in (Watching, lambda: FlopCounterMode(display=False), torch.inference_mode, torch.no_grad):
        with mode():
            tensor = torch.full((3,), float(rank + 1))
            dist.all_reduce(tensor)
        sums.append(tensor.tolist())
    return sums, any("allreduce" in name for name in seen)


def average_a_kind(rank, world_size, kind):
    tensor = MOVED[kind](torch.arange(3.0) + rank)
    dist.group.WORLD.average_coalesced([tensor], torch.ones(1))
    return values_of(tensor)


@pytest.mark.parametrize("kind", ["plain", "labelled", "meddling"])
def test_gradients_of_a_class_of_its_own_are_averaged_where_they_lie(run_ranks, kind):
    assert run_ranks(average_a_kind, 2, kind) == [[0.5, 1.5, 2.5]] * 2


@pytest.mark.parametrize("kind", sorted(MOVED))
def test_a_kind_of_tensor_gives_what_a_plain_one_gives(run_ranks, kind):
    assert run_ranks(move_a_kind, 2, kind) == [[], []]


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_kind_of_tensor_without_memory_of_its_own_is_refused(run_ranks, kind):
    assert run_ranks(refuse_a_kind, 2, kind) == [[], []]


@needs_dispatcher
def test_fake_tensors_move_nothing_and_harm_nothing(run_ranks):
    assert run_ranks(touch_tensors_without_values, 2) == [[2.0] * 3] * 2


@needs_dispatcher
def test_collectives_inside_torch_func(run_ranks):
    for gradient, tangent, (mapped, functionalized), primal in run_ranks(reduce_under_transforms, 2):
        assert gradient == [0.0, 4.0, 8.0]  # as with Gloo, the gradient is that of this rank's use of the sum
        assert tangent == [2.0] * 3
        assert "takes tensors with memory of their own" in mapped
        assert functionalized == "done"
        assert primal == [2.0, 2.0]


@needs_dispatcher
def test_collectives_under_modes(run_ranks):
    for sums, was_seen in run_ranks(move_under_modes, 2):
        assert sums == [[3.0] * 3] * 4
        assert was_seen
