"""The numbers of a run mean what they say: means of epochs, where time went, where the run comes from."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.train.report.metrics import PHASES, read_metrics
from phalanx.train.report.origin import git_commit
from phalanx.train.report.report import write_report
from tests.train._programs import Numbered, make_model, quietly
from tests.train.test_report import Page

SLOWER_S = 0.05


class SlowRank:
    """The last rank takes longer than the others."""

    def on_step(self, trainer):
        if trainer.session.rank == trainer.session.world_size - 1:
            time.sleep(SLOWER_S)


def train_on_numbers(rank, world_size, folder):
    """Train on samples whose loss is their number, twice: whole, and stopped in the second epoch."""

    def number(model, batch):
        outputs = model(batch[0])
        return (outputs - outputs.detach()).mean() + batch[1].mean()

    said = []
    for steps in (12, None):
        model = make_model()
        options = {"max_epochs": 2, "max_steps": steps, "global_batch_size": 6, "log_every": 4, "folder": folder}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = phalanx.Trainer(model, optimizer, training_step=number, callbacks=[SlowRank()], **options)
        said.append(quietly(trainer.fit, Numbered(50), Numbered(10))[1])
    return said


@pytest.fixture(scope="module")
def run(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "run"
    said = run_ranks(train_on_numbers, 2, str(folder))[0]
    return said, read_metrics(folder), folder


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def test_the_training_loss_of_an_epoch_is_the_mean_over_its_samples(run):
    said, records, _ = run
    whole, stopped, rest = of_kind(records, "epoch")
    assert (whole["epoch"], whole["first_step"], whole["step"]) == (0, 1, 9)
    assert whole["loss"] == pytest.approx(24.5)  # of 0 to 49
    assert "epoch 1, step 9: loss 24.50, val loss 4.500\n" in said[0]
    assert (stopped["epoch"], stopped["first_step"], stopped["step"]) == (1, 10, 12)
    assert (rest["epoch"], rest["first_step"], rest["step"]) == (1, 13, 18)
    assert (stopped["loss"] * 18 + rest["loss"] * 32) / 50 == pytest.approx(24.5)
    assert f"in epoch 2, step 12: loss {stopped['loss']:#.4g}, " in said[0]
    assert f"epoch 2, step 18: loss {rest['loss']:#.4g} (since step 13), " in said[1]


def test_an_epoch_is_never_counted_past_the_last(run):
    _, records, folder = run
    assert max(record["epoch"] for record in records if record["kind"] in ("step", "evaluation", "epoch")) == 1
    text = " ".join(Page(write_report(folder).read_text()).text.split())
    assert "Epoch 2 of 2" in text
    assert "Validation loss 4.5 best" in text


def test_waiting_for_a_slower_rank_is_told_apart_from_the_exchange_and_from_backward(run):
    by_rank = [dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)]
    steps = of_kind(run[1], "step")
    for record in steps:
        for sums, row in zip(by_rank, record["phases_by_rank"], strict=True):
            for name, seconds in zip(PHASES, row, strict=True):
                sums[name] += seconds / len(steps)
    waiting, slow = by_rank
    assert slow["callbacks"] > SLOWER_S > waiting["callbacks"]
    assert waiting["wait"] > max(0.5 * SLOWER_S, waiting["backward"], waiting["exchange"], slow["wait"])


def test_a_run_tells_where_it_comes_from(run):
    origin = of_kind(run[1], "start")[0]["origin"]
    assert origin["model"] == "Sequential in DistributedDataParallel, 161 parameters"
    assert origin["optimizer"] == "SGD(lr=0.1)"
    assert origin["freed memory"].startswith(("kept", "not kept"))
    assert re.fullmatch(r"\d+ in each rank, on CPUs [-0-9,| ]+", origin["threads"])
    assert f"torch {torch.__version__}" in origin["versions"]
    assert os.uname().nodename in origin["hosts"]
    assert origin["command"]


def test_checkpoints_show_the_value_that_was_judged(run_ranks, tmp_path):
    [(metric, loss)] = run_ranks(train_with_validation, 1, str(tmp_path))
    assert metric == loss > 0


def train_with_validation(rank, world_size, folder):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, max_epochs=1, folder=folder)
    result, _ = quietly(trainer.fit, Numbered(50), Numbered(10))
    assert not dist.is_initialized() or dist.get_world_size() == 1
    return phalanx.checkpoint.list_checkpoints(trainer.checkpoints)[-1].metric, result["loss"]


def test_the_commit_is_found_without_git(tmp_path):
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*arguments, folder=tmp_path / "code"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "code" / "deep").mkdir(parents=True)
    assert git_commit(str(tmp_path / "code" / "deep")) == ""
    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(str(tmp_path / "code" / "deep")) == commit
    git("pack-refs", "--all")
    assert git_commit(str(tmp_path / "code")) == commit
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert git_commit(str(tmp_path / "tree")) == commit
    git("checkout", "-q", "--detach")
    assert git_commit(str(tmp_path / "code")) == commit
    (tmp_path / "code" / ".git" / "HEAD").write_bytes(b"\xff ref: nothing")
    assert git_commit(str(tmp_path / "code")) == ""
