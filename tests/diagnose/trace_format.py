"""What the trace event format asks of a JSON object, as its document says, for the phases that we write."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "C": {"name", "cat", "pid", "tid", "ts", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}


def check_format(trace: dict[str, Any]) -> None:
    """Fail where an object is no trace that ui.perfetto.dev and chrome://tracing show as it is meant."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        kind = event["ph"]
        missing = NEEDED[kind] - event.keys()
        assert not missing, f"{event} lacks {missing}"
        assert not event.keys() - NEEDED[kind] - {"ph", "tid"}, event
        assert type(event["pid"]) is int
        assert type(event.get("tid", 0)) is int
        if kind == "M":
            argument, of = METADATA[event["name"]]
            assert type(event["args"][argument]) is of
        else:
            assert event["ts"] >= 0
        if kind == "C":
            assert all(type(value) is int for value in event["args"].values()), event
        if kind == "i":
            assert event["s"] in "tpg"
        if kind == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert tracks.keys() <= named
    for slices in tracks.values():
        check_nesting(slices)
    check_flows(trace["traceEvents"], tracks)


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of a thread contain each other or do not meet."""
    ends: list[float] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while ends and ends[-1] <= one["ts"] + 0.0015:  # half a nanosecond of rounding in each number
            ends.pop()
        end = one["ts"] + one["dur"]
        assert not ends or end <= ends[-1] + 0.0015, one
        ends.append(end)


def check_flows(events: list[dict[str, Any]], tracks: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    """Each flow has one beginning and one end, not before it, both within a slice of a collective."""
    spans = {
        track: [(one["ts"], one["ts"] + one["dur"]) for one in slices if one["cat"] == "collective"]
        for track, slices in tracks.items()
    }
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) + len(ends) == sum(event["ph"] in "sf" for event in events), "a number is used twice"
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert start["pid"] != end["pid"]
        for event in (start, end):
            at = event["ts"]
            assert any(a <= at <= b + 0.0015 for a, b in spans[event["pid"], event["tid"]]), event
