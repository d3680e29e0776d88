"""DistributedDataParallel: when it communicates, what it says, what it leaves behind.

The behaviours are functions that each rank runs, in the modules imported here.
"""

from __future__ import annotations

import pytest

from tests.parallel import _ddp_copies, _ddp_extras, _ddp_making, _ddp_passes  # noqa: F401
from tests.parallel._behaviours import Ranks
from tests.parallel._ddp_tools import BEHAVIOURS, OF_SEVERAL

SETUPS = [("phalanx", 3), ("gloo", 3), ("phalanx", 2), ("phalanx", 1)]


def behaviours_of(setup):
    return [function for function in BEHAVIOURS if setup[1] > 1 or function not in OF_SEVERAL]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    behaviours = {setup: behaviours_of(setup) for setup in SETUPS}
    return Ranks(behaviours, str(tmp_path_factory.mktemp("ddp")))


@pytest.mark.parametrize(
    ("setup", "function"),
    [
        pytest.param(setup, function, id=f"{setup[0]}, {setup[1]} ranks-{function.__name__}")
        for setup in SETUPS
        for function in behaviours_of(setup)
    ],
)
def test_behaviour(ranks, setup, function):
    ranks.check(setup, function)
