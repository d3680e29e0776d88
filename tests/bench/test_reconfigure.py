"""The benchmark of reconfigure loses a rank with each engine, and ends."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.bench._run import run_bench

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure since 2.14")


def test_a_short_run_ends_although_a_rank_of_gloo_waits_for_its_timeout():
    done = run_bench("bench.reconfigure", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    ours, gloos = done.stdout.splitlines()
    assert "phalanx: ended after" in ours
    assert "gloo: ended after" in gloos
