"""What ranks run for the tests of the sentinel: trainings with a bit flipped on one rank, and many without one."""

from __future__ import annotations

import math
import random

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.parallel.divergence.sentinel import LEAST_OF_A_CYCLE
from tests.train._programs import make_data, make_model, quietly

EVERY = 20


class Flip:
    """Flips a bit of a tensor on one rank after a step; every rank draws the same.

    After each later step all ranks compare everything bit for bit, beside the sentinel: whether the flip still lasts.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.rank = draw.randrange(dist.get_world_size())
        self.step = draw.randrange(2, 2 * EVERY)
        self.name = draw.choice(["0.weight", "0.bias", "1.weight", "4.weight", "4.bias"])
        self.key = draw.choice([None, "exp_avg", "exp_avg_sq", "step"])
        self.bit = draw.choice([0, draw.randrange(32 if self.key != "step" else 30)])  # 0 or -1 steps are an error
        self.place = draw.random()
        self.lasts: list[bool] = []  # after each step from the one after the flip on

    def on_step(self, trainer: phalanx.Trainer) -> None:
        if trainer.step > self.step:
            self.lasts.append(_differ(trainer.module, trainer.optimizer))
        if trainer.step == self.step and trainer.session.rank == self.rank:
            parameter = trainer.module.get_parameter(self.name)
            tensor = parameter if self.key is None else trainer.optimizer.state[parameter][self.key]
            mask = -(2**31) if self.bit == 31 else 1 << self.bit
            bits = tensor.detach().view(torch.int32).view(-1)
            bits[int(self.place * len(bits))] ^= mask

    def outcome(self, folder: str) -> str:
        """Train, and return whether the flip was "found", has "healed", or what else has come of it.

        One has healed if all bits are the same on all ranks again before every slice was looked at once, and stay so.
        """
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = phalanx.Trainer(
            model, optimizer, nn.functional.mse_loss, max_steps=self.step + EVERY, global_batch_size=9,
            compare_every=EVERY, callbacks=[self], resume="never", folder=f"{folder}/flip", save_every=1000,
        )  # fmt: skip
        try:
            quietly(trainer.fit, make_data())
        except phalanx.ReplicaMismatch as error:
            in_time = error.since_step < self.step <= error.step <= self.step + EVERY
            is_named = error.ranks == (self.rank,) and f"parameter '{self.name}'" in error.tensors[0]
            return "found" if in_time and is_named else f"misjudged: {vars(self)} {error}"
        except phalanx.NonFinite as error:  # it is so large that the rank's loss is not finite at once
            is_named = error.ranks == (self.rank,) and f"'{self.name.partition('.')[0]}" in str(error)
            in_time = self.step < error.step <= self.step + 2  # the optimizer's state shows a step later
            return "found" if is_named and in_time else f"misjudged: {vars(self)} {error}"
        num_lasting = self.lasts.index(False) if False in self.lasts else EVERY
        stays_healed = len(self.lasts) == EVERY and not any(self.lasts[num_lasting:])
        if num_lasting < EVERY - EVERY // LEAST_OF_A_CYCLE and stays_healed:
            return f"healed in step {num_lasting + 1}"
        return f"missed: {vars(self)}"


def _differ(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether any bit of the model or of the optimizer's state differs between ranks now."""
    try:
        phalanx.check_replicas(model, optimizer)
    except phalanx.ReplicaMismatch:
        return True
    return False


def flip_until(rank: int, world_size: int, folder: str, num_lasting: int) -> list[str]:
    """Return the outcomes of as many trainings as it takes to make that many flips that have not healed."""
    outcomes: list[str] = []
    while sum(not one.startswith("healed") for one in outcomes) < num_lasting:
        outcomes.append(Flip(seed=len(outcomes)).outcome(folder))
    return outcomes


class _Owns(nn.Module):
    """Counts in a buffer what this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen += x.abs().sum()
        return x


def _with_norm() -> nn.Module:
    model = make_model(dropout=0.3, norm=nn.BatchNorm1d)
    model.append(_Owns())
    return model


def _frozen() -> nn.Module:
    model = make_model(dropout=0.3)
    model[0].requires_grad_(False)
    return model


def _large() -> nn.Module:
    """Large enough for a divided step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 300), nn.Tanh(), nn.Linear(300, 1))


def _ignoring() -> nn.Module:
    model = make_model()
    model.register_parameter("own", nn.Parameter(torch.full((3,), float(dist.get_rank()))))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    return model


QUIET = {
    "dropout, batch norm and a counter of each rank's own": (_with_norm, {}),
    "frozen parameters": (_frozen, {"clip_norm": 1.0}),
    "accumulation in bf16": (make_model, {"micro_batch_size": 1, "precision": "bf16"}),
    "fp16 with a scaler": (make_model, {"precision": "fp16"}),
    "a divided step": (_large, {"divide_optimizer": "always"}),
    "the same bits on any number of ranks": (make_model, {"deterministic": "world", "global_batch_size": 8}),
    "a parameter of each rank's own": (_ignoring, {}),
    "as often as is free": (make_model, {"compare_every": "auto"}),
}


def train_quietly(rank: int, world_size: int, folder: str, num_steps: int) -> dict[str, int]:
    """Return how many steps each training has done; one that raises a false alarm has not done all."""
    done = {}
    for name, (build, settings) in QUIET.items():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = phalanx.Trainer(
            model, optimizer, nn.functional.mse_loss, max_steps=math.ceil(num_steps / len(QUIET)),
            **{"global_batch_size": 9, "compare_every": 4, "folder": f"{folder}/{len(done)}", "save_every": 10_000}
            | settings,
        )  # fmt: skip
        quietly(trainer.fit, make_data())
        done[name] = trainer.step
    return done
