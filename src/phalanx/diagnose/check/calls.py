"""The calls of ranks, from their black boxes: the first call in which ranks differ, and which ranks wait for which.

Sizes are compared for operations in which all ranks must pass equally many elements. dtype and root need no comparison
here: the core itself refuses calls that differ in these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx._text import counted, named
from phalanx.record.box import Box, Event

_SAME_SIZE = ("broadcast", "all_reduce", "reduce")  # operations in which every rank passes the same number of elements


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective or a message of a rank.

    Attributes:
        seq: Number of the collective in its group; for a message, the peer's rank in the group plus 1.
        num_elems: Number of elements that this rank passes or receives.
        began_ns: Time at which the call began, by the host's monotonic clock.
        is_open: Whether the call has not returned yet.
    """

    rank: int
    group: str
    op: str
    seq: int
    num_elems: int
    line: str
    began_ns: int
    is_open: bool
    is_message: bool

    @property
    def key(self) -> tuple[str, int]:
        """The facts that must be the same on all ranks."""
        return self.op, self.num_elems if self.op in _SAME_SIZE else 0

    def __str__(self) -> str:
        elems = f" of {counted(self.num_elems, 'element')}" if self.num_elems else ""
        at = f" at {self.line}" if self.line else ""
        return f"{self.op}{elems}{_in_group(self.group)}{at}"


def _in_group(group: str) -> str:
    return "" if group in ("", "default") else f" in group {group!r}"


@dataclasses.dataclass(frozen=True)
class Record:
    """The calls of a job's ranks.

    Attributes:
        calls: Calls of each rank, oldest first.
        members: Ranks that have joined each group.
        is_whole: Whether no rank has made more calls than its box holds.
    """

    calls: Mapping[int, Sequence[Call]]
    members: Mapping[str, Sequence[int]]
    is_whole: bool

    @classmethod
    def of(cls, boxes: Iterable[Box]) -> Record:
        calls: dict[int, list[Call]] = {}
        members: dict[str, set[int]] = {}
        is_whole = True
        for box in boxes:
            is_whole = is_whole and box.num_events <= len(box.events)
            own = calls.setdefault(box.rank, [])
            for event in box.events:
                if event.kind in ("collective", "message"):
                    members.setdefault(event.text, set()).add(box.rank)
                    if event.op not in ("", "join"):
                        own.append(_call(box.rank, event))
        return cls(calls, {name: sorted(ranks) for name, ranks in members.items()}, is_whole)

    @property
    def num_calls(self) -> int:
        return sum(map(len, self.calls.values()))

    def collectives(self, rank: int, group: str) -> dict[int, Call]:
        """Return a rank's collectives in a group by their number."""
        own = self.calls.get(rank, ())
        return {call.seq: call for call in own if call.group == group and not call.is_message}

    def waiting(self) -> dict[int, Call]:
        """Return the call in which each waiting rank waits, by rank."""
        found = {}
        for rank, calls in self.calls.items():
            if still := [call for call in calls if call.is_open]:
                found[rank] = still[-1]
        return found


def _call(rank: int, event: Event) -> Call:
    return Call(
        rank, event.text, event.op, event.seq, event.value, event.site, event.begun_ns,
        is_open=not event.ended_ns, is_message=event.kind == "message",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first call number of a group for which ranks made different calls.

    Attributes:
        lines: One line for each of the different calls, and one for the ranks that made no call of this number.
    """

    group: str
    seq: int
    lines: Sequence[str]


def first_difference(record: Record, finished: Collection[int] = ()) -> Difference | None:
    """Return the earliest difference between ranks of any one group; None if there is none.

    Args:
        finished: Ranks that will make no more calls, so a call that they lack is a difference, too.
    """
    found: list[tuple[int, Difference]] = []
    for group, members in record.members.items():
        made = {rank: record.collectives(rank, group) for rank in members}
        # A full box drops its oldest calls, and not all boxes drop the same numbers. So begin where each box has calls.
        first = 0 if record.is_whole else max(min(calls, default=0) for calls in made.values())
        for seq in sorted({seq for calls in made.values() for seq in calls if seq >= first}):
            by_key: dict[tuple[str, int] | None, list[int]] = {}
            for rank in members:
                call = made[rank].get(seq)
                if call is not None or rank in finished:
                    by_key.setdefault(call.key if call else None, []).append(rank)
            if len(by_key) > 1:
                began = min(calls[seq].began_ns for calls in made.values() if seq in calls)
                lines = [f"{named('rank', ranks)} called {_said(made[ranks[0]], seq)}" for ranks in by_key.values()]
                found.append((began, Difference(group, seq, lines)))
                break
    return min(found, key=lambda one: one[0])[1] if found else None


def _said(calls: Mapping[int, Call], seq: int) -> str:
    """Return a rank's call with the number `seq`, or the rank's last call before that."""
    if seq in calls:
        return str(calls[seq])
    before = max((number for number in calls if number < seq), default=0)
    return f"nothing after {calls[before]}" if before else "nothing"


def awaited(record: Record, call: Call) -> list[int]:
    """Return the ranks for which a rank waits in a call."""
    members = record.members.get(call.group, ())
    if call.is_message:
        peer = call.seq - 1
        return [members[peer]] if 0 <= peer < len(members) else []
    return [rank for rank in members if call.seq not in record.collectives(rank, call.group)]


def circle(record: Record) -> list[Call]:
    """Return the calls of ranks that wait for each other in a circle; empty if there is none."""
    waits = record.waiting()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank in waits and rank not in path:
            path.append(rank)
            rank = next((other for other in awaited(record, waits[rank]) if other in waits), -1)
        if rank in path:
            return [waits[one] for one in path[path.index(rank) :]]
    return []
