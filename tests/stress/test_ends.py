"""Scripts that end in the middle of random work give their own exit code, and show their own error.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs 200 of them, and the launchers, which execute their ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress.ending import RAISED, Plan

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
FIRST = random.SystemRandom().randrange(1 << 30) if LONG else 0
NUM_SCRIPTS = 200 if LONG else 6
NUM_LAUNCHED = 20 if LONG else 1
SCRIPT = Path(__file__).with_name("ending.py")
LAUNCHERS = {
    "phalanx run": [sys.executable, "-m", "phalanx", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


@pytest.mark.timeout(60 + 60 * NUM_SCRIPTS)
def test_scripts_that_end_in_the_middle_of_work_give_their_own_exit_code(tmp_path):
    wrong = []
    serving = [sys.executable, str(SCRIPT), "--serve"]
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for seed in range(FIRST, FIRST + NUM_SCRIPTS):
            plan, folder = Plan.of(seed), tmp_path / str(seed)
            folder.mkdir()
            print(";".join(f"{seed} {rank} {folder}" for rank in range(2)), file=server.stdin, flush=True)
            for _ in range(2):
                _, rank, code = map(int, server.stdout.readline().split())
                said = (folder / f"errors-{rank}").read_text()
                if code != plan.code(rank) or (plan.ends[rank] == "raises" and RAISED not in said):
                    wrong.append(f"{plan}, rank {rank}: {code}, not {plan.code(rank)}\n{said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(60 + 120 * NUM_LAUNCHED)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_see_no_rank_killed_by_a_signal_of_its_own(tmp_path, launcher):
    for seed in range(FIRST, FIRST + NUM_LAUNCHED):
        plan = Plan.of(seed)
        command = [*LAUNCHERS[launcher], "--nproc-per-node", "2", str(SCRIPT), str(seed)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        said = done.stdout + done.stderr
        assert "SIGABRT" not in said, (plan, said)
        assert "SIGSEGV" not in said, (plan, said)
        assert (done.returncode == 0) == all(plan.code(rank) == 0 for rank in range(2)), (plan, said)
