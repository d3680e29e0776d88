"""A loader in a run that stops and goes on, anywhere and with any number of ranks: no sample is lost, none repeated."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import phalanx
from phalanx.train import loader_feed
from phalanx.train.loader_feed import LoaderFeed

NUM_RUNS = 3000 if os.environ.get("PHALANX_TEST_LONG") else 100
LENGTH = 23


def open_feeds(world_size, state):
    feeds = []
    for rank in range(world_size):
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
    monkeypatch.setattr(loader_feed, "rank_and_size", loader_feed.rank_and_size)  # given back at the end


@settings(max_examples=NUM_RUNS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 14)), min_size=1, max_size=5))
def test_a_loader_goes_on_exactly_whatever_the_steps_and_ranks_of_each_run(runs):
    seen, state, epoch = {}, None, 0
    for world_size, num_steps in runs:
        loader_feed.rank_and_size = lambda world_size=world_size: (0, world_size)
        feeds = open_feeds(world_size, state)
        epoch = train(feeds, epoch, num_steps, seen)
        states = [one.state_dict() for one in feeds]
        assert all(one == states[0] for one in states)
        state = states[0]
    for number in range(epoch):
        assert set(seen[number]) == set(range(LENGTH)), f"epoch {number}"
        assert len(seen[number]) <= LENGTH + 1, f"epoch {number}"  # one of padding, where ranks are two
    assert len(seen.get(epoch, [])) == len(set(seen.get(epoch, [])))
