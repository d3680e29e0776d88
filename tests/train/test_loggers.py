"""Loggers get a run's numbers once, on rank 0, and change nothing of the training."""

from __future__ import annotations

import random
import shutil
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.train.report import loggers, run_log
from phalanx.train.report.metrics import read_metrics
from tests.train._programs import make_data, make_model, mean_squares, quietly, state_of


class Kept:
    """A logger of the user's own."""

    def __init__(self):
        self.logged = []
        self.num_closed = 0

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def close(self):
        self.num_closed += 1


class Failing(Kept):
    def log(self, metrics, step):
        super().log(metrics, step)
        raise ConnectionError("no route to the server")


class Hanging(Kept):
    def close(self):
        threading.Event().wait()


class Drawing(Kept):
    """Takes a random number where a package would, when it is imported or begins."""

    def __init__(self, run):
        super().__init__()
        random.random(), torch.rand(1)


def train(folder, given, steps=14):
    """Train up to `steps` steps, of which every second is logged and the last is saved; return trainer and words."""
    model = make_model(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"max_epochs": 2, "max_steps": steps, "global_batch_size": 8, "log_every": 2, "save_every": 4}
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, loggers=given, folder=str(folder), snapshot_every=0, **options
    )
    return trainer, quietly(trainer.fit, make_data(), make_data(9))[1]


def forget_after(folder, step):
    """Remove the checkpoints behind `step`: the next attempt repeats what came after it."""
    if dist.get_rank() == 0:
        for saved in phalanx.checkpoint.list_checkpoints(f"{folder}/checkpoints"):
            if saved.step > step:
                shutil.rmtree(saved.path)
    dist.barrier()


def train_twice(folder, given, steps=10):
    train(folder, given(), steps)
    forget_after(folder, 8)
    return train(folder, given())


def programs(rank, world_size, folder):
    warnings.simplefilter("ignore")  # TensorBoard's
    sys.modules.update(wandb=FakeWandb())
    run_log.CLOSE_S = 0.2
    names = ("objects", "files", "wandb", "plain", "missing")
    return {name: globals()[f"with_{name}"](f"{folder}/{name}") for name in names}


def with_objects(folder):
    kept, failing, hanging = Kept(), Failing(), Hanging()
    _, said = train(folder, [kept, failing, hanging])
    return kept.logged, kept.num_closed, len(failing.logged), said


def with_files(folder):
    train_twice(folder, lambda: ["tensorboard"])


def with_wandb(folder):
    train_twice(folder, lambda: "wandb")
    return [(run.given, run.logged, run.num_finished) for run in sys.modules["wandb"].runs]


def with_plain(folder):
    """The same training with and without a logger that draws random numbers when it begins."""
    loggers._KINDS["drawing"] = Drawing
    Drawing.needs = ("random", "random", "")
    first, second = (state_of(train(f"{folder}/{given}", given)[0].model) for given in ("drawing", ()))
    return all(torch.equal(first[name], second[name]) for name in first)


def with_missing(folder):
    sys.modules["wandb"] = None  # as if it were not installed
    with pytest.raises(ImportError) as caught:
        train(folder, "wandb")
    return str(caught.value)


class FakeWandb(types.ModuleType):
    """What the trainer uses of wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.run = [], None

    def Settings(self, **given):
        return given

    def init(self, **given):
        run = types.SimpleNamespace(id=given["id"] or "new", given=given, logged=[], num_finished=0)
        run.log = lambda metrics, step: run.logged.append((step, sorted(metrics)))
        run.finish = lambda: setattr(run, "num_finished", run.num_finished + 1)
        self.runs.append(run)
        return run


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # without a key of wandb
        for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
            patch.delenv(name, raising=False)
        return folder, run_ranks(programs, 2, str(folder))


STEPS = [2, 4, 6, 7, 8, 10, 12, 14]


def test_a_logger_of_ones_own_gets_every_record_on_rank_0_and_is_closed(results):
    _, (first, second) = results
    logged, num_closed, _, _ = first["objects"]
    assert [step for step, metrics in logged if "loss" in metrics] == STEPS
    assert [step for step, metrics in logged if "validation/loss" in metrics] == [7, 14]
    assert [step for step, metrics in logged if "epoch_loss" in metrics] == [7, 14]
    assert all(type(value) is float for _, metrics in logged for value in metrics.values())
    assert num_closed == 1
    assert second["objects"] == ([], 0, 0, "")


def test_a_logger_that_fails_or_hangs_is_named_once_and_training_goes_on(results):
    _, _, num_tried, said = results[1][0]["objects"]
    assert num_tried == 1
    assert said.count("can't write to the logger Failing (ConnectionError: no route to the server)") == 1
    assert said.count("can't write the end to the logger Hanging (TimeoutError") == 1
    assert "epoch 2, step 14" in said


def test_tensorboard_has_each_step_once_after_a_resumption(results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = results[0] / "files"
    losses = {r["step"]: r["loss"] for r in read_metrics(folder) if r["kind"] == "step"}
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == STEPS
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([losses[step] for step in STEPS])
    assert {event.step for event in events.Scalars("validation/loss")} == {7, 14}


def test_wandb_is_offline_without_a_key_and_goes_on_in_the_same_run_without_repeating_steps(results):
    folder, (first, second) = results
    (begun, logged, num_finished), (resumed, logged_later, num_finished_later) = first["wandb"]
    assert (begun["mode"], begun["id"], begun["config"]["max_epochs"]) == ("offline", None, 2)
    assert (resumed["id"], resumed["resume"]) == ("new", "allow")
    assert begun["dir"] == str(folder / "wandb")
    assert [step for step, names in logged + logged_later if "loss" in names] == STEPS
    assert num_finished == num_finished_later == 1
    assert second["wandb"] == []
    assert (folder / "wandb" / "wandb.id").read_text() == "new"


def test_a_logger_that_draws_random_numbers_does_not_change_the_training(results):
    assert [of_rank["plain"] for of_rank in results[1]] == [True, True]


def test_a_missing_package_is_named_on_every_rank_with_the_line_that_installs_it(results):
    for of_rank in results[1]:
        assert of_rank["missing"].startswith("Trainer: loggers='wandb' needs a package that rank 0 can't import: pip ")
        assert "pip install wandb" in of_rank["missing"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("tensorbord", ValueError, r"no logger is named 'tensorbord', did you mean tensorboard\?$"),
        ("xyz", ValueError, "no logger is named 'xyz'; there are tensorboard, wandb$"),
        ([loggers.Loggers], TypeError, r"a logger is the class Loggers itself; right: Loggers\(\.\.\.\)$"),
        (["wandb", object()], TypeError, r"a logger has log\(metrics, step\) and close\(\)"),
    ],
)
def test_what_is_no_logger_is_refused_before_training_begins(given, error, message):
    with pytest.raises(error, match=message):
        loggers.Loggers(given, None)
