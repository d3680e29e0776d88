"""Loaders of which ranks have different numbers of batches, or batches of different sizes: each sample counts once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import phalanx
from phalanx.train.report.metrics import read_metrics
from tests.train._programs import make_data, mean_squares, quietly, rank_of

LIMIT_S = 100
LENGTH, BATCH_SIZE, EPOCHS = 21, 5, 3


def make_linear():
    torch.manual_seed(5)
    return nn.Linear(6, 1)


def by_hand(steps):
    """Train on batches of inputs and targets, in one process."""
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in steps:
        optimizer.zero_grad()
        mean_squares(model(inputs), targets).backward()
        optimizer.step()
    return model.weight.detach()


def losses_by_hand(steps):
    """Return the mean loss over the samples of each epoch."""
    model, means = make_linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        total = 0.0
        for inputs, targets in steps:
            optimizer.zero_grad()
            loss = mean_squares(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        means.append(total / LENGTH)
    return means


def fit(folder, data, *, max_steps=None, max_epochs=EPOCHS, **options):
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, max_epochs=max_epochs, max_steps=max_steps, folder=folder, **options
    )
    _, printed = quietly(trainer.fit, data)
    return trainer, model.weight.detach().clone(), printed


def loader_in_order():
    return phalanx.DataLoader(make_data(LENGTH), BATCH_SIZE)


def global_steps(world_size):
    """Return the batches over all ranks that `loader_in_order` makes: they take turns at the samples."""
    inputs, targets = make_data(LENGTH).tensors
    size = BATCH_SIZE * world_size
    return [(inputs[at : at + size], targets[at : at + size]) for at in range(0, LENGTH, size)]


class Stream(IterableDataset):
    """Yields 3 samples more on each rank than on the one before."""

    def __iter__(self):
        inputs, targets = make_data(30).tensors
        yield from zip(inputs[: 4 + 3 * rank_of()], targets[: 4 + 3 * rank_of()], strict=True)


class Lying(list):
    def __len__(self):
        return super().__len__() + 2


def train_unevenly(rank, world_size, folder):
    trainer, weight, printed = fit(f"{folder}/whole", loader_in_order())
    results = {"loader": (trainer.step, weight, printed), "parts": [], "records": read_metrics(f"{folder}/whole")}
    for stop in range(1, trainer.step):
        fit(f"{folder}/parts-{stop}", loader_in_order(), max_steps=stop)
        resumed, weight, _ = fit(f"{folder}/parts-{stop}", loader_in_order())
        results["parts"].append((resumed.step, weight))
    inputs, targets = make_data(40).tensors
    own = [(inputs[rank * 8 + at :][:2], targets[rank * 8 + at :][:2]) for at in range(0, 2 + 4 * rank, 2)]
    trainer, weight, _ = fit(f"{folder}/lists", own, max_epochs=1)
    results["lists"] = trainer.step, weight
    fit(f"{folder}/lists-2", own, max_steps=1)
    results["lists again"] = fit(f"{folder}/lists-2", own, max_epochs=1)[1]
    results["stream"] = fit(f"{folder}/stream", DataLoader(Stream(), batch_size=3, num_workers=0), max_epochs=1)[0].step
    ragged = [(inputs[:2], targets[:2], torch.ones(7))] * (1 + rank)
    results["ragged"] = ragged_weight(f"{folder}/ragged", ragged)
    results["empty"] = refusal_of(f"{folder}/empty", own if rank == 0 else [])
    return results


def ragged_weight(folder, batches):
    """Train on batches of which the size can't be told."""
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = {"training_step": lambda model, batch: mean_squares(model(batch[0]), batch[1])}
    trainer = phalanx.Trainer(model, optimizer, max_epochs=1, folder=folder, **step)
    quietly(trainer.fit, batches)
    return trainer.step, model.weight.detach().clone()


def refusal_of(folder, batches):
    try:
        return fit(folder, batches, max_epochs=1)[0].step
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_of_uneven_loaders_counts_once_and_by_its_weight(run_ranks, tmp_path, world_size):
    every = run_ranks(train_unevenly, world_size, str(tmp_path), timeout_s=LIMIT_S)
    steps = global_steps(world_size)
    whole = by_hand(steps * EPOCHS)
    inputs, targets = make_data(40).tensors
    of_lists = [
        [(inputs[rank * 8 + at :][:2], targets[rank * 8 + at :][:2]) for rank in range(world_size) if at < 2 + 4 * rank]
        for at in range(0, 2 + 4 * (world_size - 1), 2)
    ]
    lists = by_hand([tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in of_lists])
    ragged = by_hand([(inputs[:2], targets[:2])] * world_size)
    for results in every:
        num_steps, weight, _ = results["loader"]
        assert num_steps == len(steps) * EPOCHS
        torch.testing.assert_close(weight, whole)
        for resumed, parts in results["parts"]:
            assert resumed == num_steps
            assert torch.equal(parts, weight)
        assert results["lists"][0] == len(of_lists)
        torch.testing.assert_close(results["lists"][1], lists)
        assert torch.equal(results["lists again"], results["lists"][1])
        assert results["stream"] == -(-(4 + 3 * (world_size - 1)) // 3)
        assert results["ragged"][0] == world_size
        torch.testing.assert_close(results["ragged"][1], ragged)
        if world_size > 1:
            assert results["empty"].startswith("Trainer: rank 1 has no batch in epoch 1, and other ranks have some")
    printed = every[0]["loader"][2]
    assert f"; {len(steps)} steps an epoch" in printed
    assert ("every sample counts alike" in printed) == (world_size == 2)
    epochs = [record for record in every[0]["records"] if record["kind"] == "epoch"]
    losses = losses_by_hand(steps)
    assert [record["loss"] for record in epochs] == pytest.approx(losses, rel=1e-5)


def lie(rank, world_size, folder):
    model = make_linear()
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squares, max_epochs=1, folder=folder
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Lying([make_data(4).tensors] * 3))
    return [str(warning.message) for warning in caught]


def test_a_loader_that_ends_before_its_length_is_told_of(run_ranks, tmp_path):
    [said] = run_ranks(lie, 1, str(tmp_path), timeout_s=LIMIT_S)
    assert any("has a length of 5 and gave 3 batches in epoch 1: correct its __len__" in line for line in said)
