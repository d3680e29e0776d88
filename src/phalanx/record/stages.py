"""The time that each rank computed before each collective, from the black boxes of all ranks.

A *stage* begins when a rank leaves a collective and ends when it arrives at the next one, so no stage contains a wait
for other ranks. Only durations are compared, each measured by a rank's own clock, never times of two hosts. Comparing
arrival times would blame a rank that the scheduler woke late, and would need a common clock for all hosts.

Collectives that overlap on any rank (started asynchronously, waited for later) count as one: a stage then ends with the
last arrival. If no steps are recorded, a step ends with the collective before which ranks compute the most. Not every
collective can count as a step: buckets of gradients are averaged in a burst, and the time before one bucket is not the
time of a step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.record.box import Box, Event

NO_STEP = -1
"""Value of `Stage.step` if no steps are recorded."""
_MAX_PENDING = 1024  # limit on collectives that only some ranks have left; older ones are dropped
Call = tuple[str, int]  # a collective: its group, and its number in the group


class Stage(NamedTuple):
    """The times of all ranks before one collective, or before several that overlap.

    Attributes:
        step: Number of the optimizer step; `NO_STEP` if none is recorded.
        ends_with: Operation, elements and line of the collective.
        busy_ns: Time that each rank spent between the collectives, in the order of the ranks.
        span_ns: Typical time from leaving one collective to leaving the next: median over the ranks.
        phases_ns: The part of `busy_ns` that each rank spent in a phase, by the phase's name.
        ended_ns: Time at which the highest rank left the collective, by its own clock.
        is_after_gap: Whether the collectives before this stage are unknown, because events were lost.
    """

    step: int
    ends_with: tuple[str, int, str]
    busy_ns: tuple[int, ...]
    span_ns: int
    phases_ns: dict[str, tuple[int, ...]]
    ended_ns: int
    is_after_gap: bool


@dataclasses.dataclass
class _Phase:
    name: str
    begun_ns: int
    ended_ns: int = 0


class _Rank:
    """The record of one rank, as far as it is still needed."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.hides_waits = False  # whether this rank calls collectives whose end is not recorded
        self.left_ns = 0  # when this rank left the last collective of the previous stage
        self.arrived_ns = 0  # when this rank arrived at the newest collective of the current stage
        self.leaves_ns = 0  # when this rank left the last of the collectives of the current stage
        self.step = NO_STEP
        self._next = 0  # number of the first event that has not been read yet
        self._open: set[int] = set()  # numbers of earlier events that had not ended when they were read
        self._phases: deque[_Phase] = deque()
        self._open_phases: dict[int, _Phase] = {}
        self._steps: deque[tuple[int, int]] = deque()

    def news(self, box: Box) -> Iterable[Event]:
        """Yield the collectives that have ended since the last call; remember new steps and phases."""
        for event in box.events:
            number = event.number
            if number < self._next and number not in self._open:
                continue
            if event.kind == "step" and number not in self._open:
                self._steps.append((event.begun_ns, event.seq))
            elif event.kind == "phase":
                self._take_phase(event)
            elif event.kind == "call":
                self.hides_waits = True
            elif event.kind == "collective" and event.ended_ns:
                self.groups.add(event.text)
                yield event
            if event.ended_ns:
                self._open.discard(number)
            else:
                self._open.add(number)
        if box.events:
            self._next = max(self._next, box.events[-1].number + 1)
            self._give_up_before(box.events[0].number)

    def _give_up_before(self, oldest: int) -> None:
        """Forget unfinished events that were overwritten: their end will never be known."""
        self._open = {number for number in self._open if number >= oldest}
        for number in [number for number in self._open_phases if number < oldest]:
            phase = self._open_phases.pop(number)
            phase.ended_ns = phase.begun_ns

    def _take_phase(self, event: Event) -> None:
        phase = self._open_phases.pop(event.number, None)
        if phase is None:
            phase = _Phase(event.text, event.begun_ns)
            self._phases.append(phase)
        phase.ended_ns = event.ended_ns
        if not event.ended_ns:
            self._open_phases[event.number] = phase

    def step_at(self, time_ns: int) -> int:
        """Return the last step that had begun by `time_ns`; successive calls must not go back in time."""
        while self._steps and self._steps[0][0] <= time_ns:
            self.step = self._steps.popleft()[1]
        return self.step

    def phases_within(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return how long each phase took between two times; successive calls must not go back in time."""
        found: dict[str, int] = {}
        while self._phases and 0 < self._phases[0].ended_ns <= begin_ns:
            self._phases.popleft()
        for phase in self._phases:
            if phase.begun_ns >= end_ns:
                break
            inside = min(phase.ended_ns or end_ns, end_ns) - max(phase.begun_ns, begin_ns)
            found[phase.name] = found.get(phase.name, 0) + max(0, inside)
        return found


class Stages:
    """Builds stages from the boxes of ranks, incrementally."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._states = [_Rank() for _ in boxes]
        self._calls: dict[Call, list[Event | None]] = {}  # each call's events by rank; ordered by the calls' first ends
        self._has_gap = True
        self._present: Event | None = None  # newest collective of the current stage: the event of the first rank

    def add(self, boxes: Sequence[Box]) -> list[Stage]:
        """Return the stages that have ended since the last call.

        Args:
            boxes: Boxes of the same ranks in the same order, whole or with only their newest events.
        """
        for place, (state, box) in enumerate(zip(self._states, boxes, strict=True)):
            for event in state.news(box):
                self._calls.setdefault((event.text, event.seq), [None] * len(boxes))[place] = event
        return [] if any(state.hides_waits for state in self._states) else self._complete()

    def _complete(self) -> list[Stage]:
        """Take the calls that all ranks have left; return the stages that they end. Drop calls that can't complete."""
        stages = []
        newest = {group: seq for (group, seq), events in self._calls.items() if None not in events}
        num_extra = len(self._calls) - _MAX_PENDING
        for number, (call, events) in enumerate(list(self._calls.items())):
            known = [event for event in events if event]
            if len(known) == len(events):
                stage = self._take(known)
                if stage:
                    stages.append(stage)
            elif call[1] <= newest.get(call[0], -1):  # some rank's event was overwritten before it was read
                self._forget()
            elif all(call[0] in state.groups for state in self._states):
                break  # every rank is in this group, so the ranks without an event have not left this call yet
            elif number >= num_extra:
                continue  # some ranks may not be in this group: keep the call while not too many are kept
            del self._calls[call]
        return stages

    def _forget(self) -> None:
        """Start over after a gap: the work before the next collective is unknown."""
        self._has_gap, self._present = True, None
        for state in self._states:
            state.left_ns = state.leaves_ns = 0

    def _take(self, events: list[Event]) -> Stage | None:
        """Add a collective that all ranks have left; if it begins a new stage, return the previous one."""
        states = self._states
        overlaps = any(event.begun_ns < state.leaves_ns for event, state in zip(events, states, strict=True))
        stage = None if overlaps else self._close()
        for event, state in zip(events, states, strict=True):
            state.arrived_ns = event.begun_ns
            state.leaves_ns = max(state.leaves_ns, event.ended_ns)
        self._present = events[0]
        return stage

    def _close(self) -> Stage | None:
        """End the current stage, and return it; None if its beginning is unknown."""
        stage, states, last = None, self._states, self._present
        if last is not None and all(state.left_ns for state in states):
            busy = tuple(state.arrived_ns - state.left_ns for state in states)
            spans = sorted(state.leaves_ns - state.left_ns for state in states)
            parts = [state.phases_within(state.left_ns, state.arrived_ns) for state in states]
            names = dict.fromkeys(name for part in parts for name in part)
            phases = {name: tuple(part.get(name, 0) for part in parts) for name in names}
            step = states[0].step_at(states[0].arrived_ns)
            ended = states[-1].leaves_ns
            ends_with = (last.op, last.value, last.site)
            stage = Stage(step, ends_with, busy, spans[len(spans) // 2], phases, ended, self._has_gap)
            self._has_gap = False
        for state in states:
            state.left_ns = state.leaves_ns
        return stage
