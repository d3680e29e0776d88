"""All ranks are killed at random moments of saving: the newest whole checkpoint loads, at most one step is lost.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs the full counts. A failure names its seed.
"""

from __future__ import annotations

import collections
import os

import pytest

from tests.checkpoint._kills import kill_savers

NUM_KILLS = 200 if os.environ.get("PHALANX_TEST_LONG") == "1" else 3


@pytest.mark.parametrize("seed", [4711])
def test_every_kill_leaves_a_checkpoint_that_loads(tmp_path, seed):
    lost = kill_savers(tmp_path, NUM_KILLS, seed)
    print(f"\n{len(lost)} of {NUM_KILLS} kills survived; steps lost: {dict(sorted(collections.Counter(lost).items()))}")
    assert len(lost) == NUM_KILLS
