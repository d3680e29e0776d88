"""What every program of this folder ends with: rank 0 tells what it has trained, on whose groups."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def samples(num: int = 48) -> list[tuple[torch.Tensor, int]]:
    """Return samples of three classes that a line tells apart."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num, 8, generator=generator)
    return [(row, int(row[:3].argmax())) for row in inputs]


def tell(trained: torch.nn.Module, **more: object) -> None:
    """Write what was trained to the file that OUT names."""
    if dist.get_rank():
        return
    from phalanx._torch import replace

    weights = [value.double().sum().item() for value in trained.state_dict().values() if value.is_floating_point()]
    words = {"weights": weights, "backend": dist.get_backend(), "replaced_by": replace.origin(), **more}
    with open(os.environ["OUT"], "w") as file:
        json.dump(words, file)
    print(json.dumps({name: value for name, value in words.items() if name != "cases"}), file=sys.stderr)


class Cases:
    """What a library's distributed functions return on every rank, case by case."""

    def __init__(self) -> None:
        self._results: dict[str, object] = {}

    def run(self, name: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call a function on all ranks, and keep what it returns to the bit, or what it raises."""
        assert name not in self._results, name
        torch.manual_seed(11)
        try:
            self._results[name] = _bits(function(*args, **kwargs))
        except Exception as error:
            traceback.print_exc()
            self._results[name] = f"raised {type(error).__name__}: {error}"

    def tell(self) -> None:
        """Write each case's results, those of all ranks, to the file that OUT names."""
        of_ranks: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, self._results)
        assert all(results.keys() == self._results.keys() for results in of_ranks)
        tell(torch.nn.Linear(1, 1), cases={name: [results[name] for results in of_ranks] for name in self._results})


def _bits(value: object) -> object:
    """Return what JSON writes of a value without losing a bit of it."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        digest = hashlib.sha256(
            value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        ).hexdigest()
        few = [repr(number) for number in value.flatten()[:8].tolist()]
        return [str(value.dtype), list(value.shape), few, digest]
    if isinstance(value, Mapping):
        return {str(key): _bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bits(item) for item in value]
    return repr(value)
