"""What is left of an epoch is what the whole epoch has there: padding, batches and random numbers included."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import DistributedSampler
from tests.resuming import NUM_EPOCHS, Stream, check_every_stop, loop

NUM_RUNS = 1000 if os.environ.get("PHALANX_TEST_LONG") else 20
lengths, world_sizes = st.integers(1, 200), st.integers(1, 4)


@settings(max_examples=NUM_RUNS)
@given(lengths, world_sizes, st.booleans(), st.booleans(), st.booleans())
def test_a_sampler_goes_on_as_without_the_stop(length, world_size, shuffle, drop_last, pad):
    options = {"shuffle": shuffle, "drop_last": drop_last, "pad": pad, "seed": 3}
    for rank in range(world_size):
        check_every_stop(
            lambda state, rank=rank: loop(DistributedSampler(range(length), world_size, rank, **options), state)
        )


@settings(max_examples=NUM_RUNS)
@given(lengths, world_sizes, st.integers(1, 9), st.booleans(), st.booleans())
def test_a_loader_goes_on_as_without_the_stop(length, world_size, batch_size, shuffle, drop_last):
    def open_loader(rank, **options):
        sampler = DistributedSampler(range(length), world_size, rank, shuffle, drop_last=drop_last)
        return phalanx.DataLoader(torch.arange(length), batch_size, sampler=sampler, drop_last=drop_last, **options)

    for rank in range(world_size):
        check_every_stop(lambda state, rank=rank: loop(open_loader(rank), state))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_load_ahead_change_nothing(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent, "shuffle": True}
    check_every_stop(lambda state: loop(phalanx.DataLoader(torch.arange(7), 2, **options), state))


@settings(max_examples=NUM_RUNS)
@given(lengths, world_sizes, world_sizes, st.integers(0, 50), st.booleans())
def test_other_ranks_pad_with_the_beginning_of_the_epoch(length, before, after, num_steps, shuffle):
    options = {"shuffle": shuffle, "seed": 3}
    state = {"epoch": 1, "place": min(num_steps * before, length - 1), "length": length, **options}
    whole = DistributedSampler(range(length), 1, 0, **options)
    whole.set_epoch(1)
    order, parts = list(whole), []
    for rank in range(after):
        sampler = DistributedSampler(range(length), after, rank, **options)
        sampler.load_state_dict(state)
        parts.append(list(sampler))
    seen = [sample for step in zip(*parts, strict=True) for sample in step]
    num_left = length - state["place"]
    assert seen[:num_left] == order[state["place"] :]
    assert seen[num_left:] == [order[at % length] for at in range(len(seen) - num_left)]


def train(rank, world_size, length, options, stop=None, state=None):
    """A loop of one's own; return its weights, or what it has saved when it stopped."""
    phalanx.seed_everything(0)
    inputs = torch.randn(length, 5)
    loader = phalanx.DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 3, **options)
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    phalanx.seed_everything(0, per_rank=True)
    holders = {"model": model, "optimizer": optimizer, "loader": loader, "random": phalanx.RandomState()}
    for name, of_holder in (state or {}).items():
        holders[name].load_state_dict(of_holder)
    num_steps = 0
    for epoch in range(loader.sampler.epoch, NUM_EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            num_steps += 1
            if num_steps == stop:
                return {name: holder.state_dict() for name, holder in holders.items()}
    return [parameter.detach().clone() for parameter in model.parameters()], num_steps


def weights_of_every_stop(rank, world_size, length, options):
    whole, num_steps = train(rank, world_size, length, options)
    differ = []
    for stop in range(1, num_steps):
        resumed, _ = train(rank, world_size, length, options, state=train(rank, world_size, length, options, stop))
        differ += [stop] * (not all(map(torch.equal, resumed, whole)))
    return num_steps, differ


@pytest.mark.parametrize("length", [13, 17])
def test_a_loop_of_ones_own_ends_with_the_same_weights(run_ranks, length):
    results = run_ranks(weights_of_every_stop, 2, length, {"shuffle": True})
    assert results == [(2 * -(-length // 6), [])] * 2


def test_workers_that_stay_do_not_move_the_numbers_that_a_rank_draws(run_ranks):
    options = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    assert run_ranks(weights_of_every_stop, 1, 5, options) == [(4, [])]


def test_a_stream_has_no_position():
    loader = phalanx.DataLoader(phalanx.shard_iterable(Stream(5)))
    with pytest.raises(TypeError, match="a loader of a stream, here a Shard, can't be resumed"):
        loader.state_dict()
