"""Loaders, partitions, shards and seeds."""

from __future__ import annotations

import collections
import itertools
import random
import warnings

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import phalanx
from phalanx.data.loader import DIVIDING_LOADER

NUMBERS = torch.arange(23)


class Drawing(Dataset):
    """Each item is what a worker draws from every source of random numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = (random.random(), numpy.random.random(), torch.rand(()).item())
        return torch.tensor([get_worker_info().id, *drawn], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, length):
        self._length = length

    def __iter__(self):
        return iter(range(self._length))


class OwnSampler(RandomSampler):
    """Might divide, for all that its class says."""


class OwnTurns(Stream):
    """Divides itself among workers, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self._length, info.num_workers) if info else range(self._length))


class OwnPart(OwnTurns):
    """Divides itself among the ranks, too."""

    def __init__(self, length, rank, world_size):
        super().__init__(length)
        self._rank, self._world_size = rank, world_size

    def __iter__(self):
        return (item for item in super().__iter__() if item % self._world_size == self._rank)


def load(rank, world_size, options, num_epochs=1):
    loader = phalanx.DataLoader(NUMBERS, **options)
    seen = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        seen.append([batch.tolist() for batch in loader])
    return seen


def resume(rank, world_size, state, num_workers):
    loader = phalanx.DataLoader(NUMBERS, batch_size=2, shuffle=True, num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
    loader.set_epoch(1)
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if state is None and len(seen) == 4:
            break
    return seen, loader.state_dict()


def draw(rank, world_size, per_rank):
    own = phalanx.seed_everything(5, per_rank=per_rank)
    drawn = [random.random(), numpy.random.random(), torch.rand(()).item()]
    loader = phalanx.DataLoader(Drawing(), batch_size=None, num_workers=2)
    return own, drawn, [row.tolist() for row in loader]


def read_streams(rank, world_size):
    """Read each kind of stream in the ways that give every item once."""

    def items(stream, **options):
        return [int(item) for item in phalanx.DataLoader(stream, batch_size=None, **options)]

    own_part = OwnPart(17, rank, world_size)
    read = {
        "with workers of its own": items(OwnTurns(17), num_workers=2, is_own_part=False),
        "sharded": items(phalanx.shard_iterable(Stream(17)), num_workers=2),
        "sharded, with workers of its own": items(phalanx.shard_iterable(OwnTurns(17)), num_workers=2),
        "part of its own": items(own_part, is_own_part=True),
        "part of its own, with workers": items(own_part, num_workers=2, is_own_part=True),
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read["as it comes"] = items(Stream(17))
        read["as it comes, of workers of its own"] = items(OwnTurns(17))
    return read, [str(warning.message) for warning in said]


def give_samplers(rank, world_size):
    """Iterate loaders with samplers of each kind, and return those of which a rank is told."""
    whole, some = torch.randperm(23).tolist(), range(rank, 23, world_size)
    loaders = {
        "random": {"sampler": RandomSampler(NUMBERS)},
        "in batches": {"batch_sampler": BatchSampler(RandomSampler(NUMBERS), 5, drop_last=False)},
        "in order": {"sampler": SequentialSampler(NUMBERS)},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 23, 23)},
        "by hand": {"sampler": whole},
        "part by hand": {"sampler": list(some)},
        "random part": {"sampler": SubsetRandomSampler(some)},
        "of another class": {"sampler": OwnSampler(NUMBERS)},
        "divided": {"sampler": phalanx.DistributedSampler(NUMBERS)},
        "own dataset": {"sampler": RandomSampler(NUMBERS), "is_own_part": True},
        "all on purpose": {"sampler": RandomSampler(NUMBERS), "is_own_part": False},
    }
    told = {}
    for name, options in loaders.items():
        loader = phalanx.DataLoader(NUMBERS, **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with torch.no_grad():
                list(loader)
            assert not said, "an evaluation is no training"
            for _ in range(2):
                list(loader)
        ours = [(str(one.message), one.filename) for one in said if "does not divide the data" in str(one.message)]
        told |= {name: ours} if ours else {}
    return told


def read_partition(rank, world_size):
    parts = phalanx.DataPartitioner(NUMBERS, [1 / world_size] * world_size)
    with pytest.raises(ValueError, match="pass is_own_part=True or is_own_part=False"):
        phalanx.DataLoader(parts.use(rank))
    own = phalanx.DataLoader(parts.use(rank), shuffle=True, num_workers=0, is_own_part=True)
    shared = phalanx.DataLoader(parts.use(0), num_workers=0, is_own_part=False)
    return [int(item) for item in own], [int(item) for item in shared], len(parts.use(0))


def read_shard(rank, world_size, length, num_workers):
    loader = phalanx.DataLoader(phalanx.shard_iterable(Stream(length)), batch_size=None, num_workers=num_workers)
    return [int(item) for item in loader]


def test_evaluation_sees_each_sample_once_and_training_equally_many(run_ranks):
    for options, want in (({"batch_size": 4}, 23), ({"batch_size": 4, "shuffle": True}, 24)):
        results = run_ranks(load, 2, options, backend="gloo")
        seen = [sample for (epoch,) in results for batch in epoch for sample in batch]
        assert set(seen) == set(range(23))
        assert len(seen) == want
    results = run_ranks(load, 2, {"batch_size": 4, "shuffle": True, "drop_last": True}, backend="gloo")
    assert [len(batch) for (epoch,) in results for batch in epoch] == [4] * 4


def test_epochs_differ_and_are_the_same_in_every_run(run_ranks):
    first, again = (run_ranks(load, 2, {"batch_size": 4, "shuffle": True}, 2, backend="gloo") for _ in range(2))
    assert first == again
    assert first[0][0] != first[0][1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_after_the_batch_that_was_handed_out(run_ranks, num_workers):
    # Workers have loaded further batches when the state is taken: those come again.
    begun = run_ranks(resume, 2, None, num_workers, backend="gloo")
    states = [state for _, state in begun]
    assert states[0] == states[1] == {"epoch": 1, "place": 8, "seed": 0, "shuffle": True, "length": 23}
    rest = run_ranks(resume, 3, states[0], num_workers, backend="gloo")
    seen = collections.Counter(sample for seen, _ in [*begun, *rest] for sample in seen)
    assert set(seen) == set(range(23))
    assert all(state == {**states[0], "epoch": 2, "place": 0} for _, state in rest)


def test_arguments_are_torchs_and_win():
    loader = phalanx.DataLoader(NUMBERS, 5, sampler=RandomSampler(NUMBERS), num_workers=0, pin_memory=False)
    assert (loader.batch_size, loader.num_workers, loader.pin_memory, loader.persistent_workers) == (5, 0, False, False)
    assert len(list(loader)) == 5
    alone = phalanx.DataLoader(NUMBERS, batch_size=23, num_workers=0)
    assert next(iter(alone)).tolist() == list(range(23))


@pytest.mark.parametrize("per_rank", [False, True])
def test_ranks_draw_alike_or_not_as_asked_and_workers_never_do(run_ranks, per_rank):
    first, again = (run_ranks(draw, 2, per_rank, backend="gloo") for _ in range(2))
    assert first == again
    (seed_0, drawn_0, _), (seed_1, drawn_1, _) = first
    assert (seed_0 != seed_1, drawn_0 != drawn_1) == (per_rank, per_rank)
    assert per_rank or seed_0 == 5
    for source in (1, 2, 3):
        firsts = {row[source] for _, _, rows in first for row in rows}
        assert len(firsts) == 8  # each item's own, on whichever rank and worker


def test_a_negative_seed_is_an_error():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        phalanx.seed_everything(-1)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_each_item_of_a_stream_comes_once_over_ranks_and_workers(run_ranks, num_workers):
    results = run_ranks(read_shard, 2, 17, num_workers, backend="gloo")
    assert sorted(itertools.chain(*results)) == list(range(17))
    assert [len(result) for result in results] == [9, 8]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_gives_each_item_once_whoever_divides_it(run_ranks, world_size):
    results = run_ranks(read_streams, world_size, backend="gloo")
    for name in results[0][0]:
        assert sorted(itertools.chain(*(read[name] for read, _ in results))) == list(range(17)), name
    said = [warning for _, warnings_of_rank in results for warning in warnings_of_rank]
    assert len(said) == (2 if world_size > 1 else 0)
    assert all("take turns at this" in warning and "is_own_part=True" in warning for warning in said)


def test_a_sampler_that_divides_nothing_is_told_once_by_rank_0(run_ranks):
    told, of_rank_1 = run_ranks(give_samplers, 2, backend="gloo")
    assert of_rank_1 == {}
    assert list(told) == ["random", "in batches", "in order", "weighted", "by hand"]
    assert {(len(said), said[0][1]) for said in told.values()} == {(1, __file__)}
    assert told["random"][0][0] == (
        "phalanx.DataLoader: a RandomSampler does not divide the data, so each of the 2 ranks takes 23 samples an "
        f"epoch. Make it {DIVIDING_LOADER}; or pass is_own_part=True if the dataset is this rank's own, False if every "
        "rank is to take all"
    )
    assert give_samplers(0, 1) == {}


def test_a_partition_is_not_divided_again_unless_told_to(run_ranks):
    results = run_ranks(read_partition, 2, backend="gloo")
    assert sorted(item for own, _, _ in results for item in own) == list(range(23))
    assert len({item for _, shared, _ in results for item in shared}) == results[0][2]
    assert sum(len(shared) for _, shared, _ in results) == results[0][2]


def test_an_iterator_is_no_stream():
    with pytest.raises(TypeError, match="can be read only once"):
        phalanx.shard_iterable(iter([1, 2]))


@given(length=st.integers(0, 100), weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_partitions_lose_no_sample(length, weights):
    sizes = [weight / sum(weights) for weight in weights]
    partitioner = phalanx.DataPartitioner(range(length), sizes, seed=7)
    parts = [list(partitioner.use(number)) for number in range(len(sizes))]
    assert sorted(itertools.chain(*parts)) == list(range(length))
    for part, size in zip(parts, sizes, strict=True):
        assert abs(len(part) - length * size) <= 1


def test_partitions_are_shuffled_alike_everywhere():
    first, again, other = (phalanx.DataPartitioner(range(50), [0.5, 0.5], seed=seed) for seed in (1, 1, 2))
    assert list(first.use(0)) == list(again.use(0)) != list(other.use(0))
    assert len(first.use(1)) == 25
    assert first.use(1)[3] == list(first.use(1))[3]
    for sizes in ([0.7, 0.4], [-0.1, 0.5]):
        with pytest.raises(ValueError, match="fractions of at least 0 that add up to at most 1"):
            phalanx.DataPartitioner(range(50), sizes)
