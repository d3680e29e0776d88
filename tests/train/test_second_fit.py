"""What a second `fit`, an `evaluate` and a `predict` mean for each value of `resume`, and what is said of it."""

from __future__ import annotations

import os

import pytest
import torch

import phalanx
from tests.train._programs import make_data, make_model, mean_squares, quietly, state_of

LIMIT_S = 100


def trainer_of(folder, resume, model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"max_epochs": 1, "global_batch_size": 10, **settings}
    return phalanx.Trainer(model, optimizer, mean_squares, folder=folder, resume=resume, **settings)


def fit_again(rank, world_size, folder):
    return {resume: _fit_again(f"{folder}/{resume}", resume) for resume in ("auto", "never", "force")}


def _fit_again(folder, resume):
    """Train, call `fit` again, train longer, then make another trainer with a new model and with the same one."""
    data, model = make_data(), make_model()
    trainer = trainer_of(folder, resume, model)
    said = {"first": quietly(trainer.fit, data)[1]}
    before = state_of(model)
    _, said["again"] = quietly(trainer.fit, data)
    kept = all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    trainer.settings.max_epochs = 2
    _, said["longer"] = quietly(trainer.fit, data)
    steps = trainer.step
    if resume != "force":
        with pytest.raises(phalanx.CheckpointError, match="in a new Trainer: a second fit"):
            quietly(trainer.fit, make_data(30))
    saved = [checkpoint.step for checkpoint in phalanx.checkpoint.list_checkpoints(folder)]
    new = trainer_of(folder, resume, make_model(), max_epochs=2)
    _, said["evaluate"] = quietly(new.evaluate, data)
    _, said["predict"] = quietly(new.predict, data)
    _, said["evaluate of a trained model"] = quietly(trainer_of(folder, resume, model).evaluate, data)
    _, said["new"] = quietly(new.fit, data)
    _, said["same model"] = quietly(trainer_of(folder, resume, model, max_epochs=2).fit, data)
    num_aside = sum(name.startswith("checkpoints.before") for name in os.listdir(folder))
    return kept, steps, saved, num_aside, said, _interrupt(f"{folder}-interrupted", resume)


def _interrupt(folder, resume):
    """Let a training end by an error before its first checkpoint, and call `fit` again."""

    class Error:
        num = 1

        def on_step(self, trainer):
            if trainer.step == 3 and self.num:
                self.num -= 1
                raise KeyError

    trainer = trainer_of(folder, resume, make_model(), callbacks=[Error()])
    with pytest.raises(KeyError):
        quietly(trainer.fit, make_data())
    return quietly(trainer.fit, make_data())[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_fit_goes_on_with_its_own_run_and_another_trainer_does_as_resume_says(run_ranks, tmp_path, world_size):
    every = run_ranks(fit_again, world_size, str(tmp_path), timeout_s=LIMIT_S)
    for resume in ("auto", "never", "force"):
        kept, steps, saved, num_aside, said, after_error = every[0][resume]
        assert kept
        assert (steps, saved) == (10, [5, 10])
        assert "already finished" not in said["first"]
        assert "already finished at step 5; nothing to train. To train longer, raise max_epochs" in said["again"]
        assert "to start over, make the model, the optimizer and the Trainer anew, with resume=" in said["again"]
        assert "kept there" not in said["again"]
        assert "resuming after step 5 from disk: epoch 2" in said["longer"]
        assert "no checkpoint: continuing after step 3 with what the Trainer has; epoch 1 begins again" in after_error
        assert said["predict"] == said["evaluate of a trained model"] == ""
        if resume == "never":
            assert said["evaluate"] == ""
            assert num_aside == 2
            assert "another Trainer of this process has trained this model: the run begins with" in said["same model"]
            assert "has trained this model" not in said["new"]
            assert "epoch 2, step 10: loss" in said["new"]
        else:
            assert "Trainer.evaluate: the model is as the script has made it. Step 10 of the run" in said["evaluate"]
            assert num_aside == 0
            assert "this one continues its run" in said["new"]
            assert "already finished at step 10; nothing to train. To train longer" in said["same model"]
    for of_rank in every[1:]:
        assert {text for *_, said, _ in of_rank.values() for text in said.values()} == {""}
