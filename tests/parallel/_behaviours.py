"""Run many small functions on one set of ranks, since starting ranks costs more than most behaviours do."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from phalanx.testing import run_ranks
from tests.checkpoint._tools import group_of

Behaviour = Callable[[int, int], None]
Setup = tuple[str, int]


class Ranks:
    """What became of every behaviour on every rank of every setup; a behaviour asserts what it claims.

    All setups share their ranks: what a compiler imports takes a rank longer than all else.

    Args:
        behaviours: Run in this order by every rank, each as ``behaviour(rank, world_size)``, by backend of the default
            group and number of ranks; the largest world first, since its ranks wait for nobody.
        folder: Where ranks meet.
    """

    def __init__(self, behaviours: Mapping[Setup, Sequence[Behaviour]], folder: str) -> None:
        self._sizes = {setup: setup[1] for setup in behaviours}
        most = max(self._sizes.values())
        self._problems = run_ranks(_run_setups, most, dict(behaviours), folder, init=False, timeout_s=300)

    def check(self, setup: Setup, behaviour: Behaviour) -> None:
        """Raise what the behaviour raised, on the first rank where it did."""
        for rank, problems in enumerate(self._problems[: self._sizes[setup]]):
            problem = problems[setup].get(behaviour.__name__, "not run, since one before did not end as it should")
            assert problem is None, f"rank {rank}: {problem}"


def _run_setups(
    rank: int, _: int, behaviours: dict[Setup, Sequence[Behaviour]], folder: str
) -> dict[Setup, dict[str, str | None]]:
    problems = {}
    for (backend, size), functions in behaviours.items():
        with group_of(size, rank, f"{folder}/{backend}-{size}", backend) as is_in:
            if is_in:
                problems[backend, size] = _run_all(rank, size, functions)
    return problems


def _run_all(rank: int, world_size: int, behaviours: Sequence[Behaviour]) -> dict[str, str | None]:
    problems: dict[str, str | None] = {}
    for behaviour in behaviours:
        torch.manual_seed(0)
        problems[behaviour.__name__] = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                behaviour(rank, world_size)
        except (Exception, pytest.fail.Exception) as error:
            problems[behaviour.__name__] = traceback.format_exc()
            if not isinstance(error, (AssertionError, pytest.fail.Exception)):
                break  # the ranks may be out of step
    return problems
