"""The folders of runs: how many are kept, and what is never removed."""

from __future__ import annotations

import fcntl
import os

import pytest

from phalanx.record.run_folder import LAUNCH_LOG, NUM_KEPT
from tests.launch.jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")


def make_run(base, number):
    """Make the folder of an old run as a launcher leaves it, and return it."""
    path = base / f"20200101-{number:06d}-77"
    for part in ("attempt_0/rank_0/stdout.log", "blackbox/attempt_0/rank_0.box", LAUNCH_LOG, "standby.log"):
        (path / part).parent.mkdir(parents=True, exist_ok=True)
        (path / part).write_text("old\n")
    return path


IS_LOCKED = """
import fcntl, glob
try:
    fcntl.flock(open(max(glob.glob("logs/train/2*/launch.log"))), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked")
"""


def test_the_newest_runs_are_kept_and_whatever_runs_or_is_not_the_launchers(tmp_path):
    base = tmp_path / "logs" / "train"
    old = [make_run(base, number) for number in range(NUM_KEPT + 3)]
    (base / "checkpoints").mkdir()
    (old[1] / "notes.txt").write_text("mine\n")
    with open(old[0] / LAUNCH_LOG) as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # as the launcher of a job that runs
        done = run_job(tmp_path, IS_LOCKED, "--no-preload", num_ranks=1)
    assert done.stdout == "[rank 0] locked\n", done.stderr
    left = sorted(path for path in base.iterdir() if path.name != "checkpoints")
    assert left[:-1] == [*old[:2], *old[4:]]
    assert (base / "checkpoints").is_dir()
    assert (old[0] / "attempt_0").is_dir()
    assert os.listdir(old[1]) == ["notes.txt"]


def test_nothing_is_removed_from_a_folder_that_was_asked_for(tmp_path):
    old = [make_run(tmp_path / "mine", number) for number in range(NUM_KEPT + 3)]
    assert run_job(tmp_path, "pass", "--no-preload", "--log-dir", "mine", num_ranks=1).returncode == 0
    assert all((path / "attempt_0").is_dir() for path in old)
