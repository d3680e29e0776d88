"""What ranks run in the trainer's tests: small models, data whose samples can be told apart."""

from __future__ import annotations

import contextlib
import io
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import phalanx
from phalanx.train.feed.feed import is_dataset


def make_data(length=50):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def make_model(dropout=0.0, norm=nn.LayerNorm):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def state_of(model):
    return {name: value.clone() for name, value in phalanx.checkpoint.unwrap(model).state_dict().items()}


class Seen:
    """A callback that writes down what happens, and is part of the checkpoint."""

    def __init__(self):
        self.events = []
        self.num_steps = 0

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda trainer: self._note(name, trainer)

    def _note(self, name, trainer):
        self.num_steps += name == "on_step"
        self.events.append((name, trainer.step))

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


class Numbered(Dataset):
    """Gives each sample's number, for a loss that tells which were trained on."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return torch.full((6,), 0.1), torch.tensor([float(index)])


def quietly(fn, *args, **kwargs):
    """Return what `fn` returns, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fn(*args, **kwargs)
    return result, printed.getvalue()


def mean_squares(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def train(folder, *, model=None, data=None, validation=None, steps=None, callbacks=(), lr=0.01, **settings):
    """Train a model and return the trainer and what was printed."""
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    data = make_data() if data is None else data
    settings = {"max_epochs": 2, **({"global_batch_size": 8} if is_dataset(data) else {}), **settings}
    trainer = phalanx.Trainer(
        model,
        optimizer,
        mean_squares,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40),
        metrics={"distance": lambda outputs, targets: (outputs - targets).abs().squeeze(1)},
        callbacks=callbacks,
        folder=str(folder),
        **({**settings, "max_steps": steps} if steps else settings),
    )
    _, printed = quietly(trainer.fit, data, validation)
    return trainer, printed


def rank_of():
    return dist.get_rank() if dist.is_initialized() else 0
