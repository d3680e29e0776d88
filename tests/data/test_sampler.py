"""Samplers: torch's order, every sample exactly once, and a resumption that loses and repeats nothing."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import phalanx
from phalanx import DistributedSampler


def samplers(length, size, **options):
    return [DistributedSampler(range(length), size, rank, **options) for rank in range(size)]


def merged(parts):
    """The ranks' samples in the global order: they take turns."""
    longest = max(map(len, parts))
    return [part[place] for place in range(longest) for part in parts if place < len(part)]


lengths, sizes, epochs = st.integers(0, 60), st.integers(1, 7), st.integers(0, 4)


@given(length=st.integers(1, 60), size=sizes, epoch=epochs, shuffle=st.booleans(), drop_last=st.booleans())
def test_each_rank_has_what_torchs_sampler_gives_it(length, size, epoch, shuffle, drop_last):
    for rank in range(size):
        options = {"num_replicas": size, "rank": rank, "shuffle": shuffle, "drop_last": drop_last, "seed": 3}
        ours, torchs = DistributedSampler(range(length), **options), TorchSampler(range(length), **options)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        assert isinstance(ours, TorchSampler)


@given(length=lengths, size=sizes, epoch=epochs, shuffle=st.booleans())
def test_without_padding_each_sample_comes_exactly_once(length, size, epoch, shuffle):
    parts = []
    for sampler in samplers(length, size, shuffle=shuffle, pad=False):
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler)
    assert sorted(itertools.chain(*parts)) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(length=lengths, size=sizes, epoch=epochs, seed=st.integers(0, 5))
def test_the_order_does_not_depend_on_the_number_of_ranks(length, size, epoch, seed):
    orders = []
    for number in (1, size):
        parts = samplers(length, number, pad=False, seed=seed)
        for sampler in parts:
            sampler.set_epoch(epoch)
        orders.append(merged([list(sampler) for sampler in parts]))
    assert orders[0] == orders[1]


@settings(max_examples=200)
@given(
    length=lengths,
    sizes=st.lists(sizes, min_size=2, max_size=4),
    num_steps=st.integers(0, 12),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_resuming_on_any_number_of_ranks_goes_on_exactly(length, sizes, num_steps, seed, shuffle, drop_last):
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "pad": False}
    state = {"epoch": 2, "place": 0, "seed": seed, "shuffle": shuffle, "length": length}
    seen = []
    for number, size in enumerate(sizes):
        parts = samplers(length, size, **options)
        for sampler in parts:
            sampler.load_state_dict(state)
            sampler.set_epoch(2)  # as a script does that resumes this epoch
        walks = [iter(sampler) for sampler in parts]
        is_last = number == len(sizes) - 1
        for _ in range(length if is_last else num_steps):
            step = [next(walk, None) for walk in walks]  # all ranks train on one each, if they still have one
            seen += [sample for sample in step if sample is not None]
            if None in step:
                break
        # A rank that had one more than another knows best where all stand.
        state = parts[0].state_dict()
        if state["epoch"] == 3:
            break
    order = DistributedSampler(range(length), 1, 0, seed=seed, shuffle=shuffle)
    order.set_epoch(2)
    assert seen == list(order)[: len(seen)]
    if not drop_last:
        assert len(seen) == length
    else:
        assert length - len(seen) < max(sizes)


def test_a_state_at_the_end_of_an_epoch_begins_the_next():
    sampler = DistributedSampler(range(6), 2, 0)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 3
    assert sampler.state_dict() == {"epoch": 5, "place": 0, "seed": 0, "shuffle": True, "length": 6}


def test_a_forgotten_set_epoch_advances_and_is_said_once_by_rank_0():
    sampler, reference = DistributedSampler(range(20), 2, 0), TorchSampler(range(20), 2, 0)
    first = list(sampler)
    with pytest.warns(UserWarning, match="rank 0: DistributedSampler: set_epoch was not called before epoch 1") as said:
        second = [index for (index,) in DataLoader(range(20), sampler=sampler, collate_fn=tuple)]
    assert said[0].filename == __file__, "it points at the loop"
    third = list(sampler)
    for epoch, got in enumerate((first, second, third)):
        reference.set_epoch(epoch)
        assert got == list(reference)


def test_epochs_that_somebody_keeps_are_no_mistake():
    # Warnings are errors here.
    other_rank = DistributedSampler(range(20), 2, 1)
    assert list(other_rank) != list(other_rank)
    in_order = DistributedSampler(range(20), 2, 0, shuffle=False)
    assert list(in_order) == list(in_order)
    saved, loaded = DistributedSampler(range(20), 2, 0), DistributedSampler(range(20), 2, 0)
    list(saved)
    loaded.load_state_dict(saved.state_dict())
    assert [list(saved), list(saved)] == [list(loaded), list(loaded)]
    loader = phalanx.DataLoader(range(20), shuffle=True, num_workers=0)
    assert [int(index) for index in loader] != [int(index) for index in loader]


def test_set_epoch_has_the_last_word():
    sampler = DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(7)
    first = list(sampler)
    sampler.set_epoch(7)
    assert list(sampler) == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "this sampler's seed is 0, but the state was saved with 1"),
        ({"length": 9}, "length is 10"),
        ({"shuffle": False}, "shuffle is True"),
    ],
)
def test_a_state_of_something_else_is_refused(change, said):
    sampler = DistributedSampler(range(10), 2, 0)
    with pytest.raises(ValueError, match=said):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_a_rank_outside_the_group_is_an_error():
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        DistributedSampler(range(10), 2, 2)


def test_one_of_several_ranks_without_a_group_is_told_to_make_one(forked):
    environ = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    done = forked.run("-c", "import phalanx; phalanx.DistributedSampler(range(3))", env=environ)
    assert done.returncode == 1
    assert "call phalanx.init() or init_process_group() first" in done.stderr


def places(rank, world_size):
    sampler = phalanx.DistributedSampler(range(10), shuffle=False, pad=False)
    return list(sampler)


def test_ranks_come_from_the_default_group(run_ranks):
    assert run_ranks(places, 3, backend="gloo") == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
