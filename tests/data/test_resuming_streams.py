"""Streams go on in mid-epoch: each item once, and the batches that the whole epoch has there."""

from __future__ import annotations

import gc
import io
import itertools
import os
import tarfile
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import phalanx
from phalanx.data import shards
from tests.resuming import Stream, check_every_stop, loop

NUM_RUNS = 1000 if os.environ.get("PHALANX_TEST_LONG") else 50
NUM_RUNS_OF_WORKERS = 100 if os.environ.get("PHALANX_TEST_LONG") else 3
lengths, sizes = st.integers(0, 60), st.integers(1, 4)
runs = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5
)


class Orders(Stream):
    """Has another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())


class Skipping(Orders):
    """Can skip, as a stream of Hugging Face datasets can."""

    def skip(self, number):
        return list(super().__iter__())[number:]

    def __iter__(self):
        raise AssertionError("is asked to skip")


class OwnTurns(Stream):
    """Divides itself among workers, and shuffles in each of them."""

    def __iter__(self):
        worker = get_worker_info()
        own = torch.arange(worker.id, self._length, worker.num_workers) if worker else torch.arange(self._length)
        return iter(own[torch.randperm(len(own))].tolist())


def take(make_stream, state, world_size, num_workers, batch_size, num_batches=None):
    """Take batches on each rank; return the items of all ranks, and the ranks' states."""
    items, states = [], []
    for rank in range(world_size):
        shard = phalanx.shard_iterable(make_stream(), world_size, rank)
        loader = phalanx.DataLoader(shard, batch_size, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader, 1):
            items += batch.tolist()
            if number == num_batches:
                break
        states.append(loader.state_dict())
    return items, states


def check_exactly_once(make_stream, length, runs):
    """Take steps in each run and go on in the next one, then in a last one to the end of the epoch."""
    state, seen = None, []
    for world_size, num_workers, batch_size, num_batches in runs:
        if num_batches == 0:
            continue
        items, states = take(make_stream, state, world_size, num_workers, batch_size, num_batches)
        seen += items
        if any(one["epoch"] for one in states):
            break
        assert all(one == states[0] for one in states)
        state = states[0]
    else:
        seen += take(make_stream, state, 3, 0, 2)[0]
    assert sorted(seen) == list(range(length))


@settings(max_examples=NUM_RUNS)
@given(lengths, runs)
def test_each_item_comes_once_whatever_the_ranks_and_batches_of_each_run(length, runs):
    check_exactly_once(lambda: Stream(length), length, [(size, 0, *rest) for size, _, *rest in runs])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@settings(max_examples=NUM_RUNS_OF_WORKERS)
@given(lengths, runs)
def test_each_item_comes_once_whatever_the_workers_of_each_run(length, runs):
    check_exactly_once(lambda: Orders(length), length, [(min(size, 2), *rest) for size, *rest in runs[:2]])


@settings(max_examples=NUM_RUNS)
@given(lengths, sizes, st.integers(1, 4), st.integers(1, 5), st.integers(0, 5))
def test_the_batches_of_a_rank_do_not_depend_on_its_workers(length, world_size, num_workers, batch_size, num_batches):
    start = min(length, num_batches * batch_size * world_size)
    for rank in range(world_size):
        shard = phalanx.shard_iterable(Stream(length), world_size, rank).placed(start, batch_size, batch_size)
        alone = list(shard.placed(start, batch_size, batch_size))
        parts = []
        for worker in range(num_workers):
            with pytest.MonkeyPatch.context() as patch:
                info = types.SimpleNamespace(id=worker, num_workers=num_workers)
                patch.setattr(shards, "get_worker_info", lambda info=info: info)
                parts.append(list(shard.placed(start, batch_size, batch_size)))
        batches = [[part[at : at + batch_size] for at in range(0, len(part), batch_size)] for part in parts]
        in_turn = itertools.chain(*itertools.zip_longest(*batches, fillvalue=[]))
        assert list(itertools.chain(*in_turn)) == alone


KINDS = {
    "divided": lambda: phalanx.shard_iterable(Stream(7), 2, 1),
    "alone": lambda: Stream(7),
    "with epochs": lambda: phalanx.shard_iterable(Orders(7)),
    "alone, with epochs": lambda: Orders(7),
    "divides itself": lambda: OwnTurns(7),
}


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("kind", list(KINDS)[:-1])
def test_a_stream_goes_on_as_without_the_stop(kind, batch_size):
    check_every_stop(lambda state: loop(phalanx.DataLoader(KINDS[kind](), batch_size), state))


@pytest.mark.parametrize(
    ("kind", "num_workers", "persistent"),
    [("divided", 2, False), ("with epochs", 2, True), ("alone, with epochs", 1, True), ("divides itself", 2, False)],
)
def test_a_stream_of_workers_goes_on_as_without_the_stop(kind, num_workers, persistent):
    def run(state):
        options = {"num_workers": num_workers, "persistent_workers": persistent, "is_own_part": True}
        if kind == "alone, with epochs":
            del options["is_own_part"]
        return loop(phalanx.DataLoader(KINDS[kind](), 2, generator=torch.Generator().manual_seed(5), **options), state)

    check_every_stop(run)


def test_a_loader_goes_back_and_on_while_its_workers_live():
    loader = phalanx.DataLoader(KINDS["with epochs"](), 2, num_workers=1, persistent_workers=True)
    whole = [batch.tolist() for batch in loader]
    for _ in range(2):
        next(iter(loader))
    assert loader.state_dict() == {"kind": "items", "epoch": 2, "place": 2, "num_last": 2, "order": None}
    for place in (4, 2):
        for _ in range(2):
            loader.load_state_dict({"kind": "items", "epoch": 0, "place": place, "num_last": 2})
        assert loader.state_dict()["place"] == place
        assert [batch.tolist() for batch in loader] == whole[place // 2 :]
        assert [batch.tolist() for batch in loader] == whole
    assert loader.state_dict()["epoch"] == 2


def test_a_stream_that_can_skip_is_not_read_to_the_position():
    state = {"kind": "items", "epoch": 0, "place": 4, "num_last": 4}
    (whole := phalanx.DataLoader(Orders(9), 2)).load_state_dict(state)
    (skipped := phalanx.DataLoader(Skipping(9), 2)).load_state_dict(state)
    assert [batch.tolist() for batch in skipped] == [batch.tolist() for batch in whole]


class Drawing(Stream):
    def __iter__(self):
        return (torch.rand(()) for _ in range(self._length))


def test_what_a_stream_draws_on_the_way_to_the_position_changes_no_later_number():
    (loader := phalanx.DataLoader(Drawing(9))).load_state_dict({"kind": "items", "epoch": 0, "place": 4, "num_last": 1})
    state = torch.get_rng_state()
    batches = iter(loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(list(batches)) == 5


@pytest.mark.parametrize("is_own_part", [False, True])
def test_loading_a_state_tells_a_stream_its_epoch(is_own_part):
    def open_loader():
        return phalanx.DataLoader(Orders(7), 2, is_own_part=is_own_part)

    epochs = []
    for epoch in range(4):
        (loader := open_loader()).set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    (loader := open_loader()).set_epoch(2)
    batches = iter(loader)
    next(batches)
    (again := open_loader()).load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == epochs[2][1:]
    assert list(batches)
    (again := open_loader()).load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == epochs[3]


@pytest.mark.parametrize("is_own_part", [False, True])
def test_a_stream_that_was_told_one_epoch_for_all_keeps_it(is_own_part):
    (loader := phalanx.DataLoader(Orders(7), 2, is_own_part=is_own_part)).set_epoch(2)
    whole = [batch.tolist() for batch in loader]
    next(iter(loader))
    (again := phalanx.DataLoader(Orders(7), 2, is_own_part=is_own_part)).load_state_dict(loader.state_dict())
    for _ in range(2):
        next(iter(again))
    assert again.state_dict()["epoch"] == 4
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == whole[1:]


class Interrupted(Stream):
    """Is interrupted on the way to a position, once."""

    has_been = False

    def __iter__(self):
        for item in range(self._length):
            if item == 3 and not self.has_been:
                self.has_been = True
                raise KeyboardInterrupt
            yield item


@pytest.mark.parametrize("is_own_part", [False, True])
def test_a_loader_goes_on_at_its_position_when_the_way_there_was_interrupted(is_own_part):
    batches = iter(whole := phalanx.DataLoader(Stream(9), is_own_part=is_own_part))
    for _ in range(4):
        next(batches)
    state = whole.state_dict()
    (loader := phalanx.DataLoader(Interrupted(9), is_own_part=is_own_part)).load_state_dict(state)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert loader.state_dict()["place"] == 4
    assert [batch.item() for batch in loader] == [4, 5, 6, 7, 8]
    assert [batch.item() for batch in loader] == list(range(9))
    assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_ends_before_the_position_is_refused(num_workers):
    loader = phalanx.DataLoader(phalanx.shard_iterable(Stream(9)), 2, num_workers=num_workers)
    loader.load_state_dict({"kind": "items", "epoch": 0, "place": 10, "num_last": 2})
    assert list(loader) == []  # the last batch of an epoch may have been short
    loader.load_state_dict({"kind": "items", "epoch": 0, "place": 12, "num_last": 2})
    with pytest.raises(
        ValueError, match="rank 0: DataLoader: the stream ended after 9 items, before the position 12 at"
    ):
        list(loader)
    gc.collect()  # the workers of the iterator in the error's frames, which torch ties to the error


def test_a_stream_that_divides_itself_needs_the_same_workers():
    state = phalanx.DataLoader(OwnTurns(7), num_workers=2, is_own_part=True).state_dict()
    loader = phalanx.DataLoader(OwnTurns(7), is_own_part=True)
    with pytest.raises(
        ValueError,
        match=r"num_workers was 2 when the state was saved, and is 0 here: .*phalanx.shard_iterable resume on",
    ):
        loader.load_state_dict(state)
    divided = phalanx.DataLoader(KINDS["divided"]())
    with pytest.raises(
        ValueError, match=r"rank 1: .* saved by a loader that does not divide its data, and this is a loa"
    ):
        divided.load_state_dict(state)


def test_a_part_of_a_stream_has_a_length_if_the_stream_has_one():
    for length, world_size, rank in itertools.product((0, 1, 7, 8), (1, 2, 3), (0, 1)):
        if rank < world_size:
            shard = phalanx.shard_iterable(range(length), world_size, rank)
            loader = phalanx.DataLoader(shard, 2)
            assert (len(shard), len(loader)) == (len(list(shard)), len(list(loader)))
    shard = phalanx.shard_iterable(Stream(7))
    assert shard
    assert len(list(shard)) == 7
    with pytest.raises(TypeError, match="has no len"):
        len(phalanx.DataLoader(shard))


class Tars(IterableDataset):
    """Samples of tar files in order, each of an image and a label, as WebDataset reads them."""

    def __init__(self, paths):
        self._paths = paths

    def __iter__(self):
        for path in self._paths:
            with tarfile.open(path) as shard:
                for key, members in itertools.groupby(shard, lambda member: member.name.split(".")[0]):
                    yield int(key), *(shard.extractfile(member).read() for member in members)


def keys_of(samples):
    assert all(image == label * 100 for key, image, label in samples if label == str(key).encode())
    return torch.tensor([key for key, _, _ in samples])


def test_tar_shards_go_on_within_a_shard_on_other_ranks(tmp_path):
    keys = iter(range(23))
    for shard, num in enumerate([5, 0, 11, 7]):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for key in itertools.islice(keys, num):
                for suffix, content in (("image", str(key).encode() * 100), ("label", str(key).encode())):
                    member = tarfile.TarInfo(f"{key:04}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    seen, state = [], None
    for world_size, num_batches in ((2, 2), (3, 1), (1, 100)):
        states = []
        for rank in range(world_size):
            stream = phalanx.shard_iterable(Tars(sorted(tmp_path.glob("*.tar"))), world_size, rank)
            loader = phalanx.DataLoader(stream, 2, num_workers=int(rank == 0), collate_fn=keys_of)
            if state is not None:
                loader.load_state_dict(state)
            for batch in itertools.islice(loader, num_batches):
                seen += batch.tolist()
            states.append(loader.state_dict())
        state = states[0]
        assert states == [state] * world_size
    assert sorted(seen) == list(range(23))
    assert (state["epoch"], state["place"]) == (1, 0)
