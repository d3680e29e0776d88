"""A run that stops and goes on, anywhere: the steps of the whole run, or with other ranks each sample once."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import data as torch_data
from torch.utils.data import TensorDataset

import phalanx
from phalanx.data import batches
from phalanx.data.batches import GivenBatches, GlobalBatches
from phalanx.train.feed import loader_feed
from phalanx.train.feed.dataset_feed import DatasetFeed
from phalanx.train.feed.feed import filler
from phalanx.train.feed.loader_feed import LoaderFeed
from phalanx.train.resume.preflight import preflight
from tests import resuming
from tests.resuming import Stream, check_every_stop

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
NUM_RUNS = 3000 if os.environ.get("PHALANX_TEST_LONG") else 100
NUM_WHOLE_RUNS, LONGEST = (300, 200) if NUM_RUNS > 100 else (10, 40)
LENGTH = 23


def open_feeds(world_size, state, *, is_stream=False):
    feeds = []
    for rank in range(world_size):
        if is_stream:
            loader = phalanx.DataLoader(phalanx.shard_iterable(Stream(LENGTH + LENGTH % 2), world_size, rank), 2)
        else:
            sampler = phalanx.DistributedSampler(range(LENGTH), world_size, rank)
            loader = phalanx.DataLoader(torch.arange(LENGTH), 2, sampler=sampler, num_workers=0)
        feeds.append(LoaderFeed(loader, 0))
        if state is not None:
            feeds[-1].load_state_dict(state)
    return feeds


def train(feeds, epoch, num_steps, seen):
    """Take steps as a trainer does, noting the samples of each epoch; return the epoch that it is in afterwards."""
    while num_steps:
        for one in feeds:
            one.begin_epoch(epoch)
        has_ended = True
        for of_ranks in zip(*(one.steps() for one in feeds), strict=True):
            for [(batch, _)], _ in of_ranks:
                seen.setdefault(epoch, []).extend(batch.tolist())
            for one in feeds:
                one.advance()
            num_steps -= 1
            if not num_steps:
                has_ended = feeds[0].is_at_end
                break
        if has_ended:
            epoch += 1
            for one in feeds:
                one.begin_epoch(epoch)
    return epoch


@pytest.fixture(autouse=True)
def ranks_of_one_process(monkeypatch):
    for module in (loader_feed, batches):
        monkeypatch.setattr(module, "rank_and_size", module.rank_and_size)  # given back at the end


@settings(max_examples=NUM_RUNS, suppress_health_check=CHECKS)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 14)), min_size=1, max_size=5), st.booleans())
def test_a_loader_goes_on_exactly_whatever_the_steps_and_ranks_of_each_run(runs, is_stream):
    seen, state, epoch = {}, None, 0
    for world_size, num_steps in runs:
        loader_feed.rank_and_size = lambda world_size=world_size: (0, world_size)
        feeds = open_feeds(world_size, state, is_stream=is_stream)
        epoch = train(feeds, epoch, num_steps, seen)
        states = [one.state_dict() for one in feeds]
        assert all(one == states[0] for one in states)
        state = states[0]
    for number in range(epoch):
        assert set(seen[number]) == set(range(LENGTH + (LENGTH % 2 if is_stream else 0))), f"epoch {number}"
        assert len(seen[number]) <= LENGTH + 1, f"epoch {number}"  # one of padding, where ranks are two
    assert len(seen.get(epoch, [])) == len(set(seen.get(epoch, [])))


def open_global(length, rank, world_size, batch_size, drop_last):
    sizes = {"seed": 3, "micro_batch_size": 2}
    if length < world_size:
        return None
    dividing = GlobalBatches(length, max(batch_size, world_size), drop_last=drop_last, **sizes)
    return DatasetFeed(torch.arange(length), dividing, 0, 3)


def open_given(length, rank, world_size, batch_size, drop_last):
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(range(length)), batch_size, drop_last)
    return DatasetFeed(torch.arange(length), GivenBatches(length, sampler, seed=3), 0, 3)


def open_loader(length, rank, world_size, batch_size, drop_last):
    sampler = phalanx.DistributedSampler(range(length), world_size, rank, drop_last=drop_last)
    loader = phalanx.DataLoader(torch.arange(length), batch_size, sampler=sampler, drop_last=drop_last)
    return LoaderFeed(loader, 3)


def open_torch_loader(length, rank, world_size, batch_size, drop_last):
    sampler = torch_data.DistributedSampler(range(length), world_size, rank, drop_last=drop_last)
    loader = torch_data.DataLoader(torch.arange(length), batch_size, sampler=sampler, drop_last=drop_last)
    return LoaderFeed(loader, 3)


def open_shards(length, rank, world_size, batch_size, drop_last):
    shards = phalanx.shard_iterable(Stream(length), world_size, rank)
    return LoaderFeed(phalanx.DataLoader(shards, batch_size, drop_last=drop_last), 3)


@pytest.mark.parametrize("open_one", [open_global, open_given, open_loader, open_torch_loader, open_shards])
@settings(
    max_examples=NUM_WHOLE_RUNS, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, LONGEST), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_every_stop_goes_on_with_the_steps_of_the_whole_run(open_one, length, world_size, batch_size, drop_last):
    for rank in range(world_size):
        loader_feed.rank_and_size = batches.rank_and_size = lambda rank=rank: (rank, world_size)
        if (feed := open_one(length, rank, world_size, batch_size, drop_last)) is not None:
            check_every_stop(
                lambda state, rank=rank, first=feed: resuming.train(
                    first if state is None else open_one(length, rank, world_size, batch_size, drop_last), state
                )
            )


@pytest.mark.parametrize(("interval", "total"), [("step", 6 + 2 * 12), ("epoch", 3)])
def test_the_steps_of_a_run_are_counted_from_where_it_stands(interval, total):
    # A run of 2 ranks, with 6 steps an epoch, goes on as one of 1 rank, with 12: a schedule is stepped for the rest.
    loader_feed.rank_and_size = lambda: (0, 2)
    state = None
    for epoch in range(2):
        feed = open_feeds(2, state)[0]
        feed.begin_epoch(epoch)
        for number, _ in enumerate(feed.steps(), 1):
            feed.advance()
            if epoch and number == 3:
                break
        state = feed.state_dict()
    loader_feed.rank_and_size = lambda: (0, 1)
    [feed] = open_feeds(1, state)
    assert (feed.num_steps, feed.num_left) == (12, 6)
    settings_of_run = phalanx.train.Settings(max_epochs=4, scheduler_interval=interval)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total)
    num_steps, warning = preflight(schedule, settings_of_run, feed, 9, 1)
    assert (num_steps, warning) == (9 + 6 + 2 * 12, "")
    with pytest.raises(ValueError, match=f"this run steps it {total} times"):
        too_short = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total - 1)
        preflight(too_short, settings_of_run, feed, 9, 1)


class Stop(Exception):
    """Ends a run right behind a checkpoint."""


class StopAt:
    def __init__(self, step):
        self._step = step

    def on_save(self, trainer):
        if trainer.step == self._step:
            phalanx.checkpoint.wait()
            raise Stop


def fit(folder, data, stop=None, **options):
    phalanx.seed_everything(0)
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(
        model, optimizer, nn.functional.mse_loss, max_epochs=2, save_every=1, folder=str(folder),
        callbacks=[StopAt(stop)], **options,
    )  # fmt: skip
    try:
        trainer.fit(data())
    except Stop:
        return None
    return trainer.step, [parameter.detach() for parameter in model.parameters()]


INPUTS = torch.randn(11, 5, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


class Samples(torch_data.IterableDataset):
    def __iter__(self):
        return iter(DATA)


KINDS = {
    "dataset": (lambda: DATA, {"global_batch_size": 4, "num_workers": 0}),
    "phalanx.DataLoader": (lambda: phalanx.DataLoader(DATA, 4, shuffle=True), {}),
    "a stream": (lambda: phalanx.DataLoader(phalanx.shard_iterable(Samples()), 4), {}),
    "torch's sampler": (lambda: phalanx.DataLoader(DATA, 4, True, is_own_part=True), {}),
    "torch's DataLoader": (lambda: torch_data.DataLoader(DATA, 4, shuffle=True), {}),
}


def fit_with_stops(rank, world_size, folder, kind):
    data, options = KINDS[kind]
    num_steps, whole = fit(folder / "whole", data, **options)
    differ = []
    for stop in range(1, num_steps):
        assert fit(folder / str(stop), data, stop, **options) is None
        num_resumed, resumed = fit(folder / str(stop), data, **options)
        if num_resumed != num_steps or not all(map(torch.equal, resumed, whole)):
            differ.append(stop)
    return num_steps, differ


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_was_stopped_behind_any_step_ends_with_the_same_weights(tmp_path, run_ranks, kind):
    # One stop is behind the last step of an epoch, which has not ended yet.
    assert run_ranks(fit_with_stops, 1, tmp_path, kind) == [(6, [])]


class Pids(torch_data.Dataset):
    """Each sample is the process that loads it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("keys", [[0, 0], 0], ids=["a batch", "a sample that is one"])
def test_a_filler_is_loaded_by_another_process_where_processes_load_the_samples(keys):
    for num_workers in (0, 3):
        pids = set(torch.as_tensor(filler(Pids(), keys, num_workers)).flatten().tolist())
        assert len(pids) == 1
        assert (os.getpid() in pids) == (num_workers == 0)
