"""Callbacks are called or refused, `Trainer.stop` ends all ranks after one step, and no attribute is set in vain."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import phalanx
from phalanx.train.callbacks import HOOKS, check_callbacks
from phalanx.train.settings import Settings
from tests.train._programs import Seen, make_data, make_model, mean_squares, quietly, train

LIMIT_S = 100


def having(*names, **more):
    """Return an object with methods of these names."""
    return type("Mine", (), {**dict.fromkeys(names, lambda self, trainer: None), **more})()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            having("on_train_epoch_end"),
            r"Mine has on_train_epoch_end, which .* never be called, did you mean on_epoch\?",
        ),
        (
            having("on_step", "on_batch_end"),
            r"has on_batch_end, .*, did you mean on_step\?.*calls on_fit_start, on_step",
        ),
        (having("on_evaluaton"), r"has on_evaluaton, .*, did you mean on_evaluation\?"),
        (having("on_step", "on_improvement"), r"on_improvement, which would never be called\. .* with on_"),
        (having(*(f"on_{letter}" for letter in "abcde")), r"has on_a, on_b, on_c and 2 more, which would never"),
        (having("step"), r"the callback Mine has no method that would be called\. The Trainer calls .* and on_fit_end"),
        (print, "the callback builtin_function_or_method has no method that would be called"),
        (having("state_dict", "load_state_dict"), "the callback Mine has no method that would be called"),
        (
            swa_utils.AveragedModel(nn.Linear(1, 1)),
            r"AveragedModel has no method .*: def on_step\(self, trainer\): self\.update_parameters\(trainer\.module\)",
        ),
        (torch.optim.SGD([torch.ones(1)]), "the callback SGD has no method that would be called"),
        (
            lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1),
            r"StepLR has no method .* argument of its own: Trainer\(\.\.\., scheduler=scheduler\)",
        ),
        (having(on_step=3), "the callback Mine has no method that would be called"),
    ],
)
def test_a_callback_of_which_a_method_would_never_be_called_is_refused(callback, message):
    with pytest.raises(TypeError, match=message):
        check_callbacks([callback])


def test_every_hook_and_names_that_are_no_methods_are_taken():
    check_callbacks([having(hook) for hook in HOOKS])
    check_callbacks([Seen(), having("on_step", "one_step", on_gpu=True)])


def test_settings_that_are_in_use_change_in_their_end_alone_and_as_checked_as_at_first():
    settings = Settings(max_epochs=1)
    with pytest.raises(AttributeError, match=r"setting max_epoch now would change nothing, did you mean max_epochs\?"):
        settings.max_epoch = 2
    with pytest.raises(
        AttributeError, match=r"seed now .* nothing: make the Trainer anew, with seed=3\. Only max_epochs "
    ):
        settings.seed = 3
    with pytest.raises(TypeError, match=r"max_epochs must be a whole number, got '2' \(str\); right: max_epochs=2"):
        settings.max_epochs = "2"
    with pytest.raises(ValueError, match="say when to stop"):
        settings.max_epochs = None
    settings.max_steps = 1e4
    assert (type(settings.max_steps), settings) == (int, Settings(max_epochs=1, max_steps=10_000))
    assert copy.deepcopy(settings) == pickle.loads(pickle.dumps(settings)) == settings


# ---- on ranks ------------------------------------------------------------------------------------------------------


def trainer_of(folder, kind=phalanx.Trainer, **options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return kind(model, optimizer, mean_squares, max_epochs=1, folder=str(folder), **options)


class Stops:
    """A callback that stops the training in one of its methods, on one rank, after a step."""

    def __init__(self, hook, step, rank):
        self._at = hook, step, rank

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda trainer: self._note(name, trainer)

    def _note(self, name, trainer):
        if (name, trainer.step, trainer.session.rank) == self._at:
            trainer.stop()


def stop_everywhere(rank, world_size, folder):
    """Return how far each training came that was stopped, what was said and saved, and how far the next one came."""
    results = {}
    for hook, step in (
        ("on_fit_start", 0), ("on_step", 3), ("on_step", 7), ("on_evaluation", 7), ("on_epoch", 7), ("on_save", 7),
        ("on_save", 10), ("on_fit_end", 14),
    ):  # fmt: skip
        at = f"{folder}/{hook}-{step}"
        options = {"validation": make_data(9), "save_every": 10 if step == 10 else None}
        if hook in ("on_evaluation", "on_epoch"):
            options["save_every"] = 100
        trainer, printed = train(at, callbacks=[Stops(hook, step, world_size - 1)], **options)
        saved = [c.step for c in phalanx.checkpoint.list_checkpoints(trainer.checkpoints)]
        again, _ = train(at, **options)
        results[hook, step] = trainer.step, trainer.epoch, printed, saved, again.step
    on_one = [Stops("on_step", 2, 0)] if rank == 0 else []
    of_one = train(f"{folder}/one", callbacks=on_one)[0].step
    return (
        results,
        of_one,
        stop_in_a_step(f"{folder}/step"),
        iterate_over_callbacks(f"{folder}/iterator"),
        write_down_epochs(f"{folder}/epochs"),
    )


def write_down_epochs(folder):
    """Return the epochs that callbacks see, and those of the same evaluations in metrics.jsonl."""
    seen = []

    class Epochs:
        def on_evaluation(self, trainer):
            seen.append(("evaluation", trainer.step, trainer.epoch))

        def on_epoch(self, trainer):
            seen.append(("epoch", trainer.step, trainer.epoch))

    trainer, _ = train(folder, validation=make_data(9), steps=10, callbacks=[Epochs()])
    seen.append(("after fit", trainer.step, trainer.epoch))
    kinds = ("evaluation", "epoch")
    records = [record for record in phalanx.train.read_metrics(folder) if record["kind"] in kinds]
    return seen, [(record["kind"], record["step"], record["epoch"]) for record in records]


class OfMine(phalanx.Trainer):
    """A trainer that may have attributes of its own."""


def set_attributes(rank, world_size, folder):
    """Return what was said of each attribute that was set in vain, and of `stop` without a `fit`."""
    trainer = trainer_of(folder)
    said = {}
    for name in (
        "should_stop",
        "stop_training",
        "stop",
        "max_epochs",
        "seed",
        "schedule",
        "my_counter",
        "folder",
        "scheduler",
    ):
        with pytest.raises(AttributeError) as caught:
            setattr(trainer, name, True)
        said[name] = str(caught.value)
    trainer.callbacks, trainer.optimizer = [], trainer.optimizer
    mine = trainer_of(folder, kind=OfMine)
    mine.my_counter = 3
    with pytest.raises(AttributeError, match=r"trainer\.stop\(\)"):
        mine.should_stop = True
    with pytest.raises(RuntimeError, match=r"fit\(\) is not running"):
        trainer.stop()
    return said


def iterate_over_callbacks(folder):
    """Give callbacks by an iterator, and others later; return what was called."""
    seen = Seen()
    trainer = trainer_of(folder, callbacks=iter([seen]), global_batch_size=25)
    trainer.callbacks.append(having("on_batch_end"))
    with pytest.raises(TypeError, match="did you mean on_step"):
        trainer.fit(make_data())
    trainer.callbacks.pop()
    quietly(trainer.fit, make_data())
    return [name for name, _ in seen.events]


def stop_in_a_step(folder):
    """A training step calls `stop` on one rank; return after which step all have ended."""

    def step(model, batch):
        if trainer.step == 20 and trainer.session.is_main:
            trainer.stop()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = phalanx.Trainer(model, optimizer, training_step=step, max_steps=10**9, folder=folder)
    quietly(trainer.fit, make_data())
    return trainer.step


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_rank_stops_all_after_the_same_step_which_is_saved_and_the_next_fit_goes_on(
    run_ranks, tmp_path, world_size
):
    every = run_ranks(stop_everywhere, world_size, str(tmp_path), timeout_s=LIMIT_S)
    for results, of_one, *_ in every:
        for (hook, step), (ended, epoch, _, saved, again) in results.items():
            assert ended == step, hook
            assert epoch == step // 7, hook
            assert saved[-1:] == ([step] if step else []), hook
            assert again == 14, hook
        assert of_one == 2
    called = ["on_fit_start", "on_step", "on_step", "on_epoch", "on_save", "on_fit_end"]
    assert [events for *_, events, _ in every] == [called] * world_size
    [in_a_step] = {ended for *_, ended, _, _ in every}
    assert in_a_step > 20
    seen, written = every[0][-1]
    assert seen == [("evaluation", 7, 0), ("epoch", 7, 0), ("evaluation", 10, 1), ("after fit", 10, 1)]
    assert written == [("evaluation", 7, 0), ("epoch", 7, 0), ("evaluation", 10, 1), ("epoch", 10, 1)]
    printed = every[0][0]["on_step", 3][2]
    assert "in epoch 1, step 3: loss" in printed
    assert "stopped by trainer.stop() after step 3" in printed
    assert "stopped" not in every[0][0]["on_fit_end", 14][2]


def test_an_attribute_that_would_mean_nothing_is_refused_with_what_is_meant(run_ranks, tmp_path):
    [said] = run_ranks(set_attributes, 1, str(tmp_path), timeout_s=LIMIT_S)
    for name, meant in {
        "should_stop": r"; right: trainer\.stop\(\)", "stop_training": r"; right: trainer\.stop\(\)",
        "stop": r"; right: trainer\.stop\(\)", "max_epochs": r"; right: trainer\.settings\.max_epochs",
        "seed": r"; right: Trainer\(seed=\.\.\.\)",
        "schedule": r"; right: trainer\.scheduler\.", "my_counter": r"\. The attributes .* in a callback",
    }.items():  # fmt: skip
        assert re.match(f"Trainer: setting {name} would change nothing{meant}", said[name]), said[name]
    for name in ("folder", "scheduler"):
        assert f"setting {name} now would not change what trains: make the Trainer anew. Of its settings" in said[name]
