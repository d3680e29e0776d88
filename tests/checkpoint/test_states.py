"""Saved state comes back, bit for bit, on every rank.

The behaviours are functions that each rank runs, in the modules imported here.
"""

from __future__ import annotations

import pytest

from phalanx.testing import run_ranks
from tests.checkpoint import _calls, _own, _states
from tests.checkpoint._tools import BEHAVIOURS, ONCE, SETUPS, run_setups


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    base = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(run_setups, 2, base, _states.__name__, _own.__name__, _calls.__name__, init=False, timeout_s=150)


@pytest.mark.parametrize("setup", range(len(SETUPS)), ids=lambda i: f"{SETUPS[i][0]}, {SETUPS[i][1]} ranks")
@pytest.mark.parametrize("function", BEHAVIOURS, ids=lambda function: function.__name__)
def test_behaviour(problems, function, setup):
    if setup and function in ONCE:
        pytest.skip("takes seconds; two ranks on phalanx do it")
    for rank in range(SETUPS[setup][1]):
        problem = problems[rank][setup, function.__name__]
        assert problem is None, f"rank {rank}: {problem}"
