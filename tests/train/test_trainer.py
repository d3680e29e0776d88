"""`Trainer` trains as a loop by hand would, on any number of ranks, and goes on where it was stopped."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import phalanx
from phalanx.data import GlobalBatches
from phalanx.train.report.origin import processes_of
from phalanx.train.settings import Settings
from phalanx.train.step.objective import Objective
from tests.train._programs import (
    Numbered,
    Seen,
    make_data,
    make_model,
    mean_squares,
    quietly,
    state_of,
    train,
)


def by_hand():
    """Two epochs with AdamW in one process, on whole global batches in the trainer's order."""
    data, model = make_data(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    batches = GlobalBatches(len(data), 8)
    for epoch in range(2):
        batches.epoch, batches.place = epoch, 0
        for (indices,) in batches:
            inputs, targets = (tensor[indices] for tensor in data.tensors)
            optimizer.zero_grad()
            mean_squares(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    return state_of(model)


def assert_close(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], **tolerance)


def are_equal(trainer, other):
    first, second = state_of(trainer.model), state_of(other.model)
    return all(torch.equal(value, second[name]) for name, value in first.items())


def run_programs(rank, world_size, folder, names):
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers
    return {name: PROGRAMS[name](f"{folder}/{name}") for name in names}


def train_plainly(folder):
    trainer, printed = train(folder, validation=make_data(13))
    return state_of(trainer.model), trainer.evaluation, printed


def train_in_small_passes(folder):
    return state_of(train(folder, micro_batch_size=1)[0].model)


def train_with_torchs_ddp(folder):
    model = nn.parallel.DistributedDataParallel(make_model()) if dist.get_world_size() > 1 else make_model()
    return state_of(train(folder, model=model, micro_batch_size=2)[0].model)


def train_with_fsdp(folder):
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model)
    trainer, _ = train(folder, model=model, validation=make_data(7), micro_batch_size=2, max_epochs=1)
    resumed = make_model()
    fully_shard(resumed)
    trainer, _ = train(folder, model=resumed, validation=make_data(7), micro_batch_size=2)
    return {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}, trainer.evaluation


def train_clipped(folder):
    ours = train(folder, clip_norm=0.05)[0]
    return state_of(ours.model), float(ours._attempt.stepper.grad_norm)


def resume_in_mid_epoch(folder):
    """Dropout, a scheduler, clipping: everything that has a state."""
    options = {"clip_norm": 0.5, "micro_batch_size": 2}
    whole = train(f"{folder}/whole", model=make_model(dropout=0.5), **options)[0]
    train(f"{folder}/parts", model=make_model(dropout=0.5), steps=3, **options)
    torch.manual_seed(99)
    train(f"{folder}/parts", model=make_model(dropout=0.5), steps=9, **options)
    resumed, printed = train(f"{folder}/parts", model=make_model(dropout=0.5), **options)
    return are_equal(whole, resumed), resumed.step == whole.step == 14, printed


def resume_with_loader(folder):
    def parts():
        sampler = phalanx.DistributedSampler(make_data(), shuffle=True)
        return DataLoader(make_data(), batch_size=4, sampler=sampler)

    whole = train(f"{folder}/whole", model=make_model(dropout=0.5), data=parts())[0]
    train(f"{folder}/parts", model=make_model(dropout=0.5), data=parts(), steps=5)
    resumed = train(f"{folder}/parts", model=make_model(dropout=0.5), data=parts())[0]
    return are_equal(whole, resumed)


def evaluate_and_predict(folder):
    trainer, _ = train(folder, max_epochs=1)
    results = []
    for length in (1, 7, 50):
        data = make_data(length)
        results.append((trainer.evaluate(data), trainer.predict(data), trainer.predict(data.tensors[0])))
    return results, state_of(trainer.model)


def train_the_same_anywhere(folder):
    options = {"deterministic": "world", "virtual_shards": 4, "clip_norm": 0.5, "max_epochs": 1}
    threads = torch.get_num_threads()
    trainer, _ = train(folder, model=make_model(dropout=0.3), **options)
    torch.set_num_threads(threads)
    return state_of(trainer.model)


def train_in_half_precision(folder):
    results = {}
    for precision in ("bf16", "fp16"):
        trainer, _ = train(f"{folder}/{precision}", precision=precision, clip_norm=1.0, max_epochs=6)
        results[precision] = trainer.evaluate(make_data())["loss"], trainer._attempt.stepper.scaler.state_dict()
    return results


def stop_early(folder):
    seen = Seen()
    trainer, _ = train(folder, validation=make_data(9), lr=0.0, patience=2, max_epochs=9, callbacks=(seen,))
    steps = [c.step for c in phalanx.checkpoint.list_checkpoints(trainer.checkpoints)]
    again = Seen()
    same, _ = train(folder, validation=make_data(9), lr=0.0, patience=2, max_epochs=9, callbacks=(again,))
    return trainer.epoch, steps, seen.events[:3], seen.num_steps, again.num_steps, again.events, same.evaluation


def uneven_loaders(folder):
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [(torch.ones(2, 6), torch.ones(2, 1))] * (3 + rank)
    return train(folder, data=batches, max_epochs=2)[0].step


def refuse_loader(folder):
    if dist.get_world_size() == 1:
        return ""
    with pytest.raises(ValueError, match="the same samples to every rank") as caught:
        train(folder, data=DataLoader(make_data(), batch_size=4, shuffle=True))
    return str(caught.value)


def training_step_of_mine(folder):
    def step(model, batch):
        inputs, targets = batch
        return nn.functional.l1_loss(model(inputs), targets)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = phalanx.Trainer(model, optimizer, training_step=step, max_steps=30, folder=folder, num_workers=1)
    (result, _) = quietly(trainer.fit, make_data(), make_data(9))
    alive = [multiprocessing.active_children()]
    for method in (trainer.evaluate, trainer.predict):
        method(make_data(9))
        alive.append(multiprocessing.active_children())
    return result, alive


def keep_the_best(folder):
    """Evaluations get worse from the second on; checkpoints are saved in mid-epoch too, and by a resumed run."""
    settings = {"validation": make_data(9), "lr": 5.0, "save_every": 5, "keep_last": 1}
    trainer, _ = train(folder, max_epochs=4, **settings)
    values = {c.step: c.metric for c in phalanx.checkpoint.list_checkpoints(trainer.checkpoints)}
    train(folder, max_epochs=9, steps=30, **settings)
    after = {c.step: c.metric for c in phalanx.checkpoint.list_checkpoints(trainer.checkpoints)}
    return -trainer._best_metric.best, values, after


def begin_anew(folder):
    train(folder)
    new, printed = train(folder, steps=3, resume="never")
    again, _ = train(folder, steps=4)
    train(f"{folder}/soon", steps=1)
    for _ in range(2):  # within a second
        train(f"{folder}/soon", steps=1, resume="never")
    num_aside = sum(name.startswith("metrics.jsonl.before") for name in os.listdir(f"{folder}/soon"))
    return (
        new.step,
        again.step,
        [c.step for c in phalanx.checkpoint.list_checkpoints(new.checkpoints)],
        printed,
        num_aside,
    )


def resume_before_a_short_batch(folder):
    """50 samples in batches of 8 leave 2 for the last one: some of four ranks have none."""
    whole, _ = train(f"{folder}/whole", max_epochs=1)
    train(f"{folder}/parts", max_epochs=1, steps=6)
    resumed, _ = train(f"{folder}/parts", max_epochs=1)
    return are_equal(whole, resumed), resumed.step


def resume_callbacks(folder):
    train(folder, steps=5, callbacks=(Seen(), Seen()))
    callbacks = Seen(), Seen()
    train(folder, callbacks=callbacks)
    return [callback.num_steps for callback in callbacks]


def stop_within_an_epoch(folder):
    def make():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return model, optimizer, schedule

    for steps in (3, 5, None):
        model, optimizer, schedule = make()
        settings = {"max_epochs": 2, "max_steps": steps, "scheduler_interval": "epoch", "global_batch_size": 8}
        trainer = phalanx.Trainer(model, optimizer, mean_squares, scheduler=schedule, folder=folder, **settings)
        quietly(trainer.fit, make_data())
    return optimizer.param_groups[0]["lr"]


def refuse_data_without_a_step(folder):
    with pytest.raises(ValueError, match="yields no step"):
        train(folder, data=make_data(5), drop_last=True)
    with pytest.raises(ValueError, match="yields no step"):
        train(f"{folder}2", data=[])
    with pytest.raises(ValueError, match="patience needs validation_data"):
        train(f"{folder}3", patience=2)


def refuse_parts(folder):
    """Train on parts that ranks have made themselves; return how many samples of how many came in an epoch."""
    session = phalanx.init()
    rank, size = session.rank, session.world_size
    part = phalanx.DataPartitioner(make_data(), [1 / size] * size).use(rank)
    if size > 1:
        with pytest.raises(ValueError, match="ranks have different datasets"):
            train(folder, data=part)
    trainer, _ = train(folder, data=phalanx.DataLoader(part, 1, is_own_part=True, num_workers=0), max_epochs=1)
    if size > 1:
        with pytest.raises(ValueError, match=f"samples by rank: {len(part)}, {len(part)}"):
            trainer.evaluate(part)
    return trainer.step, len(part)


def train_on_a_stream(folder):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*make_data(16).tensors, strict=True)

    trainer, _ = train(folder, data=DataLoader(Stream(), batch_size=4), steps=6, max_epochs=None)
    return trainer.step


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        train_plainly, train_in_small_passes, train_with_torchs_ddp, train_with_fsdp, train_clipped,
        resume_in_mid_epoch, resume_with_loader, evaluate_and_predict, train_the_same_anywhere,
        train_in_half_precision, stop_early, uneven_loaders, refuse_loader, training_step_of_mine,
        keep_the_best, begin_anew, resume_before_a_short_batch, resume_callbacks, stop_within_an_epoch,
        refuse_data_without_a_step, refuse_parts, train_on_a_stream,
    )
}  # fmt: skip
_ONLY = {
    4: ["train_plainly", "train_the_same_anywhere", "resume_before_a_short_batch"],
    3: ["train_plainly", "evaluate_and_predict"],
}


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """What each rank returned from each program, by world size."""
    return {
        size: run_ranks(
            run_programs, size, str(tmp_path_factory.mktemp("train")), _ONLY.get(size, list(PROGRAMS)), timeout_s=300
        )
        for size in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_trains_to_the_weights_of_a_loop_by_hand(results, world_size):
    for of_rank in results[world_size]:
        state, evaluation, _ = of_rank["train_plainly"]
        assert_close(state, by_hand())
        assert evaluation == pytest.approx(results[1][0]["train_plainly"][1])


def test_only_rank_zero_speaks_and_tells_the_arithmetic_of_batches(results):
    first, second = (of_rank["train_plainly"][2] for of_rank in results[2])
    assert second == ""
    assert "global batch 8 = 2 ranks x 1 pass x 4; 50 samples, 7 steps an epoch, 14 in all" in first
    assert "epoch 2, step 14: loss" in first


@pytest.mark.parametrize("name", ["train_in_small_passes", "train_with_torchs_ddp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation_and_torchs_ddp_train_to_the_same_weights(results, world_size, name):
    for of_rank in results[world_size]:
        assert_close(of_rank[name], by_hand())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_fsdp2_trains_and_resumes_to_the_same_weights(results, world_size):
    for of_rank in results[world_size]:
        state, evaluation = of_rank["train_with_fsdp"]
        assert_close(state, by_hand())
        assert evaluation["loss"] > 0


def test_the_norm_is_clipped_as_torch_clips_it(results):
    (alone, norm), *_ = (of_rank["train_clipped"] for of_rank in results[1])
    for of_rank in results[2]:
        state, other = of_rank["train_clipped"]
        assert_close(state, alone)
        assert other == pytest.approx(norm)
    assert any(not torch.allclose(value, by_hand()[name]) for name, value in alone.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_in_three_parts_has_the_bits_of_a_whole_one(results, world_size):
    for rank, of_rank in enumerate(results[world_size]):
        is_same, is_whole, printed = of_rank["resume_in_mid_epoch"]
        assert is_same
        assert is_whole
        assert ("resuming after step 9 from disk" in printed) == (rank == 0)
        assert of_rank["resume_with_loader"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_sample_once_and_predictions_come_in_order(results, world_size):
    for of_rank in results[world_size]:
        evaluations, state = of_rank["evaluate_and_predict"]
        model = make_model()
        model.load_state_dict(state)
        model.eval()
        for length, (evaluation, predicted, of_inputs) in zip((1, 7, 50), evaluations, strict=True):
            inputs, targets = make_data(length).tensors
            with torch.no_grad():
                outputs = model(inputs)
            torch.testing.assert_close(predicted, outputs)
            torch.testing.assert_close(of_inputs, outputs)
            assert evaluation["loss"] == pytest.approx(float(mean_squares(outputs, targets)), rel=1e-5)
            assert evaluation["distance"] == pytest.approx(float((outputs - targets).abs().mean()), rel=1e-5)


def test_one_two_and_four_ranks_have_the_same_bits_when_asked_for(results):
    [want] = [of_rank["train_the_same_anywhere"] for of_rank in results[1]]
    for world_size in (2, 4):
        for of_rank in results[world_size]:
            for name, value in of_rank["train_the_same_anywhere"].items():
                assert torch.equal(value, want[name]), (world_size, name)


def test_half_precisions_learn(results):
    for world_size in (1, 2):
        for of_rank in results[world_size]:
            for precision, (loss, scaler) in of_rank["train_in_half_precision"].items():
                assert loss < 0.3, precision
                assert bool(scaler) == (precision == "fp16")


def test_patience_ends_the_training_and_a_finished_run_stays_so(results):
    for of_rank in results[2]:
        epoch, steps, events, num_steps, num_again, events_again, evaluation = of_rank["stop_early"]
        assert epoch == 3
        assert steps == [7, 14, 21]
        assert events == [("on_fit_start", 0), ("on_step", 1), ("on_step", 2)]
        assert num_steps == num_again == 21
        assert [name for name, _ in events_again] == ["on_fit_start", "on_fit_end"]
        assert evaluation["loss"] > 0


def test_loaders_of_different_lengths_end_their_epochs_together(results):
    assert [of_rank["uneven_loaders"] for of_rank in results[2]] == [8, 8]


def test_a_loader_that_does_not_divide_is_refused(results):
    assert all("pass the dataset itself" in of_rank["refuse_loader"] for of_rank in results[2])


def test_a_training_step_of_ones_own_and_workers_train_and_no_worker_outlives_its_use(results):
    alone, alive = results[1][0]["training_step_of_mine"]
    with_another, alive_there = results[2][1]["training_step_of_mine"]
    assert alone["loss"] == pytest.approx(with_another["loss"], rel=1e-3)
    assert alive == alive_there == [[], [], []]  # the garbage collector would wait for each


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_checkpoint_stays_whatever_is_saved_between_evaluations_and_after_a_resumption(results, world_size):
    for of_rank in results[world_size]:
        best, values, after = of_rank["keep_the_best"]
        assert best in values.values()
        assert best in after.values()
        assert max(values) == 28
        assert max(after) == 30


def test_a_run_that_begins_anew_leaves_the_old_one_aside(results):
    for of_rank in results[2]:
        assert of_rank["begin_anew"][:3] == (3, 4, [3, 4])
        assert "resuming" not in of_rank["begin_anew"][3]
        assert of_rank["begin_anew"][4] == 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_last_batch_with_fewer_samples_than_ranks_resumes_to_the_bit(results, world_size):
    assert [of_rank["resume_before_a_short_batch"] for of_rank in results[world_size]] == [(True, 7)] * world_size


def test_each_callback_resumes_with_its_own_state(results):
    assert [of_rank["resume_callbacks"] for of_rank in results[2]] == [[14, 14]] * 2


def test_stopping_within_an_epoch_does_not_end_it(results):
    assert [of_rank["stop_within_an_epoch"] for of_rank in results[1]] == [0.25]


def test_a_stream_of_unknown_length_trains_for_a_number_of_steps(results):
    assert [of_rank["train_on_a_stream"] for of_rank in results[2]] == [6, 6]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ranks_own_part_is_refused_as_a_dataset_and_taken_in_a_loader(results, world_size):
    assert [of_rank["refuse_parts"] for of_rank in results[world_size]] == [(50 // world_size,) * 2] * world_size


def train_until_signalled(rank, world_size, folder, number):
    class Interrupt:
        def on_step(self, trainer):
            if trainer.step == 5 and rank == world_size - 1:
                os.kill(os.getpid(), number)

    try:
        train(folder, callbacks=(Interrupt(),))
    except SystemExit as end:
        saved = [c.step for c in phalanx.checkpoint.list_checkpoints(f"{folder}/checkpoints")]
        resumed, _ = train(folder)
        return end.code, saved, state_of(resumed.model)
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_any_rank_saves_and_ends_all_with_a_code_of_its_own(run_ranks, tmp_path, number):
    for code, saved, state in run_ranks(train_until_signalled, 2, str(tmp_path), number):
        assert code == 75
        assert saved == [6]  # the step under way
        assert_close(state, by_hand())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 6 in [record["step"] for record in records if record["kind"] == "step"]  # what had not been logged yet
    kinds = [record["kind"] for record in records]
    assert kinds.count("preempted") == 1
    assert kinds.count("start") == 2


def note_samples(rank, world_size, folder, max_steps):
    """Train on samples' numbers; return those of this rank, in order."""
    taken = []

    def step(model, batch):
        inputs, numbers = batch
        taken.extend(int(number) for number in numbers)
        return model(inputs).mean()

    model = make_model()
    options = {"max_epochs": 1, "max_steps": max_steps, "global_batch_size": 7, "folder": folder}
    trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step, **options)
    quietly(trainer.fit, Numbered(40))
    return taken


def test_each_sample_of_an_epoch_comes_once_though_the_number_of_ranks_changes(run_ranks, tmp_path):
    taken = []
    for world_size, max_steps in ((3, 2), (1, 3), (2, None)):
        taken += itertools.chain(*run_ranks(note_samples, world_size, str(tmp_path), max_steps))
    assert sorted(taken) == list(range(40))


def train_scaled(rank, world_size, folder, steps):
    return train(folder, on_resize="scale", steps=steps)[1]


def test_the_global_batch_grows_with_the_ranks_when_asked_to(run_ranks, tmp_path):
    [alone] = run_ranks(train_scaled, 1, str(tmp_path), 3)
    both, _ = run_ranks(train_scaled, 2, str(tmp_path), None)
    assert "global batch 8 = 1 rank x 1 pass x 8" in alone
    assert "global batch 16 = 2 ranks x 1 pass x 8" in both


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say when to stop"),
        ({"max_epochs": 0}, "max_epochs must be at least 1"),
        ({"max_epochs": 1, "precision": "fp8"}, "precision must be one of"),
        ({"max_epochs": 1, "virtual_shards": 6}, "power of two"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "either a loss or a training_step"),
        ((nn.functional.mse_loss, max), "either a loss or a training_step"),
        ((None, max, None, {"accuracy": max}), "metrics need a loss"),
        ((nn.functional.mse_loss, None, max, {"accuracy": max}), "Return accuracy from evaluation_step"),
    ],
)
def test_an_objective_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Objective(*arguments)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [("aaa", "processes of the ranks: 10 11 12"), ("aab", "processes of the ranks: 10 11 on a; 12 on b")],
)
def test_the_processes_of_several_hosts_are_told_with_these(hosts, words):
    class Ranks:
        def gather(self, mine):
            return [(host, 10 + rank) for rank, host in enumerate(hosts)]

    assert processes_of(Ranks()) == words
