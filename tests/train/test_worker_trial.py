"""`num_workers="auto"`: as many loading processes as the first batches call for, and the samples of any number."""

from __future__ import annotations

import multiprocessing
import os
import random
import time

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx._rank_group import RankGroup
from phalanx.train.settings import Settings
from phalanx.train.worker_trial import WorkerTrial
from tests.train._programs import mean_squares, quietly


class Augmented(Dataset):
    """Every fifth sample draws random numbers, of all three kinds; each takes as long to load."""

    def __init__(self, seconds=0.0):
        self._seconds = seconds

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(self._seconds)
        noise = [0.0, 0.0, 0.0]
        if index % 5 == 0:
            noise = [random.random(), float(torch.rand(())), float(numpy.random.rand())]
        return torch.tensor([float(index), *noise]), torch.tensor([float(index)])


class Seen:
    """A model that notes what it is given."""

    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.inputs = []
        self.model.register_forward_pre_hook(lambda _, inputs: self.inputs.append(inputs[0].clone()))


def fit(folder, num_workers, seconds=0.0):
    phalanx.seed_everything(0)
    seen = Seen()
    optimizer = torch.optim.SGD(seen.model.parameters(), lr=1e-6)
    trainer = phalanx.Trainer(
        seen.model, optimizer, mean_squares, max_epochs=2, global_batch_size=8, folder=folder, num_workers=num_workers,
        snapshot_every=0,
    )  # fmt: skip
    quietly(trainer.fit, Augmented(seconds))
    return torch.cat(seen.inputs), trainer._feed.num_workers


def load_in_each_way(rank, world_size, folder):
    multiprocessing.set_start_method("fork", force=True)
    loaded = {number: fit(f"{folder}/{number}", number)[0] for number in ("auto", 1, 2)}
    slowly, num_workers = fit(f"{folder}/slowly", "auto", 0.005)
    return torch.equal(loaded["auto"], loaded[1]) and torch.equal(loaded[1], loaded[2]), (
        torch.equal(slowly, loaded[1]),
        num_workers,
    )


def test_the_samples_are_the_same_with_any_number_and_slow_ones_get_workers(run_ranks, tmp_path):
    results = run_ranks(load_in_each_way, 2, str(tmp_path), timeout_s=120)
    numbers = [num_workers for _, (_, num_workers) in results]
    assert [are_alike for are_alike, _ in results] == [True, True]
    assert [is_alike for _, (is_alike, _) in results] == [True, True]
    assert numbers[0] == numbers[1] > 1


def load_here(rank, world_size, folder):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = nn.Linear(4, 1)
    after_model = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, max_epochs=1, num_workers="auto", folder=folder, snapshot_every=0
    )
    quietly(trainer.fit, Augmented())
    return torch.equal(torch.get_rng_state(), after_model), torch.equal(before, after_model)


def test_loading_without_workers_leaves_the_ranks_own_random_numbers_alone(run_ranks, tmp_path):
    assert run_ranks(load_here, 1, str(tmp_path), timeout_s=60) == [(True, False)]


def trial(load_s, computing, step_s):
    """Return the number of workers after steps that took so long, of which loading so much."""
    found = WorkerTrial(RankGroup())
    found._loads = [(load_s, load_s * computing)] * 7
    found._ends_s = [number * (load_s + step_s) for number in range(7)]
    assert found.is_over
    return found.num_workers()


@pytest.mark.parametrize(
    ("load_s", "step_s", "want"), [(0.001, 0.1, 0), (0.01, 0.1, 1), (0.1, 0.1, 2), (0.39, 0.1, 5), (9, 0.1, 16)]
)
def test_loading_that_waits_gets_as_many_workers_as_keep_up_with_the_steps(load_s, step_s, want):
    assert trial(load_s, 0.1, step_s) == want


def test_loading_that_computes_gets_no_more_workers_than_there_are_free_processors(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert trial(0.4, 0.9, 0.1) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert trial(0.4, 0.9, 0.1) == 2


def test_no_other_word_than_auto_is_a_number_of_workers():
    with pytest.raises(TypeError, match="num_workers must be a whole number, or \"auto\", got 'many'"):
        Settings(max_steps=1, num_workers="many")
