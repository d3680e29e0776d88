"""Run many small functions on one set of ranks, since starting ranks costs more than most behaviours do."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch

from phalanx.testing import run_ranks

Behaviour = Callable[[int, int], None]


class Ranks:
    """What became of every behaviour on every rank; a behaviour asserts what it claims.

    Args:
        backend: Of the default group.
        world_size: Number of ranks.
        behaviours: Run in this order by every rank, each as ``behaviour(rank, world_size)``.
    """

    def __init__(self, backend: str, world_size: int, behaviours: Sequence[Behaviour]) -> None:
        self._problems = run_ranks(
            _run_all, world_size, list(behaviours), backend=backend, timeout_s=100, group_timeout_s=30
        )

    def __len__(self) -> int:
        return len(self._problems)

    def check(self, behaviour: Behaviour) -> None:
        """Raise what the behaviour raised, on the first rank where it did."""
        for rank, problems in enumerate(self._problems):
            problem = problems.get(behaviour.__name__, "not run, since one before did not end as it should")
            assert problem is None, f"rank {rank}: {problem}"


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
