"""Helpers of the tests of checkpoints: models that train, exact comparison, damage."""

from __future__ import annotations

import contextlib
import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx.checkpoint as ckpt

Behaviour = Callable[[int, int, str], None]
BEHAVIOURS: list[Behaviour] = []
ONCE: list[Behaviour] = []
SETUPS = [("phalanx", 2), ("gloo", 2), ("phalanx", 1)]


def behaviour(function: Behaviour) -> Behaviour:
    """Have the ranks of every setup run this, each setup in a folder of its own."""
    BEHAVIOURS.append(function)
    return function


def behaviour_once(function: Behaviour) -> Behaviour:
    """One that takes seconds, and for which one setup will do."""
    ONCE.append(behaviour(function))
    return function


def run_setups(rank: int, world_size: int, base: str, *modules: str) -> dict[Any, str | None]:
    """Run the behaviours of some modules in all setups; return what each raised."""
    for module in modules:
        importlib.import_module(module)
    problems: dict[Any, str | None] = {}
    for number, (backend, size) in enumerate(SETUPS):
        with group_of(size, rank, f"{base}/{number}", backend) as is_in:
            for function in BEHAVIOURS:
                if is_in and (number == 0 or function not in ONCE):
                    folder = f"{base}/{function.__name__}-{number}"
                    problems[number, function.__name__] = call(function, rank, size, folder)[1]
    return problems


@contextlib.contextmanager
def group_of(size: int, rank: int, path: str, backend: str = "phalanx") -> Iterator[bool]:
    """Let the first `size` ranks be a world; yield whether this rank is in it.

    A set of processes is used for many worlds, since it needs seconds to import what torch imports at an optimizer's
    first step.
    """
    if rank < size:
        dist.init_process_group(
            backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
    yield rank < size
    if rank < size:
        dist.destroy_process_group()


def call(function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return what a function has returned, and the traceback of what it has raised."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(*args), None
    except (Exception, pytest.fail.Exception):
        return None, traceback.format_exc()


def model(width: int = 150) -> nn.Module:
    """Its weights are above the size from which on each rank saves only a part; batch norm has buffers."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(20, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 3)
    )


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0) -> float:
    """Train on a batch that depends on `number` and `rank` alone."""
    images = torch.randn(6, 20, generator=torch.Generator().manual_seed(1000 * number + rank))
    optimizer.zero_grad()
    loss = module(images).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def copy_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone() for name, tensor in module.state_dict().items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def assert_same(got: Any, want: Any, where: str = "it") -> None:
    """Compare bit by bit, types included."""
    assert type(got) is type(want), f"{where}: {type(got)} instead of {type(want)}"
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert bits(got) == bits(want), f"{where}: {got} instead of {want}"
    elif isinstance(want, numpy.ndarray | numpy.generic):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert got.tobytes() == want.tobytes(), where
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif hasattr(want, "__iter__") and not isinstance(want, str | bytes | bytearray | set | frozenset):
        assert len(got) == len(want), where
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(want, float | complex):
        assert repr(got) == repr(want), where  # equal NaNs, and -0.0 is not 0.0
    else:
        assert got == want, f"{where}: {got!r} instead of {want!r}"


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def save(folder: str | Path, state: Any, number: int = 1, **options: Any) -> None:
    ckpt.save(folder, state, number, wait=True, **options)


def flip_bit(path: Path, position: int) -> None:
    """Turn around one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)
