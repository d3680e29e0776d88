"""Who waits by looking does so by `wait_until`; whoever else sleeps has a reason."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import phalanx
from phalanx.wire import waiting
from phalanx.wire.waiting import StoreSilentError, wait_until

SOURCE = Path(phalanx.__file__).parent
SLEEPERS = {
    "backend/hosts/mpi.py": "each poll lets MPI progress, so the first are made at once, without a pause",
    "diagnose/stacks.py": "a stack that can't be read is tried again, a few times",
    "diagnose/top/top.py": "one look at rates needs some time before it",
    "diagnose/trace/trace.py": "each look yields what it has found",
    "launch/processes/descendants.py": "a helper that begins later",
    "launch/replicas/receiver.py": "after an error of accept(), before the next",
    "launch/replicas/replicator.py": "copying rests in proportion to the time that it took",
    "rendezvous/roll_call.py": "rank 0 keeps the store open while others read why it failed",
    "testing/fuzz/rank.py": "random delays are part of a random program",
    "tune/trials.py": "each look is at several jobs, whose limits change",
    "wire/waiting.py": "the wait itself",
}


def test_whoever_sleeps_has_a_reason() -> None:
    files = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"\bsleep\(", re.sub(r"#.*", "", path.read_text()))
    }
    assert files == SLEEPERS.keys()


class Clock:
    """Time that passes only in pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.pauses_s = 0.0, []
        monkeypatch.setattr(waiting, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


def test_pauses_grow_up_to_the_longest_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert wait_until(lambda: None, 1.0, least_s=0.01, most_s=0.1) is None
    assert clock.now_s == pytest.approx(1.0)
    assert clock.pauses_s[:2] == [0.01, 0.0125]
    assert sorted(clock.pauses_s[:-1]) == clock.pauses_s[:-1]
    assert max(clock.pauses_s) == 0.1


def test_a_look_comes_first_and_last_and_its_find_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert wait_until(lambda: "found", -math.inf) == "found"
    assert wait_until(lambda: clock.now_s or None, 0.005, least_s=0.005) == 0.005
    assert wait_until(lambda: 0, math.inf) == 0


def test_a_silent_store_has_not_answered_and_any_other_error_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    checked_s = []

    def silent() -> None:
        raise StoreSilentError

    def check() -> None:
        checked_s.append(clock.now_s)
        if len(checked_s) == 3:
            raise ConnectionError
        silent()

    with pytest.raises(ConnectionError):
        wait_until(silent, math.inf, seldom=check, seldom_s=1.0)
    assert [round(at_s, 1) for at_s in checked_s] == [1.0, 2.0, 3.0]
