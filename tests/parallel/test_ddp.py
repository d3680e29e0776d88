"""DistributedDataParallel: when it communicates and when not, what it says, what it leaves behind.

The behaviours are functions that each rank runs, in the modules imported here.
"""

from __future__ import annotations

import pytest

from tests.parallel import _ddp_copies, _ddp_extras, _ddp_making, _ddp_passes  # noqa: F401
from tests.parallel._behaviours import Ranks
from tests.parallel._ddp_tools import BEHAVIOURS, OF_SEVERAL

SETUPS = [("phalanx", 1), ("phalanx", 2), ("phalanx", 3), ("gloo", 2), ("gloo", 3)]


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: f"{setup[0]}, {setup[1]} ranks")
def ranks(request):
    backend, world_size = request.param
    return Ranks(backend, world_size, [f for f in BEHAVIOURS if world_size > 1 or f not in OF_SEVERAL])


@pytest.mark.parametrize("function", BEHAVIOURS, ids=lambda function: function.__name__)
def test_behaviour(ranks, function):
    if len(ranks) == 1 and function in OF_SEVERAL:
        pytest.skip("a rank alone")
    ranks.check(function)
