"""torch's own exam of a backend, sat by phalanx in the place of Gloo: all that Gloo passes must pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_gloo_passes_passes(world_size):
    command = [sys.executable, "-m", "tests.conformance.exam", "--backend", "gloo", "--world-size", str(world_size)]
    done = subprocess.run(
        [*command, "--check"],
        cwd=_REPOSITORY,
        env={**os.environ, "PHALANX_REPLACE": "gloo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 tests came out otherwise than expected" in done.stdout
