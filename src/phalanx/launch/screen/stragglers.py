"""Prints one line when a rank has slowed the others down for a minute; reads the black boxes that ranks keep anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.record.box import Tail

if TYPE_CHECKING:
    from phalanx.record.stragglers import Ledger

LOOK_S = 1.0
"""Time between two reads of the boxes; short enough that a rank rarely fills its box in between."""

_LEAST_COST = 0.05  # least fraction of a step that a named rank costs the others
_LEAST_S = 60.0
_JUDGE_S = 10.0
_MOST_EVENTS = 2000  # limit for the events read from all ranks; if there are more, the newest serve as a sample
_LEAST_EVENTS = 100  # at least this many events are read from each rank, however many ranks there are


class StragglerWatch:
    """Compares the ranks of one attempt on this host.

    Args:
        places: Open file and offset of each rank's box; the caller keeps the files open and closes them.
        say: Function to call once with a line about a rank that has cost too much for a minute.
        now_s: Function that returns the time.

    Attributes:
        line: Current summary, if a rank costs the others too much; otherwise "".
        costs: Cost of each rank that costs the others too much, by rank, as a fraction of a step.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int]],
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        most = max(_LEAST_EVENTS, _MOST_EVENTS // max(1, len(places)))
        self._tails = [Tail(fd, offset, most) for fd, offset in places]
        self.line = ""
        self.costs: dict[int, float] = {}
        self._say, self._now_s = say, now_s
        self._ledger: Ledger | None = None
        self._next_s = self._judge_s = now_s() + _JUDGE_S
        self._named: Sequence[int] = ()  # ranks that the last summary named
        self._since_s = 0.0  # time since which every summary has named these ranks
        self._said: set[int] = set()

    @property
    def timeout_s(self) -> float | None:
        """Longest time that the launcher may wait for other events; None: no limit."""
        return LOOK_S if len(self._tails) > 1 else None

    def look(self) -> None:
        """Read new events, if a second has passed since the last look."""
        if len(self._tails) < 2 or self._now_s() < self._next_s:
            return
        self._next_s = self._now_s() + LOOK_S
        if self._ledger is None:
            from phalanx.record.stragglers import Ledger  # not at the top: short jobs do not need it

            self._ledger = Ledger(_LEAST_S)
        try:
            boxes = [tail.read() for tail in self._tails]
        except ValueError:  # a rank has overwritten its box; the job continues
            self._tails = []
            return
        known = [box for box in boxes if box is not None]
        if len(known) == len(boxes):
            self._ledger.add(known)
            self._judge(self._ledger)

    def _judge(self, ledger: Ledger) -> None:
        now_s = self._now_s()
        if now_s < self._judge_s:
            return
        self._judge_s = now_s + _JUDGE_S
        summary = ledger.summary()
        self.costs = {one.rank: one.cost for one in summary.named if one.cost >= _LEAST_COST}
        named = sorted(self.costs)
        self.line = str(summary) if named else ""
        if named != self._named:
            self._named, self._since_s = named, now_s
        elif named and now_s - self._since_s >= _LEAST_S and not self._said.issuperset(named):
            self._said.update(named)
            self._say(str(summary))
