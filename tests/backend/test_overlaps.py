"""Tensors of one call that overlap: inputs are read before outputs are written, outputs in the order of their list.

The same call on copies is the oracle; what it gives is then written to the overlapping places one after the other.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

pytestmark = pytest.mark.kept_ranks

LENGTHS = (1, 3, 1_029, 40_003)  # in the line, staged, in one shot, in chunks


def rows(base, n, starts):
    return [base[start : start + n] for start in starts]


def layouts(size, n):
    """Yield names and starts of what one call reads and writes, a tensor for each rank, in 3 x size x n numbers."""
    own, other = [n * r for r in range(size)], [n * (size + r) for r in range(size)]
    shifted = [at + n // 2 for at in own]
    yield "apart", own, other
    yield "in place", own, own
    yield "reversed", own, own[::-1]
    yield "shifted", own, shifted
    yield "outputs in one place", own, [0] * size
    yield "outputs that overlap", other, [n * r // 2 for r in range(size)]
    yield "outputs that overlap, and inputs", own, [n * r // 2 for r in range(size)]
    yield "inputs in one place", [0] * size, own


def all_gather(rank, size, n, inputs, outputs, **how):
    return dist.all_gather(outputs, inputs[rank], **how), outputs


def all_gather_of_anothers_place(rank, size, n, inputs, outputs, **how):
    return dist.all_gather(outputs, inputs[(rank + 1) % size], **how), outputs


def gather(rank, size, n, inputs, outputs, **how):
    outputs = outputs if rank == 0 else None
    return dist.gather(inputs[-1], outputs, 0, **how), outputs or []


def scatter(rank, size, n, inputs, outputs, **how):
    return dist.scatter(outputs[-1], inputs if rank == 0 else None, 0, **how), outputs[-1:]


def reduce_scatter(rank, size, n, inputs, outputs, **how):
    return dist.reduce_scatter(outputs[rank], inputs, **how), [outputs[rank]]


def reduce_scatter_into_anothers_place(rank, size, n, inputs, outputs, **how):
    output = outputs[(rank + 1) % size]
    return dist.reduce_scatter(output, inputs, **how), [output]


def all_to_all(rank, size, n, inputs, outputs, **how):
    return dist.all_to_all(outputs, inputs, **how), outputs


LISTS = [
    all_gather,
    all_gather_of_anothers_place,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_into_anothers_place,
    all_to_all,
]


def all_gather_into_tensor(rank, size, n, inputs, outputs, **how):
    return dist.all_gather_into_tensor(outputs, inputs[:n], **how), [outputs]


def reduce_scatter_tensor(rank, size, n, inputs, outputs, **how):
    return dist.reduce_scatter_tensor(outputs[:n], inputs, **how), [outputs[:n]]


def all_to_all_single(rank, size, n, inputs, outputs, **how):
    return dist.all_to_all_single(outputs, inputs, **how), [outputs]


def all_to_all_single_split(rank, size, n, inputs, outputs, **how):
    splits = [n] * size
    return dist.all_to_all_single(outputs, inputs, splits, splits, **how), [outputs]


WHOLES = [all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, all_to_all_single_split]


def numbered(rank, count):
    return torch.arange(count, dtype=torch.float32) % 1000 + 1000 * rank


def compare(name, rank, size, n, base, run, views_of, how):
    """Run on overlapping views of `base` and on copies; return what differs in all of `base`."""
    want = base.clone()
    inputs, outputs = views_of(want)
    copy = [t.clone() for t in outputs] if isinstance(outputs, list) else outputs.clone()
    source = [t.clone() for t in inputs] if isinstance(inputs, list) else inputs.clone()
    work, results = run(rank, size, n, source, copy, **how)
    if work is not None:
        work.wait()
    inputs, outputs = views_of(base)
    work, places = run(rank, size, n, inputs, outputs, **how)
    if work is not None:
        work.wait()
    for place, result in zip(places, results, strict=True):
        want.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(result)
    return [] if torch.equal(base, want) else [f"{run.__name__}, {name}, {n} elements, {how}"]


def ways_of(in_turns, *places):
    """Return for which values of ``async_op`` a case runs: both, or one, so that its neighbours in each list differ."""
    return [sum(places) % 2 == 1] if in_turns else [False, True]


def overlap_lists(rank, size, strided, in_turns=False):
    faults = []
    for i, n in enumerate(LENGTHS):
        for j, (name, starts_in, starts_out) in enumerate(layouts(size, n)):

            def views_of(memory, starts_in=starts_in, starts_out=starts_out, n=n):
                outputs = rows(memory, n, starts_out)
                if strided:  # one output of the list has no plain memory
                    outputs[0] = memory[starts_out[0] : starts_out[0] + 2 * n : 2]
                return rows(memory, n, starts_in), outputs

            for k, run in enumerate(LISTS):
                for async_op in ways_of(in_turns, i, j, k):
                    base = numbered(rank, 3 * size * n)
                    faults += compare(name, rank, size, n, base, run, views_of, {"async_op": async_op})
    return faults


def overlap_wholes(rank, size, in_turns=False):
    faults = []
    for i, n in enumerate(LENGTHS):
        for j, shift in enumerate((0, n, -n, 1, (size - 1) * n, rank * n, -rank * n, size * n)):
            for k, run in enumerate(WHOLES):
                for async_op in ways_of(in_turns, i, j, k):
                    base = numbered(rank, 3 * size * n)
                    at = size * n

                    def views_of(memory, at=at, shift=shift, n=n):
                        return memory[at + shift : at + shift + size * n], memory[at : at + size * n]

                    faults += compare(f"by {shift}", rank, size, n, base, run, views_of, {"async_op": async_op})
    return faults


def overlap_coalesced(rank, size):
    """Coalesced tensors are all read before any is written, as Gloo's, which copies them into one."""
    gloo = dist.new_group(backend="gloo")
    faults = []
    for n in LENGTHS:
        for name, starts in (("the same", [0, 0]), ("shifted", [0, n // 2]), ("apart", [0, n])):
            ours, theirs = numbered(rank, 3 * n), numbered(rank, 3 * n)
            dist.all_reduce_coalesced(rows(ours, n, starts))
            dist.all_reduce_coalesced(rows(theirs, n, starts), group=gloo)
            if not torch.equal(ours, theirs):
                faults.append(f"all_reduce_coalesced, {name}, {n} elements")
    outputs = torch.zeros(3 * size)
    try:
        with c10d._coalescing_manager():
            for at in (0, size - 1):
                dist.all_gather_into_tensor(outputs[at : at + size], torch.ones(1))
        faults.append("overlapping outputs of coalesced all_gathers were taken")
    except ValueError as error:
        if "overlaps a tensor of another" not in str(error):
            faults.append(str(error))
    dist.barrier()
    return faults


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lists_that_overlap(run_ranks, world_size, strided):
    assert run_ranks(overlap_lists, world_size, strided) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_wholes_that_overlap(run_ranks, world_size):
    assert run_ranks(overlap_wholes, world_size) == [[]] * world_size


def test_coalesced_tensors_that_overlap(run_ranks):
    assert run_ranks(overlap_coalesced, 2) == [[], []]
