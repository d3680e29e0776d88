"""Accidents on real hosts, one after the other: two sides never train at once, and at most one step is done again.

A few here; PHALANX_TEST_LONG=1 (`make stress`) runs many, from a seed that a failure names. `tests.hosts.chaos` is also
a command, which plays as many of one kind as it is told.
"""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from tests.hosts import chaos
from tests.namespaces import hosts

pytestmark = pytest.mark.usefixtures("needs_hosts")
LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
FULL_BYTES = 4 << 20


def test_a_job_comes_through_one_accident_after_the_other(tmp_path):
    if LONG:
        seed = random.SystemRandom().randrange(1 << 30)
        drawn = random.Random(seed)
        kinds = [drawn.choice([*chaos.ACCIDENTS]) for _ in range(60)]
    else:
        seed, kinds = 1, ["kill-first", "cut", "kill-in-recovery", "kill-cut-off"]
    job = chaos.play(tmp_path, kinds, seed)
    assert {step.world_size for step in job.steps} >= {2, 3}


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_host_is_lost_while_the_disk_of_the_logs_is_full(tmp_path, small_disk):
    with hosts(3) as made:
        job = chaos.Job(made, tmp_path, small_disk)
        job.await_all()
        with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        made[2].kill()
        job.await_steps(job.others(made[2]), 2)
        job.check()


def steps_of(*sides):
    """Steps as a job would write them: of each side (number, time) of its steps."""
    for attempt, side in enumerate(sides):
        for number, when_s in side:
            yield chaos.Step("host-a", number, 3, (attempt, "10.77.0.1:1"), when_s, number * (number - 1) // 2)


@pytest.fixture
def job_with(tmp_path):
    def make(steps):
        job = chaos.Job((), tmp_path)
        job.steps = [*steps]
        return job

    return make


def test_one_step_again_is_no_mistake(job_with):
    job_with(steps_of([(1, 1.0), (2, 2.0)], [(2, 3.0), (3, 4.0)])).check()


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (steps_of([(1, 1.0), (2, 3.0)], [(2, 2.0), (3, 4.0)]), "two sides at once"),
        (steps_of([(1, 1.0), (2, 2.0), (3, 3.0)], [(2, 4.0)]), "2 steps again"),
        ([chaos.Step("host-a", 3, 3, (0, ""), 1.0, 4)], "total=4"),
    ],
)
def test_what_must_not_happen_is_found(job_with, steps, found):
    with pytest.raises(AssertionError, match=found):
        job_with(steps).check()
