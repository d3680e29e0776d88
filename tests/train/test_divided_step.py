"""Ranks that divide the optimizer's step have the bits of ranks that take all of it, whatever touches the state."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx
from phalanx.parallel.pieces import ELEMENTWISE
from phalanx.train.step import divided_step
from tests.train._programs import make_data, mean_squares, quietly, train

pytestmark = pytest.mark.usefixtures("warm_jobs")

STEPS = 12
HOWS = ("never", "always")
MAKERS = {
    **{cls.__name__: (cls, {}) for cls in sorted(ELEMENTWISE, key=lambda cls: cls.__name__)},
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "AdamW with amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam on foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
}


class Watch:
    """Calls a function after each step, and counts the steps that were divided."""

    def __init__(self, do=lambda trainer: None):
        self._do, self.num_divided = do, 0

    def on_step(self, trainer):
        self.num_divided += trainer._attempt.stepper._divided._shards is not None
        self._do(trainer)


def make_model():
    """Two parameters to divide, one of them with a rest, one that gets no gradient at first, and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 300), nn.Tanh(), nn.Linear(300, 523), Mean())


class Mean(nn.Module):
    def forward(self, inputs):
        return inputs.mean(1, keepdim=True)


def fit(folder, how, *, maker="Adam", do=None, model=None, prepare=None, callbacks=(), **settings):
    """Train for a few steps; return the bits of weights and state, and how many steps were divided."""
    cls, arguments = MAKERS[maker]
    model = model or make_model()
    optimizer = cls(model.parameters(), **arguments)
    if prepare is not None:
        prepare(model, optimizer)
    watch = Watch(do or (lambda trainer: None))
    trainer = phalanx.Trainer(
        model, optimizer, mean_squares, callbacks=callbacks, folder=folder,
        **{"global_batch_size": 8, "max_steps": STEPS, "divide_optimizer": how, "snapshot_every": 0, **settings},
    )  # fmt: skip
    trainer.callbacks = [*callbacks, watch]
    _, printed = quietly(trainer.fit, make_data())
    return bits_of(trainer), watch.num_divided, printed


def bits_of(trainer):
    state = trainer.optimizer.state_dict()["state"]
    values = {f"{index}.{name}": value for index, of in state.items() for name, value in of.items()}
    return {**{name: p.detach().clone() for name, p in trainer.module.named_parameters()}, **values}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))]


def both(folder, **options):
    """Train in both ways, and return what differs, and how many steps were divided."""
    torch.set_num_threads(1)
    whole, num_whole, _ = fit(f"{folder}/never", "never", **options)
    divided, num_divided, _ = fit(f"{folder}/always", "always", **options)
    assert num_whole == 0
    return differing(whole, divided), num_divided


def with_each_optimizer(rank, world_size, folder):
    return {maker: both(f"{folder}/{maker}", maker=maker) for maker in MAKERS}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_optimizer_has_the_same_bits_divided(run_ranks, tmp_path, world_size):
    for results in run_ranks(with_each_optimizer, world_size, str(tmp_path), timeout_s=120):
        assert results == dict.fromkeys(MAKERS, ([], STEPS))


def replace_state(trainer):
    if trainer.step == 4:
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    if trainer.step == 6:
        for parameter in trainer.module.parameters():
            parameter.data = parameter.data.clone().mul_(0.5)
    if trainer.step == 8:
        trainer.optimizer.state.clear()


def freeze(trainer):
    trainer.module[2].weight.requires_grad_(trainer.step not in (3, 4, 5))


def hook_late(trainer):
    """Scale each gradient by its norm in a hook before the step, and each weight in one after it."""
    if trainer.step == 4:
        trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: scale(optimizer, lambda p: p.grad))
        trainer.optimizer.register_step_post_hook(lambda optimizer, *_: scale(optimizer, lambda p: p.data))


def scale(optimizer, value_of):
    for parameter in optimizer.param_groups[0]["params"]:
        value = value_of(parameter)
        if value is not None:
            value.div_(value.norm() + 0.5)


def hold_back(model, optimizer):
    """Leave a large parameter to a group that comes later, as in gradual unfreezing."""
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model[2].weight]


def grow(trainer):
    if trainer.step == 4:
        trainer.optimizer.add_param_group({"params": [trainer.module[2].weight], "lr": 0.01})


def shrink(trainer):
    if trainer.step == 4:
        parameter = trainer.optimizer.param_groups[0]["params"].pop(2)  # a divided one
        trainer.optimizer.state.pop(parameter)


def clip_and_schedule(trainer):
    trainer.optimizer.param_groups[0]["lr"] *= 0.9


def with_each_disturbance(rank, world_size, folder):
    return {
        "replaced": both(f"{folder}/replaced", do=replace_state),
        "frozen": both(f"{folder}/frozen", do=freeze),
        "hooked": both(f"{folder}/hooked", do=hook_late),
        "grown": both(f"{folder}/grown", do=grow, prepare=hold_back),
        "shrunk": both(f"{folder}/shrunk", do=shrink),
        "accumulated": both(f"{folder}/accumulated", micro_batch_size=2),
        "clipped": both(f"{folder}/clipped", do=clip_and_schedule, clip_norm=0.01),
        "channels last": both(f"{folder}/layout", prepare=lambda model, _: transpose(model[2].weight)),
        "the same on any number of ranks": both(f"{folder}/world", deterministic="world", virtual_shards=2),
    }


def transpose(parameter):
    parameter.data = parameter.data.t().contiguous().t()


def test_what_touches_state_and_parameters_between_steps_changes_no_bit(run_ranks, tmp_path):
    for results in run_ranks(with_each_disturbance, 2, str(tmp_path), timeout_s=120):
        assert {name: different for name, (different, _) in results.items()} == {name: [] for name in results}
        assert all(num_divided == STEPS for _, num_divided in results.values())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_divided_run_resumes_on_any_number_of_ranks(run_ranks, tmp_path, world_size):
    for how in HOWS:
        run_ranks(stop_early, 2, str(tmp_path / how), how, timeout_s=60)
    whole, divided = (run_ranks(to_the_end, world_size, str(tmp_path / how), how, timeout_s=60) for how in HOWS)
    for (one, _), (other, num_divided) in zip(whole, divided, strict=True):
        assert differing(one, other) == []
        assert num_divided == STEPS - 5


def look_at_gradients(rank, world_size, folder):
    """Return what each of three onlookers has seen of whole gradients, undivided and divided."""
    return {
        name: [watched(f"{folder}/{name}/{how}", how, onlooker, rank) for how in HOWS]
        for name, onlooker in {"hook": hook_of_rank_1, "step": wrapped_step, "pass": pass_of_ones_own}.items()
    }


def watched(folder, how, onlooker, rank):
    torch.set_num_threads(1)
    model, seen = make_model(), []
    optimizer = torch.optim.Adam(model.parameters())
    look = lambda: seen.append(sum(float(p.grad.double().square().sum()) for p in model.parameters()))  # noqa: E731
    trainer = phalanx.Trainer(
        model, optimizer, training_step=onlooker(optimizer, look, rank), global_batch_size=8, max_steps=STEPS,
        divide_optimizer=how, snapshot_every=0, folder=folder,
    )  # fmt: skip
    quietly(trainer.fit, make_data())
    return seen


def loss_of(model, batch):
    return mean_squares(model(batch[0]), batch[1])


def hook_of_rank_1(optimizer, look, rank):
    num_passes = 0

    def training_step(model, batch):
        nonlocal num_passes
        num_passes += 1
        if num_passes == 4 and rank == 1:
            optimizer.register_step_pre_hook(lambda *_: look())
        return loss_of(model, batch)

    return training_step


def wrapped_step(optimizer, look, rank):
    step = optimizer.step

    def looking_step(*args):
        look()
        return step(*args)

    optimizer.step = looking_step
    return loss_of


def pass_of_ones_own(optimizer, look, rank):
    """Sharpness-aware minimization begins so: a backward pass whose gradients are looked at, and then another one."""

    def training_step(model, batch):
        loss_of(model, batch).backward()
        look()
        optimizer.zero_grad()
        return loss_of(model, batch)

    return training_step


def test_whoever_looks_at_gradients_sees_the_means(run_ranks, tmp_path):
    for rank, results in enumerate(run_ranks(look_at_gradients, 2, str(tmp_path), timeout_s=60)):
        for name, (whole, divided) in results.items():
            assert len(whole) == (rank * (STEPS - 3) if name == "hook" else STEPS)
            assert divided == whole, name


def stop_early(rank, world_size, folder, how):
    torch.set_num_threads(1)
    fit(folder, how, max_steps=5)


def to_the_end(rank, world_size, folder, how):
    torch.set_num_threads(1)
    return fit(folder, how)[:2]


def decide(rank, world_size, folder, least_gain):
    torch.set_num_threads(1)
    divided_step._LEAST_S, divided_step._LEAST_GAIN = 0, least_gain
    return fit(folder, "auto")


@pytest.mark.parametrize(("least_gain", "is_divided"), [(1e-9, True), (1e9, False)])
def test_the_first_steps_decide_on_all_ranks_alike(run_ranks, tmp_path, least_gain, is_divided):
    (bits, num, printed), (others_bits, others_num, _) = run_ranks(decide, 2, str(tmp_path), least_gain, timeout_s=60)
    assert num == others_num == (STEPS - 4 if is_divided else 5)
    assert ("each rank steps its part of the optimizer" in printed) == is_divided
    assert differing(bits, others_bits) == []


def decide_with_a_callback(rank, world_size, folder):
    torch.set_num_threads(1)
    divided_step._LEAST_S, divided_step._LEAST_GAIN = 0, 1e-9
    return [fit(f"{folder}/{how}", how, callbacks=[Watch()])[1] for how in ("auto", "always")]


def test_a_callback_has_a_state_that_is_its_ranks_own_unless_asked_for(run_ranks, tmp_path):
    for num_auto, num_always in run_ranks(decide_with_a_callback, 2, str(tmp_path), timeout_s=60):
        assert num_auto == 0
        assert num_always > 0


def leave_alone(rank, world_size, folder):
    torch.set_num_threads(1)
    hook = lambda *_: None  # noqa: E731
    cases = {
        "hook": {"prepare": lambda _, optimizer: optimizer.register_step_post_hook(hook)},
        "scaler": {"precision": "fp16"},
        "torch's wrapper": {"model": nn.parallel.DistributedDataParallel(make_model())},
    }
    found = {name: fit(f"{folder}/{name}", "always", **case)[1] for name, case in cases.items()}
    handle = register_optimizer_step_pre_hook(hook)
    found["hook on all"] = fit(f"{folder}/all", "always")[1]
    handle.remove()
    divided_step.has_room, has_room = lambda *_: rank == 0, divided_step.has_room  # the other rank has none
    found["room"] = fit(f"{folder}/room", "always")[1]
    divided_step.has_room = has_room
    torch.set_num_threads(2)
    found["threads"] = fit(f"{folder}/threads", "always")[1]
    torch.set_num_threads(1)
    model = make_model()
    zero = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    watch = Watch()
    trainer = phalanx.Trainer(
        model, zero, mean_squares, max_steps=2, callbacks=[watch], divide_optimizer="always", folder=f"{folder}/zero"
    )
    quietly(trainer.fit, make_data())
    return {**found, "zero": watch.num_divided, "small": small_model(folder)}


def small_model(folder):
    watch = Watch()
    train(f"{folder}/small", callbacks=[watch], divide_optimizer="always")
    return watch.num_divided


def test_what_cannot_be_divided_with_the_same_bits_is_left_alone(run_ranks, tmp_path):
    for found in run_ranks(leave_alone, 2, str(tmp_path), timeout_s=60):
        assert found == dict.fromkeys(found, 0)
        assert len(found) == 8


def state_after(rank, world_size, folder):
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = phalanx.Trainer(model, optimizer, mean_squares, max_steps=3, divide_optimizer="always", folder=folder)
    quietly(trainer.fit, make_data())
    average = optimizer.state[model[2].weight]["exp_avg"]
    dist.barrier()
    average.fill_(rank)
    dist.barrier()
    return float(average.min()), float(average.max())


def test_after_the_training_each_rank_has_a_state_of_its_own(run_ranks, tmp_path):
    assert run_ranks(state_after, 2, str(tmp_path), timeout_s=60) == [(0.0, 0.0), (1.0, 1.0)]


def bits_of_job(folder, *arguments):
    script = Path(__file__).parent / "_divided.py"
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"BITS (\w+)", done.stdout)), "restart 1 of 1" in done.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_divided_run_leaves_the_bits_of_a_whole_one(tmp_path):
    (whole,), was_restarted = bits_of_job(tmp_path, "never", "-1")
    assert not was_restarted
    assert bits_of_job(tmp_path, "always", "9") == ({whole}, True)
