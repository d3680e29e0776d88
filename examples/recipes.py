"""Recipes for `phalanx.Trainer`, each a function; all of them, or those that are named, in one job:

phalanx run --nproc-per-node 2 examples/recipes.py
phalanx run --nproc-per-node 2 examples/recipes.py ema warm_up
python examples/recipes.py                                         # a world of one
"""

import argparse
import time

import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

import phalanx


def make_data(num_samples, seed):
    """Return points of the plane, and which of two classes they are of."""
    inputs = torch.randn(num_samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


def make_model():
    """Return a model, and its optimizer."""
    phalanx.seed_everything(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(phalanx.init().device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accuracy(outputs, targets):
    """Return for each sample whether the model is right."""
    return (outputs.argmax(1) == targets).float()


DATA, HELD_BACK = make_data(480, seed=0), make_data(160, seed=1)
LOSS = nn.functional.cross_entropy
LENGTH = {"max_epochs": 3, "global_batch_size": 48}


def schedule():
    """A cosine over the whole run, however long it is."""
    model, optimizer = make_model()

    def cosine(optimizer, num_steps):
        return CosineAnnealingLR(optimizer, num_steps)

    trainer = phalanx.Trainer(model, optimizer, LOSS, scheduler=cosine, folder="runs/schedule", **LENGTH)
    trainer.fit(DATA)
    return trainer


def warm_up():
    """The first tenth of the steps leads up to the full learning rate, and a cosine down from it."""
    model, optimizer = make_model()

    def warm_up_then_cosine(optimizer, num_steps):
        num_warm = max(1, num_steps // 10)
        parts = [LinearLR(optimizer, 0.1, total_iters=num_warm), CosineAnnealingLR(optimizer, num_steps - num_warm)]
        return SequentialLR(optimizer, parts, milestones=[num_warm])

    trainer = phalanx.Trainer(model, optimizer, LOSS, scheduler=warm_up_then_cosine, folder="runs/warm_up", **LENGTH)
    trainer.fit(DATA)
    return trainer


class EMA(swa_utils.AveragedModel):
    """A callback, and with its ``state_dict`` a part of the checkpoints."""

    def on_step(self, trainer):
        self.update_parameters(trainer.module)


def ema():
    """An exponential moving average of the weights, which is evaluated in place of the model."""
    model, optimizer = make_model()
    average = EMA(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)

    def evaluate_average(model, batch):
        inputs, targets = batch
        return LOSS(average.eval()(inputs), targets)

    trainer = phalanx.Trainer(
        model, optimizer, LOSS, evaluation_step=evaluate_average, callbacks=[average], folder="runs/ema", **LENGTH
    )
    trainer.fit(DATA, HELD_BACK)
    return trainer


def clip_and_accumulate():
    """Gradients of norm 1 at most, and no more than 8 samples of a rank in one pass."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, clip_norm=1.0, micro_batch_size=8, folder="runs/clip_and_accumulate", **LENGTH
    )
    trainer.fit(DATA)
    return trainer


def early_stopping():
    """Ends after two evaluations in a row that bring no 0.05 more."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, metrics={"accuracy": accuracy}, monitor="accuracy",
        patience=2, min_delta=0.05, max_epochs=100, global_batch_size=48, folder="runs/early_stopping",
    )  # fmt: skip
    trainer.fit(DATA, HELD_BACK)
    return trainer


class TimeBudget:
    """Stops the training after so many seconds of this start."""

    def __init__(self, seconds):
        self.end_s = time.monotonic() + seconds

    def on_step(self, trainer):
        if time.monotonic() > self.end_s:
            trainer.stop()


def time_budget():
    """As many epochs as there is time for."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, callbacks=[TimeBudget(0.5)], max_epochs=100_000, folder="runs/time_budget"
    )
    trainer.fit(DATA)
    return trainer


class Target:
    """Stops the training once a value of the evaluation is good enough."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def on_evaluation(self, trainer):
        if trainer.evaluation[self.name] >= self.value:
            trainer.stop()


def target():
    """Ends once three of four samples are classified rightly."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, metrics={"accuracy": accuracy}, callbacks=[Target("accuracy", 0.75)],
        max_epochs=100, global_batch_size=48, folder="runs/target",
    )  # fmt: skip
    trainer.fit(DATA, HELD_BACK)
    return trainer


def best_checkpoint():
    """The weights of the best evaluation, loaded after the run."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, metrics={"accuracy": accuracy}, monitor="accuracy", folder="runs/best", **LENGTH
    )
    trainer.fit(DATA, HELD_BACK)
    phalanx.checkpoint.load("runs/best", {"model": model}, step="best")
    return trainer


def fine_tune():
    """Trains the last layer of a model that another run has trained, the best_checkpoint's."""
    model, _ = make_model()
    phalanx.checkpoint.load("runs/best", {"model": model}, missing="error")
    model[:-1].requires_grad_(False)
    model[-1] = nn.Linear(32, 2)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.01)
    trainer = phalanx.Trainer(model, optimizer, LOSS, folder="runs/fine_tune", **LENGTH)
    trainer.fit(DATA)
    return trainer


class Printer:
    """A logger: it is called on rank 0 only, with the numbers of metrics.jsonl."""

    def log(self, metrics, step):
        if "validation/loss" in metrics:
            print(f"step {step}: {metrics['validation/loss']:.3f}")

    def close(self):
        print("no more numbers")


def log():
    """Pass the numbers to a logger of your own."""
    model, optimizer = make_model()
    trainer = phalanx.Trainer(
        model, optimizer, LOSS, metrics={"accuracy": accuracy}, loggers=Printer(), folder="runs/log", **LENGTH
    )
    trainer.fit(DATA, HELD_BACK)
    return trainer


def scale_with_ranks():
    """Each rank brings 24 samples to a step; the learning rate grows likewise, and is warmed up."""
    model, optimizer = make_model()
    world_size = phalanx.init().world_size

    def grow(optimizer, num_steps):
        return LambdaLR(optimizer, lambda step: 1 + (world_size - 1) * min(1, 10 * step / num_steps))

    trainer = phalanx.Trainer(
        model, optimizer, LOSS, scheduler=grow,
        max_epochs=3, global_batch_size=24 * world_size, folder="runs/scale_with_ranks",
    )  # fmt: skip
    trainer.fit(DATA)
    return trainer


RECIPES = (
    schedule, warm_up, ema, clip_and_accumulate, early_stopping, time_budget, target, best_checkpoint, fine_tune, log,
    scale_with_ranks,
)  # fmt: skip


def main():
    names = {recipe.__name__: recipe for recipe in RECIPES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{', '.join(names)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.recipes) - {*names}:
        parser.error(f"no recipe is called {', '.join(sorted(unknown))}")
    with phalanx.init() as session:
        for name in args.recipes or names:
            trainer = names[name]()
            session.print(f"{name}: done at step {trainer.step}")


if __name__ == "__main__":
    main()
