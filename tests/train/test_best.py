"""Which evaluation is the best, and what ends a run: known, said and written down, never guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import phalanx
from phalanx.train.arguments import check_plateau
from phalanx.train.evaluate.best_metric import BestMetric
from phalanx.train.settings import Settings
from tests.train._programs import make_data, make_model, mean_squares, quietly, state_of

LIMIT_S = 100


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "min") for name in ("loss", "val_loss", "error_rate", "valMae", "top1_err", "test/rmse", "dice_loss")),
        *((name, "max") for name in ("accuracy", "val_acc", "top5_acc", "valAcc", "f1_score", "recall@5", "macro-F1")),
    ],
)
def test_a_name_that_tells_whether_less_is_better_needs_no_mode(name, mode):
    assert Settings(max_epochs=1, monitor=name).mode == mode


@pytest.mark.parametrize(
    "name",
    ["wer", "cer", "fid", "bits_per_byte", "distance", "cost", "latency_ms", "kl", "lossless", "neg_loss",
     "accuracy_drop", "acc_std"],
)  # fmt: skip
def test_another_name_is_refused_and_a_mode_is_taken(name):
    question = f'monitor=\'{name}\': is lower or higher better? Say mode="min" or mode="max"'
    with pytest.raises(ValueError, match=re.escape(question)):
        Settings(max_epochs=1, monitor=name)
    assert [Settings(max_epochs=1, monitor=name, mode=mode).mode for mode in ("min", "max")] == ["min", "max"]


def test_a_mode_wins_over_the_name():
    assert Settings(max_epochs=1, monitor="loss", mode="max").mode == "max"


def test_a_mode_in_other_words_is_refused_with_the_right_one():
    with pytest.raises(ValueError, match=re.escape("got 'lower'; right: mode=\"min\"")):
        Settings(max_epochs=1, monitor="wer", mode="lower")


@pytest.mark.parametrize(("monitor", "mode", "wrong"), [("accuracy", "max", "min"), ("loss", "min", "max")])
def test_a_plateau_that_takes_better_for_worse_is_refused(monitor, mode, wrong):
    optimizer, settings = torch.optim.SGD(make_model().parameters(), lr=0.1), Settings(max_epochs=1, monitor=monitor)
    with pytest.raises(ValueError, match=re.escape(f'ReduceLROnPlateau(optimizer, mode="{mode}")')):
        check_plateau(ReduceLROnPlateau(optimizer, mode=wrong), settings)
    check_plateau(ReduceLROnPlateau(optimizer, mode=mode), settings)


def test_the_best_metric_is_named_in_the_words_of_its_mode():
    best = BestMetric("wer", "min", 0.1)
    assert best.wanted == "the lowest wer"
    for step, value in enumerate((0.5, 0.25, 0.75, 0.2), start=1):
        best.update({"wer": value}, step)
    again = BestMetric("wer", "min", 0.1)
    again.load_state_dict(best.state_dict())
    for one in (best, again):
        words = "wer has not improved by more than 0.1 for 2 epochs; best (lowest) 0.2 at step 4"
        assert one.why_stopped() == words


def test_a_metric_that_was_never_finite_is_reported_as_such():
    best = BestMetric("accuracy", "max")
    best.update({"accuracy": float("nan")}, 1)
    assert best.why_stopped() == "accuracy has not improved for 1 epoch; it was never finite"


class Noisy(torch.utils.data.Dataset):
    """Samples that draw random numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.randn(6), torch.zeros(1)


class Stop:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            trainer.stop()


def fit(folder, *, dropout=0.0, validation=None, callbacks=(), **settings):
    model = make_model(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, folder=folder, callbacks=callbacks, global_batch_size=10, **settings
    )
    _, printed = quietly(trainer.fit, make_data(), validation or make_data(9))
    records = phalanx.train.read_metrics(folder) if trainer.session.is_main else []
    ends = [record for record in records if record["kind"] == "end"]
    return trainer, printed, ends


def end_in_all_ways(rank, world_size, folder):
    """Return what was printed, the last record and the report of each way to end; and the weights of two that go on."""
    ended = {}

    def keep(name, printed, ends):
        page = Path(folder, name, "report.html").read_text() if rank == 0 else ""
        ended[name] = printed, ends[-1:], page

    # A "word error rate" that falls first and then rises: the best is the second.
    values = iter([0.5, 0.25, 0.75, 1.0])
    step = {"evaluation_step": lambda model, batch: {"wer": value}}
    value = 0.5

    class Next:
        def on_epoch(self, trainer):
            nonlocal value
            value = next(values, 1.0)

    next(values)
    early = {"monitor": "wer", "mode": "min", "patience": 2, "max_epochs": 9, "keep_last": 1, **step}
    trainer, *told = fit(f"{folder}/patience", callbacks=[Next()], **early)
    best = [checkpoint.step for checkpoint in phalanx.checkpoint.list_checkpoints(trainer.checkpoints)]
    best.append(phalanx.checkpoint.load(trainer.folder, {}, step="best").step)
    keep("patience", *told)
    keep("stop", *fit(f"{folder}/stop", callbacks=[Stop(2)], max_epochs=2)[1:])
    keep("max_epochs", *fit(f"{folder}/max_epochs", max_epochs=1, patience=1)[1:])
    keep("max_steps", *fit(f"{folder}/max_steps", max_steps=3)[1:])

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="treats it as worse"):
        phalanx.Trainer(
            model, optimizer, mean_squares, scheduler=ReduceLROnPlateau(optimizer, mode="max"), max_epochs=1,
            scheduler_interval="epoch",
        )  # fmt: skip

    states = []
    for name, stops_at in (("whole", ()), ("parts", (7, 12))):
        for at in (*stops_at, None):
            phalanx.seed_everything(0)  # as each start of a script does
            noisy = {"dropout": 0.2, "validation": Noisy(), "max_epochs": 3}
            trainer, *_ = fit(f"{folder}/{name}", callbacks=[Stop(at)], **noisy)
        states.append(state_of(trainer.model))
    return ended, best, all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    return run_ranks(end_in_all_ways, 2, str(tmp_path_factory.mktemp("best")), timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("name", "message", "note"),
    [
        ("patience", "stopped at epoch 4: wer has not improved for 2 epochs; best (lowest) 0.25 at step 10", ""),
        ("stop", "stopped by trainer.stop() after step 2", " It resumes from there when it is started again."),
        ("max_epochs", None, ""),
        ("max_steps", None, ""),
    ],
)
def test_what_has_ended_a_run_is_said_written_down_and_reported(results, name, message, note):
    printed, (end,), page = results[0][0][name]
    assert (end["reason"], end.get("message")) == (name, message)
    assert ("All training is done." in page) == (message is None)
    assert f'<strong class="state {"stopped" if name == "stop" else "finished"}">' in page
    if message is None:
        assert "stopped" not in printed
    else:
        assert f"{message}\n" in printed
        assert f"{message[0].upper()}{message[1:]}.{note}" in page
    assert results[1][0][name][0] == ""  # the other rank's


def test_the_lowest_is_kept_shown_and_announced_where_lower_is_better(results):
    ended, best, _ = results[0]
    printed, _, page = ended["patience"]
    assert best == [10, 20, 10]
    assert "the best checkpoint is that of the lowest wer\n" in printed
    assert re.search(r"Validation wer</dt><dd>0\.25<small>best \(lowest\), at step 10", page)
    assert "best checkpoint" not in ended["stop"][0]


def test_stopping_within_an_epoch_leaves_the_random_numbers_of_the_run_that_goes_on(results):
    assert [is_same for *_, is_same in results] == [True, True]
