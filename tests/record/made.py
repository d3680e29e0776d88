"""Black boxes of jobs that never ran, of ranks that take as long as a test says."""

from __future__ import annotations

import dataclasses
import gzip
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phalanx.record import box as format_of
from phalanx.record.box import Box, Event

MS = 1_000_000
PHASES = {"load data": 0.2, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
"""Shares of a step's computing."""


@dataclasses.dataclass
class Job:
    """Ranks that compute and then average, step after step.

    Attributes:
        num_ranks: Ranks, numbered from 0.
        step_ms: Typical time that a rank computes in a step.
        jitter: Standard deviation of that time, as a share of it.
        pauses: Share of steps in which a rank pauses, each time for a fifth of a step on average.
        slower: Further time of a rank, as a share of `step_ms`: by rank, or called with rank and step.
        phase: The phase in which the further time is lost.
        has_phases: Whether steps and phases are recorded, or collectives alone.
        hosts: Host of each rank; default: one for all. Each has a clock of its own.
    """

    num_ranks: int
    step_ms: float = 10.0
    jitter: float = 0.03
    pauses: float = 0.03
    slower: dict[int, float] | Callable[[int, int], float] = dataclasses.field(default_factory=dict)
    phase: str = "backward"
    has_phases: bool = True
    hosts: Sequence[str] = ()
    seed: int = 0

    def boxes(self, num_steps: int) -> list[Box]:
        """Return what the ranks have recorded after so many steps."""
        rng = random.Random(self.seed)
        ranks = [_Recording(self, rank) for rank in range(self.num_ranks)]
        left = [0.0] * self.num_ranks
        for step in range(num_steps):
            arrived = [
                one.compute(step, now, self._time(one.rank, step, rng)) for one, now in zip(ranks, left, strict=True)
            ]
            ends = max(arrived) + 50_000
            left = [ends + rng.random() * 20_000 for _ in ranks]
            for one, came, went in zip(ranks, arrived, left, strict=True):
                one.average(step, came, went)
        return [one.box() for one in ranks]

    def _time(self, rank: int, step: int, rng: random.Random) -> dict[str, float]:
        usual = self.step_ms * MS * max(0.1, 1 + rng.gauss(0, self.jitter))
        parts = {name: usual * share for name, share in PHASES.items()}
        if rng.random() < self.pauses:
            parts["forward"] += self.step_ms * MS * rng.expovariate(5)
        more = self.slower(rank, step) if callable(self.slower) else self.slower.get(rank, 0.0)
        parts[self.phase] += self.step_ms * MS * more
        return parts


class _Recording:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self._events: list[Event] = []
        self._host = job.hosts[rank] if job.hosts else "host"
        self._clock_ns = 1_000_000_000_000 * (1 + sorted({*job.hosts}).index(self._host) if job.hosts else 1)

    def compute(self, step: int, now: float, parts: dict[str, float]) -> float:
        """Record a step and its phases; return when they are over."""
        if self.job.has_phases:
            self._write(now, now + sum(parts.values()), "step", seq=step, value=64)
        for name, time in parts.items():
            if self.job.has_phases:
                self._write(now, now + time, "phase", text=name, seq=step)
            now += time
        return now

    def average(self, step: int, came: float, went: float) -> None:
        self._write(
            came, went, "collective", op="all_reduce", text="world", site="train.py:31", seq=step + 1, value=1000
        )

    def _write(self, begun: float, ended: float, kind: str, *, op="", text="", site="", seq=0, value=0) -> None:
        times = (int(begun) + self._clock_ns, int(ended) + self._clock_ns)
        self._events.append(Event(len(self._events) + 1, *times, kind, op, text, site, 100 + self.rank, seq, value))

    def box(self) -> Box:
        offset = 1_700_000_000_000_000_000 - self._clock_ns
        events = tuple(self._events)
        return Box(self.rank, self.job.num_ranks, 1000 + self.rank, 5, self._host, offset, len(events), events)


def encoded(box: Box) -> bytes:
    """Return a box as it lies in memory, with as many slots as it has events."""
    texts = [*dict.fromkeys(text for event in box.events for text in (event.text, event.site) if text)]
    number = {"": 0} | {text: place for place, text in enumerate(texts, 1)}
    told = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    slots = b"".join(
        format_of._EVENT.pack(
            event.number, event.begun_ns, event.ended_ns,
            format_of._KINDS.index(event.kind), format_of.OPS.index(event.op),
            number[event.text], number[event.site], event.thread, event.seq, event.value,
        )
        for event in box.events
    )  # fmt: skip
    head = format_of._HEADER.pack(
        format_of._MAGIC, format_of._VERSION, len(box.events), len(told), box.pid, box.rank, box.world_size,
        box.start_time, box.realtime_less_monotonic_ns, len(box.events), len(told), box.host.encode(),
    )  # fmt: skip
    return head.ljust(format_of._PAGE, b"\0") + slots + told


def save(boxes: Sequence[Box], folder: Path) -> None:
    """Write the boxes as a launcher saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for box in boxes:
        (folder / f"rank_{box.rank}{format_of.SUFFIX}").write_bytes(gzip.compress(encoded(box)))


def up_to(boxes: Sequence[Box], time_ns: int) -> list[Box]:
    """Return the boxes as they were at a time: later events are not there, and some have not ended."""
    return [
        dataclasses.replace(
            box,
            events=tuple(
                event if event.ended_ns <= time_ns else event._replace(ended_ns=0)
                for event in box.events
                if event.begun_ns <= time_ns
            ),
        )
        for box in boxes
    ]


def looks(boxes: Sequence[Box], every_ns: int) -> Iterator[list[Box]]:
    """Yield the boxes as somebody finds them who looks at them so often."""
    begin = min(event.begun_ns for box in boxes for event in box.events[:1])
    end = max(event.ended_ns for box in boxes for event in box.events[-1:])
    for time_ns in range(begin + every_ns, end + every_ns, every_ns):
        yield up_to(boxes, time_ns)
