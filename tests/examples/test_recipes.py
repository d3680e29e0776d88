"""The recipes of the guide to training well do what it says: all of them in one job of two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import phalanx
from examples import recipes
from phalanx.testing import run_ranks
from tests.train._programs import quietly

GUIDE = Path(__file__).parents[2] / "docs" / "en" / "guides" / "train_well.md"


def run(recipe):
    """Return a recipe's trainer, what it printed, and the learning rate and gradient's norm of each step."""
    steps = []

    def note(optimizer, args, kwargs):
        group = optimizer.param_groups[0]
        norms = torch.stack([parameter.grad.norm() for parameter in group["params"]])
        steps.append((group["lr"], norms.norm().item()))

    hook = register_optimizer_step_post_hook(note)
    trainer, printed = quietly(recipe)
    hook.remove()
    return trainer, printed, steps


def accuracies(trainer):
    records = phalanx.train.read_metrics(trainer.folder)
    return [record["accuracy"] for record in records if record["kind"] == "evaluation"]


def of_ema():
    trainer, _, _ = run(recipes.ema)
    [average] = trainer.callbacks
    inputs, targets = recipes.HELD_BACK.tensors
    again, _, _ = run(recipes.ema)
    return {
        "num": int(average.n_averaged),
        "evaluated": trainer.evaluation["loss"],
        "of average": recipes.LOSS(average(inputs), targets).item(),
        "of model": recipes.LOSS(trainer.module(inputs), targets).item(),
        "num again": int(again.callbacks[0].n_averaged),
        "same again": torch.equal(again.callbacks[0].module[0].weight, average.module[0].weight),
    }


def of_best():
    trainer, _, _ = run(recipes.best_checkpoint)
    return {"evaluations": accuracies(trainer), "loaded": quietly(trainer.evaluate, recipes.HELD_BACK)[0]["accuracy"]}


def of_fine_tune():
    trainer, _, _ = run(recipes.fine_tune)
    model, _ = recipes.make_model()
    phalanx.checkpoint.load("runs/best", {"model": model})
    old, new = model.state_dict(), trainer.module.state_dict()
    return {"step": trainer.step, "kept": {name: torch.equal(old[name], new[name]) for name in old}}


def run_all(rank, world_size, folder):
    os.chdir(folder)
    results = {"ema": of_ema(), "best_checkpoint": of_best(), "fine_tune": of_fine_tune()}
    for recipe in recipes.RECIPES:
        if recipe.__name__ not in results:
            trainer, printed, steps = run(recipe)
            results[recipe.__name__] = {
                "step": trainer.step, "printed": printed, "lrs": [lr for lr, _ in steps],
                "norms": [norm for _, norm in steps], "evaluation": trainer.evaluation,
            }  # fmt: skip
    results["accuracies"] = accuracies(recipes_trainer := run(recipes.early_stopping)[0])
    results["again"] = recipes_trainer.step
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    found = run_ranks(run_all, 2, str(folder))
    assert (folder / "runs" / "log" / "metrics.csv").exists()
    for name in ("schedule", "early_stopping", "target", "log"):
        assert found[0][name]["step"] == found[1][name]["step"]
    return found


def test_the_schedule_has_the_length_of_the_run(results):
    lrs = results[0]["schedule"]["lrs"]
    assert len(lrs) == 30
    assert lrs == sorted(lrs, reverse=True)
    assert lrs[0] == 0.1
    assert 0 < lrs[-1] < 0.001


def test_the_learning_rate_warms_up_and_falls(results):
    lrs = results[1]["warm_up"]["lrs"]
    assert lrs[:4] == pytest.approx([0.01, 0.04, 0.07, 0.1])
    assert lrs[3:] == sorted(lrs[3:], reverse=True)
    assert 0 < lrs[-1] < 0.001


def test_the_average_is_evaluated_and_kept(results):
    found = results[0]["ema"]
    assert found["num"] == found["num again"] == 30
    assert found["evaluated"] == pytest.approx(found["of average"])
    assert found["evaluated"] != pytest.approx(found["of model"])
    assert found["same again"]


def test_gradients_are_clipped_and_batches_cut(results):
    found = results[0]["clip_and_accumulate"]
    assert max(found["norms"]) <= 1.0001
    assert "2 ranks x 3 passes x 8" in found["printed"]


def test_training_ends_when_accuracy_stands_still(results):
    *before, last, very_last = results[0]["accuracies"]
    assert max(last, very_last) <= max(before) + 0.05
    assert results[0]["again"] == results[0]["early_stopping"]["step"] < 1000


def test_time_and_target_stop_the_run(results):
    for name in ("time_budget", "target"):
        assert f"stopped by trainer.stop() after step {results[0][name]['step']}" in results[0][name]["printed"]
    assert results[0]["target"]["evaluation"]["accuracy"] >= 0.75


def test_the_best_checkpoint_is_loaded(results):
    found = results[1]["best_checkpoint"]
    assert found["loaded"] == pytest.approx(max(found["evaluations"]))


def test_fine_tuning_begins_with_the_weights_and_trains_the_last_layer(results):
    assert results[0]["fine_tune"] == {
        "step": 30, "kept": {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False},
    }  # fmt: skip


def test_rank_0_logs(results):
    assert re.search(r"step 30: \d\.\d{3}\n", results[0]["log"]["printed"])
    assert "no more numbers" in results[0]["log"]["printed"]
    assert "no more numbers" not in results[1]["log"]["printed"]


def test_the_learning_rate_grows_with_the_ranks(results):
    lrs = results[0]["scale_with_ranks"]["lrs"]
    assert lrs[0] == 0.1
    assert lrs[3:] == pytest.approx([0.2] * 27)


def test_the_guide_has_every_recipe():
    shown = re.findall(r":pyobject: (\w+)", GUIDE.read_text())
    assert all(hasattr(recipes, name) for name in shown)
    told = {name.lower() for name in shown}  # of two the page shows the callback, which has the recipe's name
    assert {recipe.__name__.replace("_", "") for recipe in recipes.RECIPES} <= {name.replace("_", "") for name in told}
