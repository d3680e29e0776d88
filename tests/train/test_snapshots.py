"""When a trainer takes snapshots."""

from __future__ import annotations

import pytest

from phalanx.train.resume import snapshots
from phalanx.train.resume.snapshots import Snapshots


class Memory:
    """Snapshots that are only counted."""

    problem = ""
    is_urgent = False

    def agree(self) -> None: ...


@pytest.fixture
def taken(monkeypatch):
    """The steps of which snapshots were taken; after the first of them none is urgent."""
    steps, memory = [], Memory()

    def take(folder, state, step):
        steps.append(step)
        memory.is_urgent = False

    monkeypatch.setattr(snapshots, "memory", lambda: memory)
    monkeypatch.setattr(snapshots.checkpoint, "snapshot", take)
    return steps, memory


@pytest.mark.parametrize(("is_urgent", "wanted"), [(False, [10, 20]), (True, [6, 10, 20])])
def test_after_a_loss_the_first_step_has_a_snapshot_whatever_was_chosen(taken, is_urgent, wanted):
    steps, memory = taken
    memory.is_urgent = is_urgent
    every_ten = Snapshots("folder", 10, dict, lambda: True)
    for step in range(6, 25):
        every_ten.after_step(step)
    assert steps == wanted


def test_none_are_taken_where_none_are_wanted_however_urgent(taken):
    steps, memory = taken
    memory.is_urgent = True
    Snapshots("folder", 0, dict, lambda: True).after_step(7)
    assert steps == []
