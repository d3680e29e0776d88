"""The models of the flag protocol and of the nodes' agreement (`model/`), checked by SPIN in their short form."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "model"
LIMIT_S = 300

pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs the model checker SPIN (Debian: spin)"),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler"),
]


def test_the_protocols_hold_and_their_broken_variants_fail():
    done = subprocess.run(
        ["sh", str(MODEL / "check.sh"), "--short"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1].endswith("checks passed"), done.stdout
    for found in ("ok", "deadlock", "overwritten", "two sides"):
        assert any(f": {found}," in line for line in lines), done.stdout
