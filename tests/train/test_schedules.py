"""A schedule given as a function of the run's length, and early stopping with `min_delta`."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR

import phalanx
from phalanx.testing import run_ranks
from phalanx.train.evaluate.best_metric import BestMetric
from phalanx.train.settings import Settings
from tests.train._programs import make_data, make_model, mean_squares, quietly

LENGTHS: list[int] = []  # for which `falling` was called


class Rates:
    """A callback that writes down the learning rate after each step."""

    def __init__(self):
        self.found = []

    def on_step(self, trainer):
        self.found.append(trainer.optimizer.param_groups[0]["lr"])


def fit(folder, scheduler, data=None, validation=None, **settings):
    """Return the trainer, the learning rates, and the lengths for which the function was called."""
    model, rates = make_model(), Rates()
    LENGTHS.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"global_batch_size": 8, "snapshot_every": 0, **settings}
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, scheduler=scheduler, callbacks=[rates], folder=folder, **settings
    )
    quietly(trainer.fit, make_data(32) if data is None else data, validation)
    return trainer, rates.found, [*LENGTHS]


def falling(optimizer, num_steps):
    LENGTHS.append(num_steps)
    return LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)


def one_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, 0.1, total_steps=num_steps)


def raised(kind, *args, **options):
    with pytest.raises(kind) as caught:
        fit(*args, **options)
    return str(caught.value)


def try_schedules(rank, world_size, folder):
    """Return what the function was called with and made, for whole and for resumed runs."""
    results = {}
    _, results["whole"], results["whole lengths"] = fit(f"{folder}/whole", falling, max_epochs=4)
    _, results["short"], _ = fit(f"{folder}/longer", falling, max_epochs=2)
    _, results["longer"], results["longer lengths"] = fit(f"{folder}/longer", falling, max_epochs=4)
    trainer, _, _ = fit(f"{folder}/cycle", one_cycle, max_epochs=1)
    trainer.settings.max_epochs = 2
    quietly(trainer.fit, make_data(32))
    results["cycle"] = trainer.step, trainer.scheduler.total_steps, trainer.scheduler.last_epoch
    _, results["steps"], results["steps lengths"] = fit(f"{folder}/steps", falling, max_epochs=4, max_steps=6)
    interval = {"scheduler_interval": "epoch", "max_epochs": 3}
    _, results["epochs"], results["epochs lengths"] = fit(f"{folder}/epochs", falling, **interval)
    batches = [make_data(8).tensors] * 2
    stream = (batch for batch in batches)
    results["unknown"] = raised(ValueError, f"{folder}/unknown", falling, data=stream, max_epochs=1)
    results["nothing"] = raised(TypeError, f"{folder}/nothing", lambda optimizer, num_steps: None, max_epochs=1)
    plateau = lambda optimizer, num_steps: ReduceLROnPlateau(optimizer)  # noqa: E731
    other = lambda optimizer, num_steps: LinearLR(optimizer, 0.5, 0.0, total_iters=num_steps)  # noqa: E731
    results["other"] = raised(phalanx.CheckpointError, f"{folder}/whole", other, max_epochs=4)
    results["plateau"] = raised(ValueError, f"{folder}/plateau", plateau, max_epochs=1)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    [found] = run_ranks(try_schedules, 1, str(tmp_path_factory.mktemp("schedules")))
    return found


def test_the_function_gets_the_number_of_steps(results):
    assert results["whole lengths"] == [16]
    assert results["whole"] == pytest.approx([0.5 * (1 - step / 16) for step in range(1, 17)], abs=1e-9)
    assert results["steps lengths"] == [6]
    assert results["steps"][-1] == pytest.approx(0, abs=1e-9)


def test_the_function_gets_the_number_of_epochs_if_it_steps_in_epochs(results):
    assert results["epochs lengths"] == [3]
    assert results["epochs"] == pytest.approx([0.5] * 4 + [1 / 3] * 4 + [1 / 6] * 4)


def test_a_run_that_has_become_longer_goes_on_in_the_longer_schedule(results):
    assert results["short"][-1] == pytest.approx(0, abs=1e-9)
    assert results["longer lengths"][-1] == 16
    assert results["longer"] == pytest.approx(results["whole"][8:], abs=1e-9)
    assert results["cycle"] == (8, 8, 8)


def test_what_can_not_be_made_is_refused_in_words(results):
    assert "the data has no length. Set max_steps" in results["unknown"]
    assert "what the function scheduler(optimizer, num_steps) returns must be a schedule, got" in results["nothing"]
    assert "holds another run" in results["other"]
    assert "scheduler falling -> " in results["other"]
    assert "ReduceLROnPlateau needs no number of steps" in results["plateau"]


def test_a_schedule_of_another_kind_is_still_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"scheduler is the class .*StepLR itself"):
        phalanx.Trainer(model, optimizer, mean_squares, scheduler=StepLR, max_epochs=1)
    with pytest.raises(TypeError, match=re.escape("right: scheduler=lambda optimizer, num_steps")):
        phalanx.Trainer(model, optimizer, mean_squares, scheduler="cosine", max_epochs=1)


def judged(values, min_delta, name="accuracy", mode="max"):
    best = BestMetric(name, mode, min_delta)
    return [(best.update({name: value}, step), best.num_worse) for step, value in enumerate(values)]


def test_a_small_improvement_is_best_and_does_not_count():
    assert judged([0.5, 0.55, 0.59, 0.65], 0.1) == [(True, 0), (True, 1), (True, 2), (True, 0)]
    assert judged([0.5, 0.45, 0.3], 0.1, "loss", "min") == [(True, 0), (True, 1), (True, 0)]
    assert judged([0.5, 0.5, 0.6], 0.0) == [(True, 0), (False, 1), (True, 0)]


def test_the_count_goes_on_after_a_resumption():
    best, again = BestMetric("accuracy", "max", 0.1), BestMetric("accuracy", "max", 0.1)
    best.update({"accuracy": 0.5}, 1)
    best.update({"accuracy": 0.58}, 2)
    again.load_state_dict(best.state_dict())
    again.update({"accuracy": 0.62}, 3)
    assert again.num_worse == 0


@pytest.mark.parametrize(
    ("min_delta", "kind", "message"),
    [
        (-0.1, ValueError, "min_delta must be at least 0"),
        (float("nan"), ValueError, "min_delta must be at least 0"),
        ("0.1", TypeError, "min_delta must be a number"),
    ],
)
def test_a_min_delta_that_means_nothing_is_refused(min_delta, kind, message):
    with pytest.raises(kind, match=message):
        Settings(max_epochs=1, patience=1, min_delta=min_delta)


def test_a_min_delta_without_patience_is_refused():
    with pytest.raises(ValueError, match="patience=3"):
        Settings(max_epochs=1, min_delta=0.1)
