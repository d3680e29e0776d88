"""Run programs on phalanx and on Gloo, in the same processes, and compare what they return bit by bit."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend.torch.adapters import kept_groups
from phalanx.testing import run_ranks

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class Comparison:
    """What every rank returned from every program on both backends.

    All programs run in one set of processes, since those need seconds to import what torch imports at an optimizer's
    first step.

    Args:
        beyond_gloo: Names of programs that Gloo can't run.
    """

    def __init__(
        self, world_size: int, folder: Path, programs: Mapping[str, Program], beyond_gloo: Collection[str] = ()
    ) -> None:
        self._beyond_gloo = beyond_gloo
        args = dict(programs), beyond_gloo, str(folder)
        self._results = run_ranks(_run_all, world_size, *args, init=False, timeout_s=300)

    def same_on_gloo(self, name: str) -> list[Any]:
        """Return the results of a program on phalanx, in rank order, after finding the same bits in Gloo's.

        Two ranks add two numbers, so the order of additions does not matter.
        """
        ours = [result["phalanx", name] for result in self._results]
        for rank, result in enumerate(self._results):
            for backend in ("phalanx", "gloo"):
                problem = result.get((backend, name))  # None: it is beyond Gloo
                assert not isinstance(problem, _Raised), f"rank {rank} on {backend}: {problem.text}"
            assert result["used", name], f"rank {rank} did not use phalanx"
            if name not in self._beyond_gloo:
                _assert_equal(ours[rank], result["gloo", name], f"rank {rank}")
        return ours


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _run_all(
    rank: int, world_size: int, programs: dict[str, Program], beyond_gloo: Collection[str], folder: str
) -> dict[tuple[str, str], Any]:
    results: dict[tuple[str, str], Any] = {}
    # One group of Gloo for all programs: freeing it while one of its threads lets go of a Python object can hang.
    for backend in ("phalanx", "gloo"):
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{backend}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=100),
        )
        for name, (program, args) in programs.items():
            if backend == "gloo" and name in beyond_gloo:
                continue
            torch.manual_seed(0)
            num_before = _num_collectives()
            try:
                results[backend, name] = whole(program(rank, world_size, *args))
            except Exception:
                results[backend, name] = _Raised(traceback.format_exc())
            if backend == "phalanx":
                has_messages = any(group.has_messages for group in kept_groups())
                results["used", name] = _num_collectives() > num_before or has_messages
        if backend == "phalanx":
            dist.destroy_process_group()
    return results


def _num_collectives() -> int:
    """Collectives of all groups of phalanx in this process; the first of each is its making."""
    return sum(group._operations._core.seq for group in kept_groups())


def whole(value: Any) -> Any:
    """Copy nested results with every sharded tensor put together."""
    """Copy a state with every sharded tensor put together."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(item) for item in value]
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return value


def _assert_equal(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), f"{where}: off by {(ours - theirs).abs().max()}"
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            _assert_equal(ours[key], theirs[key], f"{where}, {key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _assert_equal(one, other, f"{where}, {i}")
    else:
        assert ours == theirs, where
