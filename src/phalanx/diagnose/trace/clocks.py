"""One clock for the ranks of several hosts, whose monotonic clocks begin at different times.

Launchers that exchange heartbeats have measured the offsets of their clocks. Otherwise, or if a launcher's record is
lost, clocks are related by the time of day, which is as accurate as the hosts keep it. Collectives bound the error of
this relation: when a rank leaves collective number n + 2, all ranks have reached collective n. (When a rank leaves
number n itself, this proves less. A collective of several hosts is recorded by each host as one or two collectives of
its own ranks, and the hosts exchange data before, between or after these.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from phalanx.record.box import Box
from phalanx.record.clocks import Ahead

_MEETINGS = (
    "join",
    "barrier",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)  # collectives in which every rank waits for all
_FURTHER = 2

_Calls = dict[tuple[str, int], tuple[str, int, int, int]]  # (group, number) -> op, elements, last arrival, first leave


@dataclasses.dataclass(frozen=True)
class Clock:
    """How the clock of one host relates to the clock of the first host.

    Attributes:
        shift_ns: Nanoseconds to add to times of this clock.
        within_ns: Largest error of the resulting times; infinite if nothing bounds it.
        by: Source of the shift: "heartbeats", "time of day", or "collectives" where these contradict the time of day.
    """

    host: str
    shift_ns: int
    within_ns: float = 0.0
    by: str = "time of day"


def align(boxes: Sequence[Box], measured: Mapping[str, Ahead] = MappingProxyType({})) -> dict[str, Clock]:
    """Return how the clock of each host relates to the clock of the first box's host.

    Args:
        measured: Measured clocks of other hosts; key: the host whose launcher has measured them.
    """
    hosts = {box.host: box.realtime_less_monotonic_ns for box in reversed(boxes)}
    calls = {host: _calls([box for box in boxes if box.host == host]) for host in hosts}
    first = boxes[0].host
    clocks = {first: Clock(first, 0)}
    for host in hosts:
        if host in measured.get(first, {}):
            ahead_ns, within_ns = measured[first][host]
            clocks[host] = Clock(host, -ahead_ns, within_ns, "heartbeats")
        elif first in measured.get(host, {}):
            clocks[host] = Clock(host, *measured[host][first], "heartbeats")
        elif host != first:
            clocks[host] = _clock(host, hosts[host] - hosts[first], calls[first], calls[host])
    return clocks


def _clock(host: str, by_day_ns: int, reference: _Calls, calls: _Calls) -> Clock:
    low = max((at[2] - end for at, end in _pairs(reference, calls)), default=-math.inf)
    high = min((end - at[2] for at, end in _pairs(calls, reference)), default=math.inf)
    if not low <= high or math.isinf(low) or math.isinf(high):
        return Clock(host, by_day_ns, math.inf)
    within = max(by_day_ns - low, high - by_day_ns)
    if low <= by_day_ns <= high:
        return Clock(host, by_day_ns, within)
    return Clock(host, int(low + high) // 2, (high - low) / 2, "collectives")


def _calls(boxes: Sequence[Box]) -> _Calls:
    """Return when the last of these ranks reached each synchronizing collective, and when the first left it."""
    found: _Calls = {}
    for box in boxes:
        for event in box.events:
            if event.kind == "collective" and event.op in _MEETINGS and event.ended_ns:
                key = (event.text, event.seq)
                _, _, arrived, left = found.get(key, ("", 0, event.begun_ns, event.ended_ns))
                found[key] = (event.op, event.value, max(arrived, event.begun_ns), min(left, event.ended_ns))
    return found


def _pairs(early: _Calls, late: _Calls) -> list[tuple[tuple[str, int, int, int], int]]:
    """Return each call of `early` with the time at which a rank of `late` first left the second collective after it."""
    pairs = []
    for (group, seq), call in early.items():
        same, behind = late.get((group, seq)), late.get((group, seq + _FURTHER))
        if same is not None and behind is not None and same[:2] == call[:2]:
            pairs.append((call, behind[3]))
    return pairs
