"""Reads a rank's black box for `phalanx top`: its state, and its steps.

A rank's state follows from the event in its box that the main thread has begun and not ended (the debugger, and the
wait for it, are recorded as phases), or else from such an event of another thread. Without such an event, the state
follows from whether the process sleeps and uses no CPU. If the process is stopped, traced or gone, that takes
precedence over everything else.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import time

from phalanx.debugging import AT_BREAKPOINT, IN_DEBUGGER
from phalanx.diagnose.why.activity import joining_call
from phalanx.record.box import Box, Event, Tail

_WINDOW_NS = 10 * 10**9
_MOST_STEPS = 1024
_MOST_BARS = 60
_NEWEST = 64  # number of newest events that are searched for the last call
_CALLS = ("collective", "message", "call")
_OF = re.compile(r"of (\d+)")
_PHASES = {
    "load data": "loading data",
    "checkpoint": "writing a checkpoint",
    "snapshot": "writing a checkpoint",
    AT_BREAKPOINT: "waiting",
}


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a rank is doing.

    Attributes:
        state: One of ``computing``, ``waiting``, ``asleep``, ``reading``, ``loading data``, ``writing a checkpoint``,
            ``in the debugger``, ``stopped``, ``gone``.
        what: Message, phase, collective with its number, or the like; empty if that is not known.
        site: Line of the script, such as ``train.py:31``; empty if it is not known.
        since_s: Seconds since the activity began; None if that is not known.
    """

    state: str
    what: str = ""
    site: str = ""
    since_s: float | None = None


class Steps:
    """The optimizer steps of a rank: how many it has taken, and how fast.

    Attributes:
        step: Number of the newest step; None before the first.
        num_steps: Number of the last step of the training; None if it is not known.
    """

    def __init__(self, bar_s: float = 1.0) -> None:
        self.step: int | None = None
        self.num_steps: int | None = None
        self._ended: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MOST_STEPS)  # end time, samples
        self._bar_ns = int(bar_s * 1e9)
        self._bars: dict[int, tuple[int, int]] = {}  # duration and number of the steps that ended in each interval

    def add(self, event: Event) -> None:
        """Add a step, which may not have ended."""
        self.step = event.seq
        if found := _OF.fullmatch(event.text):
            self.num_steps = int(found[1])
        if event.ended_ns:
            self._ended.append((event.ended_ns, event.value))
            total, count = self._bars.pop(event.ended_ns // self._bar_ns, (0, 0))
            self._bars[event.ended_ns // self._bar_ns] = total + event.ended_ns - event.begun_ns, count + 1
            if len(self._bars) > _MOST_BARS:
                del self._bars[next(iter(self._bars))]

    @property
    def times_s(self) -> list[float]:
        """Mean seconds of a step in each of the last intervals in which a step ended, oldest first."""
        return [total / count / 1e9 for total, count in self._bars.values()]

    def rates(self, now_ns: int) -> tuple[float, float] | None:
        """Return steps and samples per second over the last ten seconds; None before there are two steps.

        Both fall while the next step is overdue.
        """
        recent = [step for step in self._ended if step[0] > now_ns - _WINDOW_NS]
        if len(recent) < 2:
            recent = list(self._ended)[-2:]
        if len(recent) < 2:
            return None
        num = len(recent) - 1
        elapsed = recent[-1][0] - recent[0][0]
        overdue = max(0, now_ns - recent[-1][0] - 2 * elapsed // num)
        seconds = max(elapsed + overdue, 1) / 1e9
        return num / seconds, sum(samples for _, samples in recent[1:]) / seconds


class Recorded:
    """A rank's box, read again at each look.

    Args:
        fd: Open file of the box; closed by `close`.
        offset: Offset of the box in the file, in bytes.
        bar_s: Seconds that a bar of the step times stands for.
        most: Largest number of events, of all kinds, that a look decodes; 0: all new events, but only steps.
        first: Largest number of events that the first look reads.

    Attributes:
        news: Box with the events that the last look has read; None if it has read nothing.
    """

    def __init__(self, fd: int, offset: int, bar_s: float, most: int = 0, first: int = 8192) -> None:
        self._fd = fd
        self._offset = offset
        self._tail = Tail(fd, offset, most) if most else Tail(fd, offset, kinds=("step",), first=first)
        self.news: Box | None = None
        self._unfinished: list[Event] = []
        self.steps: Steps = Steps(bar_s)

    def look(self) -> None:
        """Read the events that are new since the last look.

        Raises:
            ValueError: The box is torn.
        """
        self.news = None
        self.news = self._tail.read()
        events = self.news.events if self.news is not None else ()
        for event in events:
            if event.kind == "step":
                self.steps.add(event)
        self._unfinished = [event for event in events if not event.ended_ns]

    def activity(self, pid: int) -> Activity | None:
        """Return the unfinished activity of the main thread, else of another thread; None if there is none."""
        events = [event for event in self._unfinished if event.kind in ("collective", "message", "phase")]
        events.sort(key=lambda event: (event.thread == pid, event.begun_ns))
        if not events:
            return None
        event = events[-1]
        since_s = max(0.0, (time.monotonic_ns() - event.begun_ns) / 1e9)
        if event.kind == "phase" and event.text == IN_DEBUGGER:
            return Activity("in the debugger", "", event.site, since_s)
        if event.kind == "phase":
            return Activity(_PHASES.get(event.text, "computing"), event.text, event.site, since_s)
        if event.kind == "message":
            peer = f" {'to' if event.op == 'send' else 'from'} rank {event.seq - 1}" if event.seq else ""
            return Activity("waiting", f"{event.op}{peer}", event.site, since_s)
        return Activity("waiting", _named(event), event.site, since_s)

    def asleep(self) -> Activity | None:
        """Return how long a sleeping rank has been in no collective; None if that is unknown, as with Gloo."""
        box = Tail(self._fd, self._offset, _NEWEST, _CALLS).read()
        called = [event for event in box.events if event.kind in _CALLS and event.ended_ns] if box is not None else []
        if not called:
            return None
        last = max(called, key=lambda event: event.ended_ns)
        if last.kind == "call":  # its end is not recorded, so the rank may still wait in it
            return None
        since_s = max(0.0, (time.monotonic_ns() - last.ended_ns) / 1e9)
        return Activity("asleep", f"since {_named(last)}", last.site, since_s)

    def close(self) -> None:
        os.close(self._fd)


def _named(event: Event) -> str:
    """Return the name by which the caller knows an operation."""
    if event.op == "join":
        return joining_call(event.text)
    return f"{event.op} #{event.seq}" if event.kind == "collective" and event.seq else event.op
