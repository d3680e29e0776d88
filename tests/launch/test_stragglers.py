"""The launcher says once when a rank has slowed the others down for a minute, and reads little for that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from phalanx.launch.screen.stragglers import LOOK_S, StragglerWatch
from phalanx.record.box import BOX_BYTES
from phalanx.record.memory import BoxMemory
from tests.record.made import MS, Job, encoded, looks


@pytest.fixture
def memory() -> Iterator[BoxMemory]:
    boxes = BoxMemory(4)
    yield boxes
    boxes.close()


def said_of(job: Job, num_steps: int, memory: BoxMemory) -> list[tuple[int, str]]:
    """Return what is said in a job, each with the second in which it is."""
    now = [0.0]
    said: list[tuple[int, str]] = []
    watch = StragglerWatch(
        memory.places(job.num_ranks), lambda words: said.append((int(now[0]), words)), lambda: now[0]
    )
    for second, boxes in enumerate(looks(job.boxes(num_steps), 1000 * MS), 1):
        now[0] = second * LOOK_S
        with open(memory.path, "r+b", buffering=0) as file:
            for box in boxes:
                os.pwrite(file.fileno(), encoded(box), box.rank * BOX_BYTES)
        watch.look()
    return said


def test_a_rank_that_costs_more_than_5_percent_for_a_minute_is_named_once(memory):
    job = Job(3, step_ms=200, slower={2: 0.1}, has_phases=False, seed=1)
    ((second, words),) = said_of(job, 600, memory)
    assert 69 <= second <= 100
    assert words.startswith("rank 2 has cost ")
    assert re.search(r"; its time before all_reduce at train\.py:31 takes 1\.\d\dx the others'$", words)


@pytest.mark.parametrize("slower", [{}, {1: 0.03}])
def test_nothing_is_said_of_less(memory, slower):
    assert said_of(Job(3, step_ms=200, slower=slower, has_phases=False, seed=2), 600, memory) == []


def test_a_single_rank_is_not_looked_at(memory):
    assert StragglerWatch(memory.places(1), print).timeout_s is None
    assert StragglerWatch(memory.places(2), print).timeout_s == LOOK_S
