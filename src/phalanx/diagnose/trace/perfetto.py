"""All ranks of a job on one clock, in the trace event format that ui.perfetto.dev and chrome://tracing open.

A rank is a process of the trace; its threads are threads. Collectives, messages, steps and phases are slices, notes are
instants. A flow (an arrow) leads from the rank that reached a collective last to each rank that waited for it. In a
collective of several hosts, each host records steps of its own, in which no other host takes part. So an arrow joins
two hosts only if their steps overlap and belong to the same call. In addition, the rank at the arrow's start must have
arrived after all ranks of the other host, by more than the error of the clocks.

The documented JSON is written rather than Perfetto's protobuf: browsers read it, tests check it, and 24,000 slices are
half a megabyte when compressed. A trace of a running job begins with the events that its boxes still hold; if the job
hangs, those are the events that matter.

Format: "Trace Event Format", the Chromium project; JSON Object Format with events X, M, i, s and f.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import phalanx
from phalanx.diagnose.trace.clocks import Clock, align
from phalanx.record.box import MEMORY, Box, Event
from phalanx.record.clocks import Ahead

_FIRST_LANE = 1 << 22  # track numbers from here on can't be thread ids of Linux
_TraceEvent = dict[str, Any]


def write_trace(
    boxes: Sequence[Box], path: Path, measured: Mapping[str, Ahead] = MappingProxyType({})
) -> dict[str, Any]:
    """Write the trace of these ranks, compressed if the path ends in ``.gz``; return its `otherData`.

    Args:
        boxes: Boxes of the ranks, one for each rank.
        path: File to write.
        measured: Clocks of other hosts, by the host whose launcher has measured them.
    """
    trace = make_trace(boxes, measured)
    data = json.dumps(trace, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, 4) if path.suffix == ".gz" else data)
    about: dict[str, Any] = trace["otherData"]
    return about


def make_trace(boxes: Sequence[Box], measured: Mapping[str, Ahead] = MappingProxyType({})) -> dict[str, Any]:
    """Return the trace of these ranks as an object for JSON; see `write_trace`."""
    clocks = align(boxes, measured)
    ranks = [_Rank(box, clocks[box.host]) for box in boxes]
    begin_ns = min((rank.events[0].begun_ns for rank in ranks if rank.events), default=0)
    end_ns = max((max(event.begun_ns, event.ended_ns) for rank in ranks for event in rank.events), default=0)
    events: list[_TraceEvent] = []
    for rank in ranks:
        events += rank.slices(begin_ns, end_ns)
    num_flows = 0
    for flow in _flows(ranks, begin_ns, end_ns):
        num_flows += 1
        events += flow
    about = {
        "made by": f"phalanx {phalanx.__version__}",
        "ranks": len(ranks),
        "begin": begin_ns + boxes[0].realtime_less_monotonic_ns,
        "slices": sum(event["ph"] == "X" for event in events),
        "flows": num_flows,
        "clocks": [_told(clock) for clock in clocks.values()],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _told(clock: Clock) -> dict[str, Any]:
    within = clock.within_ns / 1e3 if clock.within_ns < float("inf") else None  # JSON has no infinity
    return {"host": clock.host, "within_us": within, "by": clock.by}


class _Rank:
    """The events of one rank by the common clock, each with the track on which it is shown."""

    def __init__(self, box: Box, clock: Clock) -> None:
        self.box = box
        self.within_ns = clock.within_ns
        shift = clock.shift_ns
        self.events = [
            event._replace(begun_ns=event.begun_ns + shift, ended_ns=event.ended_ns and event.ended_ns + shift)
            for event in box.events
        ]
        self.events.sort(key=lambda event: (event.begun_ns, -(event.ended_ns or 1 << 63)))
        self._names: dict[int, str] = {}
        self.tracks = list(self._place())

    def _place(self) -> Iterator[int]:
        """Yield the track of each event: its thread's track, or another track if slices overlap without nesting."""
        numbers = itertools.count(_FIRST_LANE)
        lanes: dict[int, list[tuple[int, list[int]]]] = defaultdict(
            list
        )  # tracks of each thread, each with the ends of its open slices
        for event in self.events:
            end = event.ended_ns or 1 << 63
            known = lanes[event.thread]
            for _, open_ends in known:
                while open_ends and open_ends[-1] <= event.begun_ns:
                    open_ends.pop()
            fitting = [lane for lane in known if not lane[1] or end <= lane[1][-1]]
            if not fitting:
                track = next(numbers) if known else event.thread
                name = "main thread" if event.thread == self.box.pid else f"thread {event.thread}"
                self._names[track] = name + (" (overlapping)" if known else "")
                fitting = [(track, [])]
                known += fitting
            fitting[0][1].append(end)
            yield fitting[0][0]

    def slices(self, begin_ns: int, end_ns: int) -> Iterator[_TraceEvent]:
        pid, box = self.box.rank, self.box
        yield _named("process_name", pid, {"name": f"rank {pid} ({box.host}, process {box.pid})"})
        yield _named("process_sort_index", pid, {"sort_index": pid})
        for track, name in self._names.items():
            yield {**_named("thread_name", pid, {"name": name}), "tid": track}
        for event, track in zip(self.events, self.tracks, strict=True):
            shown: _TraceEvent = {"ph": "X", "pid": pid, "tid": track, "ts": _micros(event.begun_ns - begin_ns)}
            shown |= _content(event)
            if event.kind == "note" and event.text == MEMORY:
                shown |= {"ph": "C", "args": {"MiB": event.value >> 20}}
            elif event.kind in ("note", "call"):
                shown |= {"ph": "i", "s": "t"}
            else:
                shown["dur"] = _micros((event.ended_ns or end_ns) - event.begun_ns)
                if not event.ended_ns:
                    shown["args"]["unfinished"] = True
            yield shown


def _content(event: Event) -> _TraceEvent:
    """Return name, category and arguments of a slice."""
    args: dict[str, Any]
    if event.kind in ("collective", "call"):
        name, args = event.op, {"group": event.text, "number": event.seq, "elements": event.value}
    elif event.kind == "message":
        name, args = event.op, {"group": event.text, "elements": event.value}
        if event.seq:
            args["peer"] = event.seq - 1
    elif event.kind == "step":
        name, args = f"step {event.seq}", {"samples": event.value}
    else:
        name, args = event.text or event.kind, {"step": event.seq} if event.kind == "phase" else {}
    if event.site:
        args["line"] = event.site
    return {"name": name, "cat": event.kind, "args": args}


class _Call(NamedTuple):
    """A rank's part in a collective."""

    begun_ns: int
    ended_ns: int
    rank: _Rank
    track: int


def _flows(ranks: Sequence[_Rank], begin_ns: int, end_ns: int) -> Iterator[tuple[_TraceEvent, _TraceEvent]]:
    """Yield start and end of each arrow: from the last rank that reached a collective to a rank that waited for it."""
    calls: dict[tuple[str, int, str, int], list[_Call]] = defaultdict(list)
    for rank in ranks:
        for event, track in zip(rank.events, rank.tracks, strict=True):
            if event.kind == "collective":
                call = _Call(event.begun_ns, event.ended_ns or end_ns, rank, track)
                calls[event.text, event.seq, event.op, event.value].append(call)
    numbers = itertools.count(1)
    for came in calls.values():
        lasts: dict[str, _Call] = {}  # the last arrival on each host
        for call in sorted(came, key=lambda call: call.begun_ns, reverse=True):
            lasts.setdefault(call.rank.box.host, call)
        for waiting in came:
            last = _last_of(lasts, waiting.rank)
            if waiting.begun_ns < last.begun_ns <= waiting.ended_ns:
                flow: _TraceEvent = {"name": "waited for", "cat": "wait", "id": next(numbers)}
                flow["ts"] = _micros(last.begun_ns - begin_ns)
                yield (
                    {**flow, "ph": "s", "pid": last.rank.box.rank, "tid": last.track},
                    {**flow, "ph": "f", "bp": "e", "pid": waiting.rank.box.rank, "tid": waiting.track},
                )


def _last_of(lasts: Mapping[str, _Call], rank: _Rank) -> _Call:
    """Return the last arrival; one on another host counts only if it is later by more than the clocks' error."""
    here = lasts[rank.box.host]
    later = (call for call in lasts.values() if call.begun_ns - call.rank.within_ns - rank.within_ns > here.begun_ns)
    return max(later, key=lambda call: call.begun_ns, default=here)


def _named(name: str, pid: int, args: _TraceEvent) -> _TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "args": args}


def _micros(time_ns: int) -> float:
    return time_ns / 1000


def merged(parts: Iterable[Sequence[Box]]) -> list[Box]:
    """Return one box of each rank, merged from several reads; the latest read of each event counts."""
    newest: dict[int, Box] = {}
    events: dict[int, dict[int, Event]] = defaultdict(dict)
    for boxes in parts:
        for box in boxes:
            if box.rank in newest and newest[box.rank].pid != box.pid:
                events[box.rank].clear()
            newest[box.rank] = box
            events[box.rank].update((event.number, event) for event in box.events)
    return [newest[rank].with_events(sorted(events[rank].values())) for rank in sorted(newest)]
