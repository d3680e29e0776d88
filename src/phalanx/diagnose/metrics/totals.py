"""Counts the events in a rank's black box, for counters that go on over restarts.

A ring holds the newest 8,192 events, and a scrape decodes a limited number of them. If more are new, those that were
decoded stand for all: each counts as often as it takes to make up the number of new events, which the box knows
exactly. So rates are right as long as the rank did the same all the time, as training does. An event that began before
the last scrape counts once, because every such event is read.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

from phalanx.record.box import Box, Event

BOUNDS_S = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of the buckets for the duration of a collective, in seconds."""

_MOST_PHASES = 32  # a script may name any number of phases
_OTHERS = "other"


class Totals:
    """Everything that one rank has done, over all its processes.

    Attributes:
        num_events: Number of events that the rank has recorded.
        num_read: Number of these events that were read.
        num_steps: Number of optimizer steps, including repeated ones.
        num_samples: Number of samples of these steps, over all ranks.
        wait_s: Seconds in collectives and messages.
        durations: Number of collectives by operation and by index into `BOUNDS_S`; the last index is for longer ones.
        seconds: Seconds of the collectives, by operation.
        num_bytes: Bytes of the rank's tensors in collectives, by operation.
        phases_s: Seconds in each phase, by its name.
        step_ended_ns: Time at which the newest step ended, by CLOCK_MONOTONIC; 0 if none has ended.
    """

    def __init__(self) -> None:
        self.num_events = self.num_read = 0
        self.num_steps = self.num_samples = self.wait_s = 0.0
        self.durations: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_bytes: defaultdict[str, float] = defaultdict(float)
        self.phases_s: defaultdict[str, float] = defaultdict(float)
        self.step_ended_ns = 0
        self._process = (0, 0)
        self._num_before = 0  # events of this process that earlier looks have counted

    def add(self, box: Box) -> None:
        """Add the new events of a box, as `Tail` reads them."""
        if self._process != (box.pid, box.start_time):
            self._process, self._num_before = (box.pid, box.start_time), 0
        before, num_new = self._num_before, box.num_events - self._num_before
        self._num_before = box.num_events
        read = [event for event in box.events if event.number > before]
        weight = max(1.0, num_new / max(1, len(read)))
        for event in box.events:
            if event.ended_ns:
                self._count(event, weight if event.number > before else 1.0)
        self.num_events += num_new
        self.num_read += len(read)

    def _count(self, event: Event, weight: float) -> None:
        lasted_s = weight * (event.ended_ns - event.begun_ns) / 1e9
        if event.kind == "collective":
            self.durations[event.op, bisect.bisect_left(BOUNDS_S, lasted_s / weight)] += weight
            self.seconds[event.op] += lasted_s
            self.num_bytes[event.op] += weight * event.size_bytes
        if event.kind in ("collective", "message"):
            self.wait_s += lasted_s
        elif event.kind == "step":
            self.num_steps += weight
            self.num_samples += weight * event.value
            self.step_ended_ns = max(self.step_ended_ns, event.ended_ns)
        elif event.kind == "phase":
            is_known = event.text in self.phases_s or len(self.phases_s) < _MOST_PHASES
            self.phases_s[event.text if is_known else _OTHERS] += lasted_s
