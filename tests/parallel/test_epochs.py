"""Only a loop that never calls set_epoch of torch's DistributedSampler gets a warning."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phalanx

pytestmark = pytest.mark.kept_ranks

NUM_EPOCHS = 3
DATA = TensorDataset(torch.arange(24.0).view(12, 2))


def loader_of(**options):
    return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, **options))


def step(model, batch):
    model(batch[0]).sum().backward()


def train(model, loader, sets_epoch=False):
    """Train for some epochs; in the middle and at the end of each, evaluate on data that is shuffled once for all."""
    held_back = loader_of()
    for epoch in range(NUM_EPOCHS):
        model.train()
        if sets_epoch:
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            step(model, batch)
            if number == 1:
                evaluate(model, held_back, torch.no_grad())
        evaluate(model.eval(), held_back, contextlib.nullcontext())


def evaluate(model, loader, context):
    with context:
        for (batch,) in loader:
            model.module(batch)


def train_once(model):
    loader = loader_of()
    next(iter(loader))  # to see its shape
    model.train()
    for batch in loader:
        step(model, batch)


def begin_one_epoch_again(model):
    loader = loader_of()
    for _ in range(2):
        loader.sampler.set_epoch(0)
        for batch in loader:
            step(model, batch)


def train_in_every_way(rank, world_size):
    """Return what is said of the loops that are right, and of those that are wrong."""
    model = phalanx.DistributedDataParallel(nn.Linear(2, 1))
    said = []
    with warnings.catch_warnings(record=True) as of_right:
        warnings.simplefilter("always")
        train(model, loader_of(), sets_epoch=True)
        train(model, loader_of(shuffle=False))
        train(model, DataLoader(DATA, batch_size=2, shuffle=True))
        train(model, phalanx.DataLoader(DATA, batch_size=2, shuffle=True, num_workers=0))
        train_once(model)
        begin_one_epoch_again(model)
    with warnings.catch_warnings(record=True) as of_wrong:
        warnings.simplefilter("always")
        train(model, loader_of())
        train(model, loader_of())
    for caught in (of_right, of_wrong):
        said.append([(str(warning.message), warning.filename == __file__) for warning in caught])
    return said


def test_a_forgotten_set_epoch_is_said_once_by_rank_0_and_nothing_else_is(run_ranks):
    (right, wrong), *others = run_ranks(train_in_every_way, 2)
    assert right == []
    assert others == [[[], []]]
    ((message, points_at_the_loop),) = wrong
    assert message.startswith("rank 0: DistributedSampler: every epoch has the same order")
    assert message.endswith("sampler.set_epoch(epoch)")
    assert points_at_the_loop
