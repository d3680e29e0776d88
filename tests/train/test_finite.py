"""A loss, a gradient or a weight that is not finite is an error on every rank, and no such state is ever saved."""

from __future__ import annotations

import html
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import phalanx
from phalanx.train.evaluate.best_metric import BestMetric
from phalanx.train.step.finite import FiniteGuard
from tests.train._programs import make_data, make_model, mean_squares, quietly, rank_of, state_of, train

pytestmark = pytest.mark.usefixtures("warm_jobs")


class Poisoned(Dataset):
    """Has one sample whose inputs are not finite."""

    def __init__(self, bad, length=50):
        self._data, self._bad = make_data(length), bad

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        inputs, targets = self._data[index]
        return inputs * math.nan if index == self._bad else inputs, targets


class Bad(nn.Module):
    """Gives NaN at the call of that number, on that rank."""

    def __init__(self, call, rank):
        super().__init__()
        self.call, self.rank, self.num_calls = call, rank, 0

    def forward(self, x):
        self.num_calls += self.training
        return x * math.nan if self.num_calls >= self.call and rank_of() == self.rank else x


class Grows(nn.Module):
    def forward(self, x):
        return x.half() * 60000 * 60000 if torch.is_autocast_enabled("cpu") else x


class NanInBackward(nn.Module):
    def forward(self, x):
        return _BackwardOfNan.apply(x)


class _BackwardOfNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


def saved_steps(folder):
    return [c.step for c in phalanx.checkpoint.list_checkpoints(f"{folder}/checkpoints")]


def fails(folder, **options):
    """Train, and return the facts of the error, what was printed, and which steps were saved."""
    try:
        train(folder, **options)
    except phalanx.NonFinite as error:
        phalanx.checkpoint.wait()
        return str(error), error.step, error.epoch, error.ranks, saved_steps(folder)
    return None


def run_programs(rank, world_size, folder):
    return {program.__name__: program(f"{folder}/{program.__name__}") for program in PROGRAMS}


def a_sample_of_nan(folder):
    return fails(folder, data=Poisoned(17), max_epochs=3, log_every=1, save_every=1, keep_last=100)


def a_module_on_one_rank(folder):
    model = nn.Sequential(nn.Linear(6, 16), Bad(5, rank=dist.get_world_size() - 1), nn.Linear(16, 1))
    return fails(folder, model=model, log_every=100, save_every=2, keep_last=100)


def a_gradient(folder):
    class Breaks(nn.Module):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            return _BackwardOfNan.apply(x) if self.num_calls == 4 else x

    model = nn.Sequential(nn.Linear(6, 16), Breaks(), nn.Linear(16, 1))
    plain = fails(f"{folder}/plain", model=model, save_every=1, keep_last=100)
    model = nn.Sequential(nn.Linear(6, 16), Breaks(), nn.Linear(16, 1))
    return plain, fails(f"{folder}/clipped", model=model, save_every=1, keep_last=100, clip_norm=1.0)


class NanForLarge(torch.autograd.Function):
    """Its gradient is not finite where its input is large; the output always is."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-3, 3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.where(x.abs() > 1e3, math.nan, 1.0)


class Clamps(nn.Module):
    def forward(self, x):
        return NanForLarge.apply(x)


class Large(Poisoned):
    def __getitem__(self, index):
        inputs, targets = self._data[index]
        return inputs * 1e5 if index == self._bad else inputs, targets


def a_backward_pass(folder):
    """One sample makes a module's gradient NaN; who had it, and which module it was, is asked of the batch again."""
    found = []
    for number, options in enumerate(({}, {"clip_norm": 1.0}, {"micro_batch_size": 1})):
        model = nn.Sequential(nn.Linear(6, 16), nn.Sequential(Clamps()), nn.Linear(16, 1))
        try:
            train(f"{folder}/{number}", model=model, data=Large(17), max_epochs=1, log_every=100, **options)
        except phalanx.NonFinite as error:
            found.append((str(error), error.step, error.ranks, error.tensor, error.module))
    return found


def accumulation_and_bf16(folder):
    accumulated = fails(f"{folder}/accumulated", data=Poisoned(17), micro_batch_size=1, max_epochs=1)
    in_bf16 = fails(f"{folder}/bf16", data=Poisoned(17), precision="bf16", max_epochs=1)
    same_bits = fails(f"{folder}/world", data=Poisoned(17), deterministic="world", virtual_shards=2, max_epochs=1)
    return [failed[3] == accumulated[3] and "batch[0]" in failed[0] for failed in (accumulated, in_bf16, same_bits)]


def found_in_the_log(folder):
    """Nobody looks at a loss before it is logged, as where it lies on a device that must not be waited for."""
    look, FiniteGuard.look_at_loss = FiniteGuard.look_at_loss, lambda *_: None
    try:
        return fails(folder, data=Poisoned(17), log_every=3, save_every=3, snapshot_every=0, max_epochs=1)
    finally:
        FiniteGuard.look_at_loss = look


def skipped_steps(folder):
    """A loss so large that its gradient overflows until the scale has come down."""

    def loss(outputs, targets):
        return mean_squares(outputs, targets) * 2.0**112

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-115)
    options = {"precision": "fp16", "max_epochs": 1, "global_batch_size": 8, "save_every": 1, "clip_norm": 1e38}
    trainer = phalanx.Trainer(model, optimizer, loss, folder=folder, **options)
    quietly(trainer.fit, make_data())
    model = nn.Sequential(nn.Linear(6, 1), NanInBackward())
    grows = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Grows(), nn.Linear(16, 1))
    overflown = fails(f"{folder}/overflown", model=grows, precision="fp16", max_epochs=99)
    never = fails(f"{folder}/never", model=model, precision="fp16", max_epochs=99, log_every=5)
    once = nn.Sequential(nn.Linear(6, 1), nn.Identity())
    calls = iter(range(999))
    once[1].register_forward_hook(lambda _, inputs, output: output * math.inf if next(calls) == 2 else output)
    skips, _ = train(f"{folder}/once", model=once, precision="fp16", max_epochs=1)
    saved = saved_steps(f"{folder}/once")
    return trainer._attempt.stepper.scaler.get_scale() < 65536.0, trainer.step, never, overflown, (skips.step, saved)


def warned(folder):
    """Weights turn bad in the fourth step, on both ways of going on."""
    results = []
    for on_nan in ("warn", "ignore"):
        model = nn.Sequential(nn.Linear(6, 16), Bad(4, rank=0), nn.Linear(16, 1))
        trainer, printed = train(f"{folder}/{on_nan}", model=model, on_nan=on_nan, save_every=1, keep_last=2)
        results.append((trainer.step, saved_steps(f"{folder}/{on_nan}"), printed))
    return results


def a_loss_that_is_only_inf(folder):
    """Its gradient is finite, so the weights stay good, and so do the checkpoints."""

    def step(model, batch):
        loss = mean_squares(model(batch[0]), batch[1])
        return loss + (math.inf if trainer.step == 3 else 0.0)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"max_epochs": 1, "global_batch_size": 8, "save_every": 2, "on_nan": "warn"}
    trainer = phalanx.Trainer(model, optimizer, training_step=step, folder=folder, **options)
    _, printed = quietly(trainer.fit, make_data())
    return saved_steps(folder), printed


class Masked(nn.Module):
    """Has a parameter and a buffer of -inf by design, and one that becomes NaN at the call of that number."""

    def __init__(self, bad_call):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.transitions = nn.Parameter(torch.tensor([0.0, -math.inf]))
        self.register_buffer("mask", torch.full((2, 2), -math.inf))
        self.register_buffer("mean", torch.zeros(3))
        self.bad_call, self.num_calls = bad_call, 0

    def forward(self, x):
        self.num_calls += self.training
        if self.num_calls == self.bad_call:
            self.mean.fill_(math.nan)
        return self.layer(x) + torch.logsumexp(self.transitions, 0)


def by_design(folder):
    """Values that are not finite from the beginning are said once, also after a resumption; a buffer's NaN is found."""
    said = []
    for max_epochs in (1, 2):
        trainer, printed = train(f"{folder}/good", model=Masked(99), max_epochs=max_epochs)
        said.append((trainer.step, printed))
    failed = fails(f"{folder}/bad", model=Masked(4), max_epochs=1, snapshot_every=0)
    _, ignored = train(f"{folder}/ignored", model=Masked(4), max_epochs=2, snapshot_every=0, on_nan="ignore")
    return said, saved_steps(f"{folder}/good"), failed, ignored


def a_gradient_that_nobody_looks_at(folder):
    """Its step makes the parameters bad, and the next one's loss."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Identity(), nn.Linear(16, 1))
    calls = iter(range(999))
    model[2].weight.register_hook(lambda grad: grad * math.nan if next(calls) == 4 else grad)
    return fails(folder, model=model, snapshot_every=0, save_every=3, keep_last=100)


def evaluations_of_nan(folder):
    """Only the second of the evaluations is finite; patience ends the run two later."""

    class Turns(nn.Module):
        num_evaluations = 0

        def forward(self, x):
            return x if self.training or self.num_evaluations == 2 else x * math.nan

    class Count:
        def on_epoch(self, trainer):
            turns.num_evaluations += 1

    turns = Turns()
    turns.num_evaluations = 1
    model = nn.Sequential(nn.Linear(6, 1), turns)
    trainer, printed = train(
        folder, model=model, validation=make_data(9), callbacks=(Count(),), max_epochs=9, patience=2, keep_last=1
    )
    checkpoints = phalanx.checkpoint.list_checkpoints(trainer.checkpoints)
    return trainer.epoch, [(c.step, c.metric is None) for c in checkpoints], printed, trainer._best_metric.best


PROGRAMS = (
    found_in_the_log, a_sample_of_nan, a_module_on_one_rank, a_gradient, accumulation_and_bf16, skipped_steps, warned,
    a_backward_pass, a_loss_that_is_only_inf, by_design, a_gradient_that_nobody_looks_at, evaluations_of_nan,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """What each rank returned from each program, by world size."""
    return {
        size: run_ranks(run_programs, size, str(tmp_path_factory.mktemp("finite")), timeout_s=300) for size in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_that_is_not_finite_is_named_on_every_rank(results, world_size):
    every = [of_rank["a_sample_of_nan"] for of_rank in results[world_size]]
    assert every == [every[0]] * world_size
    message, step, epoch, ranks, saved = every[0]
    assert epoch == 0
    assert len(ranks) == 1
    assert f"step {step}, epoch 1, rank {ranks[0]}: the loss is nan" in message
    assert "It began in the data: batch[0], of shape" in message
    assert saved == [*range(1, step)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_module_that_failed_first_is_named_although_one_rank_alone_saw_it(results, world_size):
    for of_rank in results[world_size]:
        message, step, _, ranks, saved = of_rank["a_module_on_one_rank"]
        assert (step, ranks, saved) == (5, (world_size - 1,), [2, 4])
        assert "It began in module '1' (Bad): its output" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_not_finite_is_named_and_its_weights_are_not_saved(results, world_size):
    for of_rank in results[world_size]:
        plain, clipped = of_rank["a_gradient"]
        assert (plain[1], plain[4]) == (4, [1, 2, 3])
        assert "epoch 1, rank" in plain[0]
        assert "a gradient is not finite, although the loss is. The first gradient that is not" in plain[0]
        assert (clipped[1], clipped[4]) == (4, [1, 2, 3])
        assert "lower the learning rate or set clip_norm; on_nan" in plain[0]
        assert "fix the data or lower the learning rate; on_nan" in clipped[0]
        assert "the gradient's norm is nan, although the loss is finite" in clipped[0]
        assert "that of parameter '0.weight'" in clipped[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rank_and_the_module_that_made_a_gradient_nan_are_named(results, world_size):
    every = [of_rank["a_backward_pass"] for of_rank in results[world_size]]
    assert every == [every[0]] * world_size
    assert len(every[0]) == 3
    for message, step, ranks, tensor, module in every[0]:
        assert (step, len(ranks)) == (every[0][0][1], 1)
        assert "although the loss is" in message
        assert "It began in the backward pass of module '1.0' (Clamps): the gradient of its inputs[0]" in message
        assert (tensor, module) == ("gradient of the inputs of module '1.0'", "1.0")


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation_bf16_and_bits_alike_find_it_too(results, world_size):
    assert [of_rank["accumulation_and_bf16"] for of_rank in results[world_size]] == [[True] * 3] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_only_the_log_sees_is_found_there(results, world_size):
    for of_rank in results[world_size]:
        message, step, _, ranks, saved = of_rank["found_in_the_log"]
        assert "the mean loss since it was logged last is nan" in message
        assert step in (6, 7)
        assert saved == [3]
        assert len(ranks) >= 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_the_gradient_scaler_skips_is_none(results, world_size):
    for of_rank in results[world_size]:
        has_come_down, num_steps, never, overflown, once = of_rank["skipped_steps"]
        assert (has_come_down, num_steps) == (True, 7)
        assert "the gradient scaler's scale has dropped to" in never[0]  # once all are
        assert never[1] == 40
        assert "It began in module '2' (Grows)" in overflown[0]  # in fp16 alone
        assert "the loss is nan, as 35 times before: the gradient scaler skips every step" in overflown[0]
        assert overflown[1] == 36
        assert once == (7, [7])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_goes_on_saves_no_bad_weights(results, world_size):
    for rank, of_rank in enumerate(results[world_size]):
        for on_nan, (step, saved, printed) in zip(("warn", "ignore"), of_rank["warned"], strict=True):
            assert (step, saved) == (14, [2, 3]), on_nan
            assert printed.count("warning: Trainer.fit: step 4") == (rank == 0), on_nan
        saved, printed = of_rank["a_loss_that_is_only_inf"]
        assert saved == [2, 4, 6, 7][-3:]
        assert ("step 4, epoch 1" in printed) == (rank == 0)
        assert ("the loss is inf" in printed) == (rank == 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_not_finite_by_design_is_said_and_saved(results, world_size):
    for rank, of_rank in enumerate(results[world_size]):
        said, saved, _, _ = of_rank["by_design"]
        assert [step for step, _ in said] == saved == [7, 14]
        line = "not finite from the beginning, so not looked at for NaN: parameter 'transitions'\n"
        assert [printed.count(line) for _, printed in said] == [rank == 0] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_buffer_that_becomes_nan_is_not_saved_and_that_is_said_each_epoch(results, world_size):
    for rank, of_rank in enumerate(results[world_size]):
        _, _, (message, step, epoch, _, saved), ignored = of_rank["by_design"]
        assert "step 7, epoch 1" in message
        assert "buffer 'mean' is not finite. It became non-finite in one of the steps 1 to 7. " in message
        assert (step, epoch, saved) == (7, 0, [])
        for last in (7, 14):
            line = f"1 checkpoint left out: weights or buffers are not finite after step {last}; there is none\n"
            assert (line in ignored) == (rank == 0)
        assert 'on_nan="warn"' not in ignored


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_nobody_looks_at_is_not_blamed_on_the_next_step(results, world_size):
    for of_rank in results[world_size]:
        message, step, _, _, saved = of_rank["a_gradient_that_nobody_looks_at"]
        assert (step, saved) == (6, [3])
        assert "It began before, in one of the steps 4 to 5: parameter '2.weight' was not finite any more" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_of_nan_is_never_the_best_and_uses_up_patience(results, world_size):
    for rank, of_rank in enumerate(results[world_size]):
        epoch, checkpoints, printed, best = of_rank["evaluations_of_nan"]
        assert epoch == 4
        assert checkpoints == [(14, False), (28, True)]
        assert math.isfinite(best)
        assert ("evaluation after step 7: loss nan, distance nan; not finite" in printed) == (rank == 0)


def test_infinite_scores_are_never_the_best():
    best = BestMetric("accuracy", "max")
    assert not best.update({"accuracy": math.inf}, 1)
    assert best.value_of(1) is None
    assert best.update({"accuracy": 0.5}, 2)
    assert not best.update({"accuracy": math.nan}, 3)
    assert best.best == 0.5


_SCRIPT = """
import torch
from torch import nn
import phalanx

phalanx.seed_everything(0)
inputs = torch.randn(64, 6)
inputs[50] = float("nan")
data = torch.utils.data.TensorDataset(inputs, torch.zeros(64, 1))
model = nn.Linear(6, 1)
phalanx.Trainer(
    model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss, max_epochs=2, global_batch_size=4,
    snapshot_every=1, save_every=2,
).fit(data)
"""


@pytest.mark.slow
def test_a_job_fails_once_it_is_not_finite_and_its_snapshots_are_good(tmp_path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "phalanx.NonFinite: Trainer.fit: step" in done.stderr + done.stdout
    folder = tmp_path / "runs" / "script"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    failures = [record for record in records if record["kind"] == "not_finite"]
    assert len(failures) == 2
    assert failures[0]["step"] == failures[1]["step"]
    [resumed] = [record["resumed_from"] for record in records if record["kind"] == "start" and record["resumed_from"]]
    assert resumed == {"step": failures[0]["step"] - 1, "source": "memory"}
    model = nn.Linear(6, 1)
    phalanx.checkpoint.load(str(folder / "checkpoints"), {"model": model}, strict=False)
    assert all(torch.isfinite(value).all() for value in state_of(model).values())
    page = Path(folder, "report.html").read_text()
    assert '<strong class="state diverged">diverged</strong>' in page
    assert f"It was stopped. {html.escape(failures[1]['message'])}" in page
