"""Behaviours: a rank gets its own state back, however little it differs from the other ranks' state."""

from __future__ import annotations

import torch

import phalanx.checkpoint as ckpt
from tests.checkpoint._tools import assert_same, behaviour, save

NUM_ELEMS = 300_000


def lonely(rank, place, dtype=torch.float32):
    """A tensor that is another on rank 1, in one element only."""
    tensor = torch.arange(NUM_ELEMS).to(dtype)
    tensor[place] = 0
    if rank == 1:
        tensor.view(torch.uint8 if dtype == torch.uint8 else torch.int32)[place] = 1
    return tensor


def states(rank):
    """Large tensors of which ranks differ in one element, at places that nobody would look at, or in one bit."""
    signed, nan = torch.zeros(NUM_ELEMS), torch.full((NUM_ELEMS,), float("nan"))
    if rank:
        signed[NUM_ELEMS // 3] = -0.0
        nan.view(torch.int32)[777] ^= 1  # another not-a-number
    base = torch.ones(NUM_ELEMS, dtype=torch.complex64)
    yield {"x": lonely(rank, 1)}
    yield {"x": lonely(rank, NUM_ELEMS - 2)}
    yield {"x": lonely(rank, 123_457, torch.uint8)}
    yield {"x": signed}
    yield {"x": nan}
    yield {"x": lonely(rank, 5).view(600, 500).T}
    yield {"x": torch._neg_view(base.imag) if rank else base.imag}  # the same memory, another sign
    yield {"x": base.conj() if rank else base}
    yield {"model": {"w": torch.ones(NUM_ELEMS), "expert": lonely(rank, 99_999)}, "rank": rank}


@behaviour
def what_differs_in_one_bit_is_each_ranks_own(rank, world_size, folder):
    for number, state in enumerate(states(rank)):
        save(folder, state, number)
        loaded = dict.fromkeys(state)
        ckpt.load(folder, loaded, number)
        assert_same(loaded, state, f"state {number}")


@behaviour
def what_is_alike_beside_it_is_still_saved_once(rank, world_size, folder):
    save(folder, {"alike": torch.ones(NUM_ELEMS), "own": lonely(rank, 7)}, 1)
    size_bytes = ckpt.list_checkpoints(folder)[0].size_bytes
    assert size_bytes < 4 * NUM_ELEMS * (1 + world_size) + 20_000 * world_size


@behaviour
def buffers_may_have_another_number_of_dimensions_on_each_rank(rank, world_size, folder):
    module = torch.nn.Module()
    module.register_buffer("seen", torch.full((2,) * (rank + 1), float(rank)))
    save(folder, {"model": module}, 1)
    state = {"model": None}
    ckpt.load(folder, state)
    assert_same(dict(state["model"]), dict(module.state_dict()))
