"""docs/en/guides/clusters/ray.md: Ray starts two workers on this machine and makes their group with phalanx."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.clusters._machines import EXAMPLES

LIMIT_S = 300


def test_ray_train_makes_a_phalanx_group(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "ray[train]"')
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--num-workers", "2"]
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks on 1 hosts, phalanx: loss 0.0" in done.stdout + done.stderr
