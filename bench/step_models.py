"""The models of ``python -m bench.step``: typical models for training on a CPU, with steps of less than a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model with its data, optimizer and loss.

    Attributes:
        build: Function that returns the model.
        batch: Function that returns a batch of inputs and targets.
        optimizer: Class of the optimizer; None if the model is only evaluated.
        num_steps: Number of timed steps in a turn.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    optimizer: type[torch.optim.Optimizer] | None
    num_steps: int


def _images(num: int, channels: int, side: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(num, channels, side, side), torch.randint(10, (num,)))


def _text(num: int, length: int, vocabulary: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(vocabulary, (num, length + 1))
        return words[:, :-1], words[:, 1:]

    return batch


def mlp(*widths: int) -> nn.Module:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _large_cnn() -> nn.Module:
    """Return a CNN whose largest activations have 32 MiB and more."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 24 * 24, 10),
    )  # fmt: skip


def digits_cnn() -> nn.Module:
    """Return the network of examples/train_digits.py."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(8),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride != 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def _resnet18() -> nn.Module:
    """Return ResNet-18 in the usual form for images of 32x32: the first convolution is 3x3, without pooling."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        _Residual(inputs if first else outputs, outputs, stride if first else 1)
        for (inputs, outputs), stride in zip(itertools.pairwise(widths), (1, 2, 2, 2), strict=True)
        for first in (True, False)
    ]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 2000)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(text))[0]).transpose(1, 2)


class _Recommender(nn.Module):
    """Large embedding tables, of which each batch uses only a few rows, followed by a small network."""

    def __init__(self, num_tables: int = 8, num_rows: int = 50_000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(num_rows, width) for _ in range(num_tables))
        self.top = mlp(num_tables * width, 256, 128, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)], 1))


class _Encoder(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(text)).mean(1))


class _GPT(nn.Module):
    """The GPT of examples/train_gpt.py."""

    def __init__(self, length: int, vocabulary: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return self.head(x).transpose(1, 2)


SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

CASES = {
    "MLP of 17 M": Case(lambda: mlp(784, 4096, 3360, 10), _images(64, 1, 28), Adam, 12),
    "large CNN": Case(_large_cnn, _images(32, 3, 96), SGD, 6),
    "MLP 784-1024-10": Case(lambda: mlp(784, 1024, 10), _images(64, 1, 28), SGD, 600),
    "ResNet-18": Case(_resnet18, _images(16, 3, 32), SGD, 6),
    "LSTM": Case(_LSTM, _text(32, 64, 2000), Adam, 6),
    "recommender": Case(
        _Recommender, lambda: (torch.randint(50_000, (512, 8)), torch.randint(10, (512,))), Adam, 40
    ),
    "transformer encoder": Case(
        _Encoder, lambda: (torch.randint(4000, (16, 128)), torch.randint(10, (16,))), AdamW, 6
    ),
    "small GPT": Case(lambda: _GPT(48, 256), _text(256, 48, 256), AdamW, 10),
    "evaluation": Case(_resnet18, _images(64, 3, 32), None, 6),
    "digits CNN": Case(digits_cnn, _images(64, 1, 8), Adam, 400),
}  # fmt: skip
