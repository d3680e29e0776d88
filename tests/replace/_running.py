"""How the tests start a program that asks for gloo, and read what it got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

PROGRAM = Path(__file__).with_name("asks_for_gloo.py")
PHALANX_RUN = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", PROGRAM]
BY_VARIABLE = {"PHALANX_REPLACE": "gloo"}


def run(command, folder, **environ):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port(), **environ}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)


def got(done):
    """Return what rank 0 printed."""
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if '"backend"' in line)
    return json.loads(line[line.index("{") :])
