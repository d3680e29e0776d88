"""The beginning of a rank, from its black box: the checkpoint that it loaded, its first step, and repeated steps.

Repeated steps are the steps that the previous attempt took after the checkpoint from which this attempt continues. If
the script caught an error during the previous attempt and loaded a checkpoint on its own, the steps that it thereby
lost do not count. Only a Trainer numbers the steps of a run. For a manual loop, the repeated steps are therefore those
that began after the previous attempt last saved or loaded that checkpoint.

A rank writes a failure note when an operation fails. The first step (or collective) itself has failed if no other step
or collective began between its end and that note. A failed step or collective does not count as progress, so the
launcher's line about the recovery does not name it.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.record.box import FAILED, LOADED, LOADING, Box, Event

_SAVING = ("checkpoint", "snapshot")
_MOST = 10_000  # number of events of each kind that are kept
_MARGIN = 16  # events that may be missing because they were being written when the box was read


class Before(NamedTuple):
    """A rank's record of the previous attempt.

    Attributes:
        last_step: Number, in the run, of the step that finished last; 0 if no step finished, or if steps have no such
            numbers. It need not be the largest number, because a script may catch an error and load a checkpoint.
        saved: Time at which the rank last saved or loaded a checkpoint, by the step of the checkpoint.
        steps: Start times of its finished steps, in order.
        has_steps: Whether the rank has recorded any step.
        uses_checkpoints: Whether the rank has loaded or saved any checkpoint.
    """

    last_step: int
    saved: dict[int, int]
    steps: tuple[int, ...]
    has_steps: bool
    uses_checkpoints: bool


def read_before(box: Box | None) -> Before:
    """Return the record of the previous attempt from its box; if the box is lost, return a `Before` without steps."""
    events = box.events if box is not None else ()
    steps = [event for event in events if event.kind == "step"]
    done = [event for event in steps if event.ended_ns]
    phases = [event for event in events if event.kind == "phase"]
    kept = [(event.seq, event.ended_ns) for event in phases if event.text in _SAVING and event.seq and event.ended_ns]
    kept += [(event.seq, event.begun_ns) for event in events if _is_loaded(event)]
    saved = dict(sorted(kept))
    return Before(
        next((event.seq for event in reversed(done) if is_numbered(event)), 0),
        saved,
        tuple(event.begun_ns for event in done),
        bool(steps),
        bool(saved) or any(event.text in (*_SAVING, LOADING) for event in phases),
    )


def is_numbered(step: Event) -> bool:
    """Whether a step has its number in the run. Only a Trainer knows this number; a manual loop starts at 1."""
    return step.kind == "step" and step.value > 0


def num_repeated(before: Before, first: Event, loaded_step: int | None) -> int | None:
    """Return how many steps of the previous attempt are repeated; None if that is unknown."""
    if is_numbered(first):
        return max(0, before.last_step - first.seq + 1) if before.has_steps else None
    if loaded_step not in before.saved or not before.has_steps:
        return None
    since_ns = before.saved[loaded_step]
    return sum(begun_ns >= since_ns for begun_ns in before.steps)


class Beginning:
    """Collects the events of a rank's beginning.

    Args:
        since_ns: Time before which events are ignored, by the clock of the host.

    Attributes:
        loaded_step: Step of the checkpoint that the rank has loaded; None if it has loaded none.
        has_gap: Whether events were overwritten before they were read, possibly the first ones.
    """

    def __init__(self, since_ns: int = 0) -> None:
        self._since_ns = since_ns
        self._events: dict[str, dict[int, Event]] = {"load": {}, "step": {}, "collective": {}}
        self._num_read = 0
        self._failed_ns = 0  # time of the first note about a failed operation; 0: none
        self.loaded_step: int | None = None
        self.has_gap = False

    def add(self, box: Box) -> None:
        """Add events that have begun or ended since the last call."""
        new = [event for event in box.events if event.number > self._num_read]
        if new and new[0].number > self._num_read + _MARGIN and new[0].begun_ns >= self._since_ns:
            self.has_gap = True
        self._num_read = max(self._num_read, box.num_events)
        for event in box.events:
            kind = "load" if event.kind == "phase" and event.text == LOADING else event.kind
            if _is_loaded(event) and event.begun_ns >= self._since_ns:
                self.loaded_step = event.seq
            if event.kind == "note" and event.text.startswith(FAILED) and event.begun_ns >= self._since_ns:
                self._failed_ns = min(filter(None, (self._failed_ns, event.begun_ns)))
            kept = self._events.get(kind)
            if kept is None or event.begun_ns < self._since_ns or event.op == "join":
                continue
            if event.number in kept or len(kept) < _MOST:
                kept[event.number] = event

    @property
    def has_ended_any(self) -> bool:
        """Whether any step or collective has ended, so that `first` can return one."""
        events = [*self._events["step"].values(), *self._events["collective"].values()]
        return any(event.ended_ns for event in events)

    @property
    def loading_ns(self) -> tuple[int, int] | None:
        """Start of the first load and end of the last load; None if there was none, or if one has not ended."""
        loads = self._events["load"].values()
        if not loads or not all(load.ended_ns for load in loads):
            return None
        return min(load.begun_ns for load in loads), max(load.ended_ns for load in loads)

    def first(self, before: Before) -> Event | None:
        """Return the first step, or the first collective if the rank records no steps; None until it has ended."""
        loading = self.loading_ns
        if loading is None and self._events["load"]:
            return None
        by_step = before.has_steps or bool(self._events["step"])
        if not by_step and before.uses_checkpoints and loading is None:
            return None
        events = self._events["step" if by_step else "collective"]
        after_ns = loading[1] if loading else 0
        first = next((events[number] for number in sorted(events) if events[number].begun_ns >= after_ns), None)
        return first if first is not None and first.ended_ns else None

    def has_failed(self, first: Event) -> bool | None:
        """Return whether an error ended this step or collective; None: unknown, because nothing has followed yet."""
        after = [
            event.begun_ns
            for kind in ("step", "collective")
            for event in self._events[kind].values()
            if event.begun_ns >= first.ended_ns
        ]
        if self._failed_ns:
            return not any(begun_ns < self._failed_ns for begun_ns in after)
        return False if after else None


def _is_loaded(event: Event) -> bool:
    return event.kind == "note" and event.text == LOADED
