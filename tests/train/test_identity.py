"""A folder holds one run: another one is refused with what differs, and one job at a time trains in it."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import phalanx
from phalanx import checkpoint
from phalanx.train.resume.identity import _lines, differences, facts_of
from phalanx.train.settings import Settings
from tests.train._programs import make_data, make_model, mean_squares, quietly, state_of

LIMIT_S = 100


@pytest.fixture(autouse=True)
def alone():
    """Leave the group of one that a trainer joins, and what tracebacks hold of checkpoints."""
    yield
    phalanx.shutdown()
    gc.collect()


def run(folder, *, optimizer=optim.AdamW, lr=0.01, schedule=None, model=None, samples=50, **settings):
    """Train and return the trainer and what it printed."""
    model = make_model() if model is None else model
    made = optimizer(model.parameters(), lr=lr)
    settings = {"max_epochs": 2, "global_batch_size": 8, "folder": str(folder), **settings}
    scheduler = schedule(made) if schedule else None
    trainer = phalanx.Trainer(model, made, mean_squares, scheduler=scheduler, **settings)
    _, printed = quietly(trainer.fit, make_data(samples))
    return trainer, printed


SGD = functools.partial(optim.SGD, momentum=0.9)
ONE_CYCLE = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.05)


def over(num_steps):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))


FIRST = {"schedule": functools.partial(ONE_CYCLE, total_steps=14), "clip_norm": 1.0}
OTHERS = {
    "lr": ({"lr": 0.5, "schedule": None}, ["scheduler OneCycleLR -> None"]),
    "class": ({"optimizer": SGD}, ["optimizer AdamW -> SGD"]),
    "longer": ({"schedule": functools.partial(ONE_CYCLE, total_steps=28)}, ["scheduler.total_steps 14 -> 28"]),
    "peak": ({"schedule": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=14)}, ["0.05 -> 0.1"]),
    "data": ({"samples": 40}, ["data.samples 50 -> 40"]),
    "settings": (
        {"global_batch_size": 16, "seed": 3, "precision": "bf16", "clip_norm": None},
        ["global_batch_size 8 -> 16", "seed 0 -> 3", "precision fp32 -> bf16", "clip_norm 1 -> None"],
    ),
    "model": (
        {"model": nn.Linear(6, 1)},
        ["model.0.weight float32[16, 6] -> nothing", "model.weight nothing -> float32[1, 6]"],
    ),
}  # fmt: skip


def refuse_others(rank, world_size, folder):
    run(folder, **FIRST)
    before = Path(folder, "metrics.jsonl").read_bytes() if rank == 0 else b""
    said = {}
    for name, (changed, _) in OTHERS.items():
        with pytest.raises(phalanx.CheckpointError) as caught:
            run(folder, **(FIRST | changed))
        said[name] = str(caught.value)
        assert caught.value.__cause__ is None, "it would be printed twice"
    assert rank > 0 or Path(folder, "metrics.jsonl").read_bytes() == before
    return said


def test_another_run_is_refused_alike_on_all_ranks_with_what_differs_and_the_ways_on(run_ranks, tmp_path):
    results = run_ranks(refuse_others, 2, str(tmp_path / "run"), timeout_s=LIMIT_S)
    assert results[0] == results[1]
    for name, (_, wanted) in OTHERS.items():
        message = results[0][name]
        assert f"step 14 from {tmp_path}/run/checkpoints: ranks 0 and 1: the folder holds another run:\n" in message
        assert message.count(str(tmp_path)) == message.count("step 14 ") == 1
        assert all(line in message for line in wanted), message
        assert 'resume="never"' in message
        assert "folder=" in message
        assert ('resume="force"' in message) == (name != "model")
        assert message.endswith("(phalanx explain another-run)")
        assert message.count("\n") < 20


def test_another_run_is_refused_with_the_command_that_trained_before_if_it_was_another(tmp_path, monkeypatch):
    before, now = ("phalanx run train.py --epochs 100", "phalanx run train.py --epochs 50")
    monkeypatch.setenv("PHALANX_COMMAND", before)
    run(tmp_path)
    with pytest.raises(phalanx.CheckpointError) as alike:
        run(tmp_path, lr=1e-4)
    monkeypatch.setenv("PHALANX_COMMAND", now)
    with pytest.raises(phalanx.CheckpointError) as changed:
        run(tmp_path, lr=1e-4)
    assert "command" not in str(alike.value)
    assert f"\n  - the other run's command resumes it: {before}\n" in str(changed.value)


def test_a_learning_rate_alone_is_named_as_the_script_gave_it(tmp_path):
    cosine = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=14)
    run(tmp_path, schedule=cosine)
    with pytest.raises(phalanx.CheckpointError, match=r"\n  optimizer\.lr 0\.01 -> 0\.0001\n  What you can do"):
        run(tmp_path, lr=1e-4, schedule=cosine)


@pytest.mark.parametrize("schedule", [over, lambda n: functools.partial(lr_scheduler.CosineAnnealingLR, T_max=n)])
def test_a_schedule_of_another_length_is_another_run_also_in_a_closure(tmp_path, schedule):
    run(tmp_path, schedule=schedule(14))
    with pytest.raises(phalanx.CheckpointError, match=r"scheduler\.\S+ 14 -> 28"):
        run(tmp_path, schedule=schedule(28), max_epochs=4)


def test_what_may_change_is_taken_and_a_resumed_run_says_where_it_goes_on(tmp_path):
    run(tmp_path, max_steps=9)
    trainer, printed = run(
        tmp_path, max_epochs=3, log_every=2, keep_last=1, save_every=5, micro_batch_size=4, patience=None
    )
    assert trainer.step == 21
    assert printed.count("resuming after") == 1
    assert f"resuming after step 9 from disk: epoch 2, in {tmp_path}\n" in printed
    again, printed = run(tmp_path, max_epochs=3)
    assert again.step == 21
    assert printed.count("already finished at step 21; nothing to train") == 1
    assert "resuming" not in printed


class Remembers:
    """A callback with a state."""

    def __init__(self):
        self.num_steps = 0

    def on_step(self, trainer):
        self.num_steps += 1

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def decay(optimizer, num_steps=14):
    return lr_scheduler.StepLR(optimizer, num_steps)


@pytest.mark.parametrize(
    ("added", "line"),
    [
        ({"schedule": decay}, "scheduler None -> StepLR"),
        ({"schedule": lambda _: decay}, "scheduler None -> decay"),  # a function that makes one
        ({"callbacks": [Remembers()]}, "callbacks with state None -> 0 Remembers"),
    ],
)
def test_what_the_other_run_lacked_is_told_as_the_other_differences_and_comes_by_force(tmp_path, added, line):
    run(tmp_path, max_steps=9)
    with pytest.raises(phalanx.CheckpointError) as caught:
        run(tmp_path, **added)
    said = str(caught.value)
    assert f"the folder holds another run:\n  {line}\n  What you can do:\n" in said
    assert "strict" not in said
    trainer, printed = run(tmp_path, resume="force", **added)
    assert trainer.step == 14
    assert f"changed: {line}\n" in printed
    assert all(callback.num_steps == 5 for callback in added.get("callbacks", ()))


def test_a_callback_with_state_may_be_left_out(tmp_path):
    run(tmp_path, max_steps=9, callbacks=[Remembers()])
    assert run(tmp_path)[0].step == 14


def test_a_model_that_has_grown_since_an_old_checkpoint_is_told_what_a_trainer_has_for_it(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("phalanx.train.resume.identity.Identity.state", lambda self: None)
        run(tmp_path, max_steps=9)
    with pytest.raises(phalanx.CheckpointError) as caught:
        run(tmp_path, model=nn.Sequential(*make_model(), nn.Linear(1, 1)))
    assert 'make the model as it was when it was saved, or set resume="force"' in str(caught.value)


def learning_rates(trainer):
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_by_force_weights_and_counters_stay_and_the_settings_of_the_script_win(tmp_path):
    first, _ = run(tmp_path / "run", **FIRST)
    longer = {**FIRST, "schedule": functools.partial(ONE_CYCLE, total_steps=28), "max_epochs": 4}
    seen = []

    class Look:
        def on_fit_start(self, trainer):
            seen.append((trainer.step, trainer.epoch, state_of(trainer.module), learning_rates(trainer)))

    forced, printed = run(tmp_path / "run", resume="force", callbacks=[Look()], **longer)
    [(step, epoch, weights, [lr])] = seen
    assert (step, epoch, forced.step) == (14, 2, 28)
    assert all(torch.equal(value, weights[name]) for name, value in state_of(first.module).items())
    other = optim.AdamW(make_model().parameters())
    schedule = ONE_CYCLE(other, total_steps=28)
    other.step()
    for _ in range(14):
        schedule.step()
    assert lr == other.param_groups[0]["lr"]
    assert "scheduler.total_steps 14 -> 28" in printed
    again, printed = run(tmp_path / "run", **longer)  # from now on it is this run
    assert again.step == 28
    assert "already finished" in printed


@pytest.mark.parametrize("changed", [{"optimizer": SGD}, {"samples": 40, "seed": 5}, {"precision": "fp16"}])
def test_by_force_it_trains_with_another_optimizer_other_data_and_another_precision(tmp_path, changed):
    run(tmp_path, max_steps=9)
    trainer, printed = run(tmp_path, resume="force", **changed)
    assert trainer.epoch == 2
    assert 'resume="force": weights and counters of step 9; changed: ' in printed
    run(tmp_path, **changed)


def test_by_force_a_schedule_that_ends_before_is_named(tmp_path):
    run(tmp_path, **FIRST)
    shorter = {**FIRST, "schedule": functools.partial(ONE_CYCLE, total_steps=7)}
    with pytest.raises(phalanx.CheckpointError, match="this OneCycleLR ends at step 7: make it longer"):
        run(tmp_path, resume="force", **shorter)


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_taken_with_a_line(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("phalanx.train.resume.identity.Identity.state", lambda self: None)
        run(tmp_path, max_steps=9)
    trainer, printed = run(tmp_path, lr=0.5)
    assert trainer.step == 14
    assert printed.count("the checkpoint of step 9 does not say which run it belongs to") == 1


def test_facts_are_the_same_whatever_number_type_and_implementation_was_chosen():
    def facts(**given):
        model = make_model()
        made = optim.SGD(model.parameters(), **given)
        return facts_of(model, made, None, mean_squares, Settings(max_epochs=1))

    assert facts(lr=1, foreach=True) == facts(lr=1.0, foreach=False) == facts(lr=torch.tensor(1.0), foreach=False)
    assert facts(lr=1) != facts(lr=1, momentum=0.9)


def facts_with(model, objective=mean_squares, schedule=None):
    made = optim.SGD(make_model().parameters(), lr=1.0)
    scheduler = lr_scheduler.LambdaLR(made, schedule) if schedule else None
    return facts_of(model, made, scheduler, objective, Settings(max_epochs=1))


def small(*modules):
    return nn.Sequential(nn.Linear(6, 6), *modules)


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (small(nn.ReLU()), small(nn.Tanh()), "module.1 ReLU() -> Tanh()"),
        (small(nn.Dropout(0.1)), small(nn.Dropout(0.3)), "module.1 Dropout(p=0.1) -> Dropout(p=0.3)"),
        (small(), small(nn.Dropout(0.1)), "module.1 nothing -> Dropout(p=0.1)"),
        (small(nn.BatchNorm1d(6)), small(nn.SyncBatchNorm(6)), ""),
        (small(nn.ReLU(inplace=True)), small(nn.ReLU()), ""),
        (small(CheckpointWrapper(nn.Linear(6, 1))), small(nn.Linear(6, 1)), ""),
    ],
)
def test_another_structure_is_another_run_and_another_way_of_computing_it_is_none(before, now, line):
    theirs, ours = facts_with(before), facts_with(now)
    assert _lines(differences(theirs, ours)) == ([line] if line else [])
    assert not differences({**theirs, "torch": "2.0"}, ours)  # which may describe its modules in other words
    older = {name: value for name, value in theirs.items() if not name.startswith(("module.", "torch"))}
    assert not differences(older, ours)


def test_a_module_that_describes_itself_in_new_words_on_each_start_is_the_same():
    class Odd(nn.Module):
        def extra_repr(self):
            return f"at {id(self)}"

    assert facts_with(small(Odd())) == facts_with(small(Odd()))


def test_another_activation_or_loss_is_refused_and_goes_on_by_force(tmp_path):
    def fit(activation, delta=1.0, **options):
        model = nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, 1))
        loss = nn.HuberLoss(delta=delta)
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        trainer = phalanx.Trainer(model, optimizer, loss, folder=str(tmp_path), max_epochs=1, **options)
        return quietly(trainer.fit, make_data())[1]

    fit(nn.ReLU())
    assert "already finished" in fit(nn.ReLU())
    with pytest.raises(
        phalanx.CheckpointError, match=r"\n  module\.1 ReLU\(\) -> Tanh\(\)\n  What you can do"
    ) as caught:
        fit(nn.Tanh())
    assert 'resume="force"' in str(caught.value)
    with pytest.raises(phalanx.CheckpointError, match=r"\n  objective\.delta 1 -> 2\n"):
        fit(nn.ReLU(), 2.0)
    assert "changed: module.1 ReLU() -> Tanh()" in fit(nn.Tanh(), resume="force")


def test_a_schedule_counts_with_its_numbers_but_not_with_texts_and_times():
    def schedule(total, started, default=1):
        clock = time.time() + total - total
        return lambda step, width=default: (step / total, started, clock, width)[0]

    first = facts_with(small(), schedule=schedule(14, "073515"))
    assert first == facts_with(small(), schedule=schedule(14, "073521"))
    assert _lines(differences(first, facts_with(small(), schedule=schedule(28, "")))) == [
        "scheduler.lr_lambdas.0.total 14 -> 28"
    ]
    assert differences(first, facts_with(small(), schedule=schedule(14, "", default=2)))


def counts(name, value):
    """Return whether another value of a global counts, in a schedule that a script makes anew."""

    def facts(value):
        made = {name: value}
        exec(f"schedule = lambda step: step + {name} - {name}", made)
        return facts_with(small(), schedule=made["schedule"])

    return bool(differences(facts(value), facts(value - 5)))


@pytest.mark.parametrize(
    "read", [time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns, lambda: int(time.time())]
)
def test_no_reading_of_a_clock_counts_in_a_schedule(read):
    assert not counts("started", read())
    assert counts("total", 14)
    assert counts("total", 0.5)
    assert counts("tokens", 3_000_000_000)
    made = {"pid": os.getpid()}
    exec("schedule = lambda step: print(pid) or 1.0", made)
    assert "scheduler.lr_lambdas.0.pid" not in facts_with(small(), schedule=made["schedule"])


def test_a_lambda_or_local_function_counts_with_its_code_and_others_with_their_names():
    def facts(source):
        made = {"nn": nn}
        exec(f"def make():\n    {source}\n    return loss", made)
        return facts_with(small(), made["make"]())

    mean = facts("loss = lambda a, b: nn.functional.mse_loss(a, b)")
    assert mean == facts("# with a comment\n\n    loss = lambda a, b: nn.functional.mse_loss(a,   b)")
    for other in (
        "nn.functional.l1_loss(a, b)",
        "nn.functional.mse_loss(a, b, reduction='sum')",
        "nn.functional.mse_loss(b, a)",
    ):
        [line] = _lines(differences(mean, facts(f"loss = lambda a, b: {other}")))
        assert line.startswith("objective.code ")
    within = "def loss(a, b):\n        '{}'\n        return sum(x {} 1 for x in {{'p', 'q'}} if x in {{1, 2, 3}})"
    assert facts(within.format("One", "+")) == facts(within.format("Two", "+"))
    assert differences(facts(within.format("One", "+")), facts(within.format("One", "-")))
    assert not differences(mean | {"python": "2.7"}, facts("loss = lambda a, b: a - b"))
    assert "objective.code" not in facts_with(small(), mean_squares)


def test_groups_and_schedules_within_schedules_have_their_own_facts():
    model = make_model()
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model.parameters(), start=1)]
    made = optim.SGD(groups)
    phases = [lr_scheduler.LinearLR(made, total_iters=5), lr_scheduler.CosineAnnealingLR(made, 9)]
    chained = lr_scheduler.SequentialLR(made, phases, milestones=[5])
    facts = facts_of(model, made, chained, mean_squares, Settings(max_epochs=1))
    assert [facts[f"optimizer.group {i}.lr"] for i in (0, 1)] == ["0.1", "0.2"]
    assert "9" in [value for name, value in facts.items() if name.endswith("T_max")]
    assert facts["scheduler._milestones"] == "(5)"


# ---- one job at a time ---------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch, phalanx
from torch.utils.data import TensorDataset

model = torch.nn.Linear(2, 1)
lr = float(os.environ.get("LR", "0.1")) + 1e-3 * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

class Callback:
    def on_step(self, trainer):
        if trainer.step == 3 and "--wait" in sys.argv:
            print("training", flush=True)
            sys.stdin.read()
        if trainer.step == 3 and "--fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)

options = {"max_steps": 4, "save_every": 1, "callbacks": [Callback()], "snapshot_every": 0, "num_workers": 1}
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
trainer = phalanx.Trainer(model, optimizer, torch.nn.functional.mse_loss, folder="run", **options)
trainer.fit(TensorDataset(torch.ones(320, 2), torch.ones(320, 1)))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def plainly(script, **options):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, script, "--wait"], cwd=script.parent, **streams, **options)


@pytest.mark.slow
def test_a_second_job_in_the_folder_is_refused_until_the_first_has_gone_however_it_goes(script):
    with plainly(script) as first:
        while "training" not in first.stdout.readline():
            pass
        with plainly(script) as second:
            said, _ = second.communicate(timeout=LIMIT_S)
        assert second.returncode == 1
        assert re.search(
            rf"PhalanxError: rank 0: Trainer\.fit: another job is training in run: process {first.pid} on \S+, since ",
            said,
        )
        first.kill()  # its loader's worker may live on for a moment, without the lock
        first.wait(LIMIT_S)
        with plainly(script) as third:
            said, _ = third.communicate(timeout=LIMIT_S)
        assert third.returncode == 0, said
        assert "already finished" in said or "resuming after step" in said


def launched(script, *arguments, **environ):
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--max-restarts", "1"]
    return subprocess.run(
        [*command, script, *arguments],
        cwd=script.parent,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
def test_a_restart_of_the_same_job_is_never_refused_and_one_of_a_refused_job_always(script):
    done = launched(script, "--fail")  # whose script draws another learning rate each time
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkpoint.list_checkpoints(script.parent / "run" / "checkpoints")[-1].step == 4
    done = launched(script, LR="0.7")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("holds another run") == 1, "once on the screen"


def test_a_folder_that_cannot_be_locked_is_said_to_be_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("phalanx.checkpoint.disk.claim.fcntl.flock", refuse)
    trainer, printed = run(tmp_path)
    assert trainer.step == 14
    assert (
        printed.count(
            f"{tmp_path} can't be locked (Operation not supported): make sure that no other job trains in it\n"
        )
        == 1
    )


def train_where_no_folder_can_be(rank, world_size, folder):
    said = []

    class Seen:
        def on_step(self, trainer):
            said.append("a step")

    for name in ("", "/inside"):
        with pytest.raises(phalanx.PhalanxError) as caught:
            run(folder + name, callbacks=[Seen()])
        said.append(str(caught.value))
    return said


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank_before_the_first_step(run_ranks, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for rank, said in enumerate(run_ranks(train_where_no_folder_can_be, 2, str(file), timeout_s=LIMIT_S)):
        assert len(said) == 2
        assert f"rank {rank}: Trainer.fit: the run folder {file} can't be made: File exists. Give" in said[0]
        assert f"rank {rank}: Trainer.fit: the run folder {file}/inside can't be made: Not a directory. Give" in said[1]


def test_a_note_of_a_holder_that_makes_no_sense_is_no_reason_to_fail(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff[[[[")
    run(tmp_path)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def train_twice_in_one_process(rank, world_size, folder):
    """Return what two Trainers say that share a folder, and what one says whose optimizer has another model."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(2):
            model = nn.Linear(4, 1)
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            settings = {"max_epochs": 1, "global_batch_size": 4, "folder": folder}
            trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, **settings)
            trainer.fit(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)))
    with pytest.raises(ValueError, match="the optimizer has no parameter of this model"):
        phalanx.Trainer(nn.Linear(4, 1), optimizer, nn.functional.mse_loss, max_epochs=1)
    return said.getvalue()


def test_a_second_trainer_of_a_process_hears_that_it_takes_up_a_run(run_ranks, tmp_path):
    [said] = run_ranks(train_twice_in_one_process, 1, str(tmp_path))
    assert said.count("another Trainer of this process has trained in") == 1
    assert said.count("already finished at step 2") == 1
