"""One rank of two is denied every system call and resource in turn: each rank has an error or a right result in time.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs all denials, on each rank, before and in the group.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.faults._denials import DENIALS, MOMENTS, check_ends, deny_one

CASES = list(itertools.product(DENIALS, MOMENTS, (0, 1)))
if os.environ.get("PHALANX_TEST_LONG") != "1":
    CASES = CASES[::7]


@pytest.mark.parametrize(("what", "moment", "victim"), CASES)
def test_no_denial_hangs_or_kills(what, moment, victim):
    check_ends(deny_one(2, what, moment, victim), victim)
