"""What is left of an epoch is what the whole epoch has there: padding, batches and random numbers included."""

from __future__ import annotations

import gc
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import data as torch_data
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


@pytest.mark.parametrize(("batch_size", "persistent"), [(2, False), (2, True), (None, False)])
def test_workers_that_load_ahead_change_nothing(batch_size, persistent):
    options = {"num_workers": 2, "persistent_workers": persistent, "shuffle": True}
    check_every_stop(lambda state: loop(phalanx.DataLoader(torch.arange(7), batch_size, **options), state))


def test_without_batches_workers_get_the_order_of_the_epoch():
    of_workers = []
    for num_workers in (0, 1):
        loader = phalanx.DataLoader(torch.arange(8), None, shuffle=True, num_workers=num_workers)
        of_workers.append([item.item() for _ in range(2) for item in loader])
        assert loader.state_dict()["epoch"] == 2
    assert of_workers[0] == of_workers[1]
    assert of_workers[0][:8] != of_workers[0][8:]


@pytest.mark.parametrize("num_batches", [1, 4])
def test_persistent_workers_go_on_with_the_order_that_the_global_generator_would_have_drawn(num_batches):
    def open_loader():
        sampler = torch_data.WeightedRandomSampler([1.0] * 8, 8)
        return phalanx.DataLoader(range(8), 2, sampler=sampler, num_workers=1, persistent_workers=True)

    state = phalanx.RandomState()
    torch.manual_seed(3)
    loader = open_loader()
    for _ in loader:
        pass
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    saved = loader.state_dict(), state.state_dict()
    rest = [batch.tolist() for batch in (*batches, *loader)], torch.rand(3).tolist()
    again = open_loader()
    state.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    found = [batch.tolist() for _ in range(2 if num_batches < 4 else 1) for batch in again]
    assert (found, torch.rand(3).tolist()) == rest


class Unreadable(torch_data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            raise OSError("a bad sample")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_could_not_be_loaded_counts(num_workers):
    loader = phalanx.DataLoader(Unreadable(), 2, shuffle=False, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(OSError, match="a bad sample"):
        next(batches)
    gc.collect()  # torch's frames keep the error, and it its workers
    state = loader.state_dict()
    again = phalanx.DataLoader(Unreadable(), 2, shuffle=False)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches] == [[4, 5], [6, 7]]


def test_only_the_newest_iteration_counts():
    loader = phalanx.DataLoader(range(8), 2, shuffle=False)
    older = iter(loader)
    next(older)
    loader.set_epoch(0)
    newest = iter(loader)
    next(newest)
    assert len([*older]) == 3
    assert (loader.state_dict()["epoch"], loader.state_dict()["place"]) == (0, 2)


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


class Shuffled(torch.utils.data.Sampler):
    """A sampler with a state of its own: at the end of an epoch, one of which nothing is left, or the next one."""

    def __init__(self, length, ends_empty):
        self._length, self._ends_empty = length, ends_empty
        self.epoch = self.place = 0

    def __len__(self):
        return self._length

    def set_epoch(self, epoch):
        self.place = 0 if epoch != self.epoch else self.place
        self.epoch = epoch

    def __iter__(self):
        start, self.place = self.place, 0
        order = torch.randperm(self._length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for place in range(start, self._length):
            self.place = place + 1
            yield order[place]
        if not self._ends_empty:
            self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


class Unsized(Shuffled):
    __len__ = None


class Wrapping(Shuffled):
    """Is at the beginning of the next epoch when it yields its last sample."""

    def __iter__(self):
        for place in range(self.place, self._length):
            self.place = (place + 1) % self._length
            yield place


class Reversed(DistributedSampler):
    """Has another order than the class whose state it inherits."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


class ReversedWithState(Reversed):
    """Does as its state says."""

    place = 0

    def __iter__(self):
        start, self.place = self.place, 0
        for place, sample in enumerate(reversed(range(len(self.dataset)))):
            if place >= start:
                self.place = place + 1
                yield sample
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Buckets(torch_data.Sampler):
    """Reads ahead of what it yields."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter([sorted(self.sampler)])


class OwnBatches(torch_data.BatchSampler):
    """Chooses another order than torch's class."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def in_bulk(sampler):
    return {"batch_size": None, "sampler": torch_data.BatchSampler(sampler, 2, False)}


def seeded():
    return torch.Generator().manual_seed(7)


SAMPLERS = {
    "random": lambda: {"batch_size": 2, "sampler": torch_data.RandomSampler(range(7), generator=seeded())},
    "shuffled by torch": lambda: {"batch_size": 2, "shuffle": True, "generator": seeded()},
    "one by one": lambda: {"batch_size": None, "sampler": torch_data.SubsetRandomSampler(range(5), seeded())},
    "weighted": lambda: {"batch_size": 3, "sampler": torch_data.WeightedRandomSampler([1.0] * 7, 7, True, seeded())},
    "in batches": lambda: {
        "batch_sampler": torch_data.BatchSampler(torch_data.RandomSampler(range(7), generator=seeded()), 3, False)
    },
    "with replacement": lambda: {
        "batch_size": 2,
        "sampler": torch_data.RandomSampler(range(7), True, 64, generator=seeded()),
    },
    "listed": lambda: {"batch_sampler": [[3, 1], [0], [5, 6]]},
    "torch's distributed": lambda: {"batch_size": 2, "sampler": torch_data.DistributedSampler(range(7), 2, 1)},
    "ours, in batches": lambda: {
        "batch_sampler": torch_data.BatchSampler(DistributedSampler(range(7), 2, 1), 2, False)
    },
    "in bulk": lambda: in_bulk(torch_data.RandomSampler(range(7), generator=seeded())),
    "in bulk, torch's distributed": lambda: in_bulk(torch_data.DistributedSampler(range(7), 2, 1)),
    "in bulk, ours": lambda: in_bulk(DistributedSampler(range(7), 2, 1)),
    "in bulk, with a state": lambda: in_bulk(Shuffled(7, True)),
    "ours, with another order and state": lambda: {"batch_size": 2, "sampler": ReversedWithState(range(7), 1, 0)},
    "with a state, empty at the end": lambda: {"batch_size": 2, "sampler": Shuffled(7, True)},
    "with a state, at the start before the end": lambda: {"batch_size": 2, "sampler": Wrapping(7, True)},
    "with a state, of no length": lambda: {"batch_size": 2, "sampler": Unsized(7, True)},
    "with a state, new at the end": lambda: {"batch_size": 2, "sampler": Shuffled(7, False)},
}


def open_sampled(kind, num_workers=0, **options):
    return phalanx.DataLoader(torch.arange(7), **SAMPLERS[kind](), num_workers=num_workers, is_own_part=True, **options)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_loader_with_another_sampler_goes_on_as_without_the_stop(kind):
    check_every_stop(lambda state: loop(open_sampled(kind), state))


@pytest.mark.parametrize("kind", ["random", "with a state, empty at the end"])
def test_another_sampler_is_not_where_the_workers_are(kind):
    options = {"num_workers": 1, "persistent_workers": True}
    check_every_stop(lambda state: loop(open_sampled(kind, **options), state))


def test_a_sampler_with_a_state_is_not_asked_for_more_than_was_yielded():
    loader = open_sampled("with a state, at the start before the end")
    seen = []
    for _ in range(4):
        for batch in loader:
            seen += batch.tolist()
            break
    assert seen == list(range(7))


@pytest.mark.parametrize("kind", ["random", "shuffled by torch", "in batches", "with replacement"])
def test_every_epoch_after_a_stop_has_the_order_that_it_would_have_had(kind):
    def draw(loader, num_epochs):
        return [[batch.tolist() for batch in loader] for _ in range(num_epochs)]

    whole = draw(open_sampled(kind), 4)
    for num_batches in range(len(whole[0]) + 1):
        batches = iter(loader := open_sampled(kind))
        for _ in range(num_batches):
            next(batches)
        state = loader.state_dict()
        assert state["epoch"] == (num_batches == len(whole[0]))
        (again := open_sampled(kind)).load_state_dict(state)
        left = [whole[0][num_batches:], *whole[1:]][state["epoch"] :]
        assert draw(again, len(left)) == left, f"stopped after batch {num_batches}"
        assert list(batches) == [] or not state["epoch"]
        assert draw(loader, 3) == whole[1:]


def test_the_generators_of_a_state_are_a_copy():
    (loader := open_sampled("random")).load_state_dict(open_sampled("random").state_dict() | {"place": 1})
    state = loader.state_dict()
    state["generators"].zero_()
    assert loader.state_dict()["generators"].any()


class Global(Shuffled):
    """Draws from torch's default generator."""

    def __iter__(self):
        torch.rand(())
        return super().__iter__()


def test_loading_the_state_of_a_sampler_draws_no_random_numbers():
    (sampler := Global(7, True)).set_epoch(1)
    loader, random = phalanx.DataLoader(range(7), sampler=sampler), torch.get_rng_state()
    loader.load_state_dict(loader.state_dict())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_order_of_the_default_generator_comes_again_and_draws_nothing(num_workers):
    def open_loader():
        return phalanx.DataLoader(range(9), 2, True, num_workers=num_workers, is_own_part=True)

    batches = iter(loader := open_loader())
    next(batches)
    state, random = loader.state_dict(), phalanx.RandomState().state_dict()
    rest, drawn = [batch.tolist() for batch in batches], torch.rand(3)
    phalanx.RandomState().load_state_dict(random)
    (again := open_loader()).load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert torch.equal(torch.rand(3), drawn)


class Own(torch_data.RandomSampler):
    """Might draw from anywhere."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Own", {"sampler": Own(range(4))}),
        ("Buckets", {"batch_sampler": Buckets(DistributedSampler(range(4), 1, 0))}),
        ("OwnBatches", {"batch_sampler": OwnBatches(DistributedSampler(range(4), 1, 0), 2, False)}),
        ("Reversed", {"sampler": Reversed(range(4), 1, 0)}),
        ("Own", in_bulk(Own(range(4)))),
    ],
)
def test_a_position_is_refused_where_nobody_knows_the_order(name, options):
    check_unknown(phalanx.DataLoader(range(4), **options), f"nobody knows the order of {name}:")


def test_a_position_is_refused_where_batches_come_in_any_order():
    check_unknown(phalanx.DataLoader(range(4), num_workers=2, in_order=False), "with in_order=False")


def check_unknown(loader, why):
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(TypeError, match=f"rank 0: this DataLoader can't be resumed: {why}.*pass sampler="):
            call()


@pytest.mark.parametrize("kind", ["samples", "items", "sampler", "batches"])
def test_an_epoch_may_be_any_integer_of_at_least_0(kind):
    (loader := OPENED[kind]()).set_epoch(np.int64(1))
    loader.load_state_dict(loader.state_dict())
    assert type(loader.state_dict()["epoch"]) is int
    for epoch, error in ((-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=r"at least 0, got -1: count epochs|as an integer"):
            loader.set_epoch(epoch)
    assert loader.state_dict()["epoch"] == 1


class AsAsked(torch_data.Dataset):
    def __getitem__(self, asked):
        return asked


def test_batches_of_batches_of_our_sampler_go_on_as_without_the_stop():
    def run(state):
        batches = torch_data.BatchSampler(DistributedSampler(range(11), 1, 0), 2, False)
        return loop(phalanx.DataLoader(AsAsked(), **in_bulk(batches)), state)

    check_every_stop(run)


def test_set_epoch_reaches_every_sampler():
    ours, torchs = DistributedSampler(range(4), 1, 0), torch_data.DistributedSampler(range(4), 1, 0)
    for options in (in_bulk(ours), {"batch_sampler": Buckets(torchs)}):
        phalanx.DataLoader(range(4), **options).set_epoch(3)
    assert ours.epoch == torchs.epoch == 3


def test_torchs_sampler_needs_its_own_number_of_ranks():
    def open_loader(num_replicas):
        return phalanx.DataLoader(
            range(7), sampler=torch_data.DistributedSampler(range(7), num_replicas, 0), batch_size=3
        )

    state = open_loader(3).state_dict()
    with pytest.raises(
        ValueError, match="the number of ranks was 3 when the state was saved, and is 4 here: make the same loader"
    ):
        open_loader(4).load_state_dict(state)


OF_SAMPLES = {"epoch": 0, "place": 2, "seed": 0, "shuffle": False, "length": 7}
REFUSED = {
    "another kind": (OF_SAMPLES, "saved by a loader with a phalanx.DistributedSampler, and this is a loader that does"),
    "torchdata's": ({"_snapshot": {}}, "saved by another loader, and this is a loader that does not divide its data"),
    "negative": ({"place": -1}, "place must be an integer of at least 0, got -1"),
    "not a number": ({"place": 1.5}, "place must be an integer of at least 0, got 1.5"),
    "other ranks": (
        {"world_size": 3},
        "the number of ranks was 3 when the state was saved, and is 1 here: make the same loader",
    ),
    "other batches": ({"batch_size": 5}, "batch_size was 5 when the state was saved, and is 2 here"),
    "after the end": ({"place": 5}, "the place 5 lies behind all 4 batches of an epoch: pass the state of this data"),
    "another length": ({"length": 5}, "the number of batches was 5 when the state was saved, and is 4 here"),
}


OPENED = {
    "samples": lambda: phalanx.DataLoader(torch.arange(7), 2, shuffle=True),
    "items": lambda: phalanx.DataLoader(Stream(7), 2),
    "sampler": lambda: open_sampled("with a state, of no length"),
    "batches": lambda: open_sampled("random"),
    "batches of a stream": lambda: phalanx.DataLoader(Stream(7), 2, is_own_part=True),
}
DAMAGED = {
    "samples": {"place": 8, "length": "7", "seed": 5, "shuffle": None},
    "items": {"num_last": None, "order": "1"},
    "sampler": {},
    "batches": {
        "place": 5, "order": [], "generators": torch.zeros(3, 4), "world_size": None, "length": 4.0, "num_workers": "0",
        "batch_size": -1,
    },
    "batches of a stream": {"order": 1.5, "generators": None},
}  # fmt: skip


@pytest.mark.parametrize("kind", OPENED)
def test_a_damaged_state_is_refused_before_anything_has_changed(kind):
    batches = iter(loader := OPENED[kind]())
    next(batches)
    state = loader.state_dict()
    lacking = [{name: state[name] for name in state if name != other} for other in state]
    if kind == "items":
        lacking = [one for one in lacking if "order" in one]  # a stream that was told no epoch needs none
    wrong = [state | {name: value} for name, value in DAMAGED[kind].items()]
    wrong += [state | {name: value} for name in ("epoch", "place", "kind") for value in (None, "1", [0])]
    if "generators" in state:
        wrong += [state | {"generators": torch.full_like(state["generators"], 255)}]
    for one in [*lacking, *wrong, None, [], "state", 0]:
        (again := OPENED[kind]()).load_state_dict(state)
        with pytest.raises(
            ValueError, match=r"rank 0: DataLoader.load_state_dict: .*: .*|but the state was saved with"
        ):
            again.load_state_dict(one)
        assert list(map(str, again)) == list(map(str, iter_rest(kind, state))), one


def iter_rest(kind, state):
    (loader := OPENED[kind]()).load_state_dict(state)
    return loader


@pytest.mark.parametrize("name", REFUSED)
def test_a_position_of_something_else_is_refused(name):
    changes, words = REFUSED[name]
    loader = open_sampled("random")
    state = changes if "epoch" in changes or "_snapshot" in changes else loader.state_dict() | changes
    with pytest.raises(ValueError, match=f"rank 0: DataLoader.load_state_dict: .*{words}"):
        loader.load_state_dict(state)
    assert loader.state_dict()["place"] == 0


def test_a_position_passes_through_the_formats_of_checkpoints(tmp_path):
    for number, kind in enumerate(["random", "with a state, new at the end", "ours, in batches"]):
        batches = iter(loader := open_sampled(kind))
        next(batches)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in batches]
        torch.save(state, tmp_path / "state.pt")
        checkpoint = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about a checkpoint of one process
            dcp.save({"loader": state}, checkpoint_id=checkpoint, no_dist=True)
            by_dcp = {"loader": open_sampled(kind)}
            dcp.load(by_dcp, checkpoint_id=checkpoint, no_dist=True)
        assert [batch.tolist() for batch in by_dcp["loader"]] == rest
        for one in (pickle.loads(pickle.dumps(state)), torch.load(tmp_path / "state.pt")):
            (again := open_sampled(kind)).load_state_dict(one)
            again.load_state_dict(one)
            assert [batch.tolist() for batch in again] == rest


def test_a_loader_of_a_cache_goes_on_as_without_the_stop():
    cache = phalanx.share(TensorDataset(torch.arange(7)), cache=True)
    check_every_stop(lambda state: loop(phalanx.DataLoader(cache, 2, shuffle=True, collate_fn=flat), state))


def flat(samples):
    return torch.cat([sample.reshape(1) for (sample,) in samples])
