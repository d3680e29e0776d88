"""What ``phalanx check`` concludes from a script's first steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from phalanx._text import counted, named
from phalanx.diagnose.check.calls import Call, Record, awaited, circle, first_difference

SAME, NOTHING_FOUND, FOUND = 0, 3, 1  # exit codes


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why the trial of a script stopped.

    Attributes:
        why: ``steps``: all ranks took their steps. ``calls``: all ranks made enough calls. ``ended``: the job ended
            before that. ``stalled``: no rank progressed. ``late``: the time was up.
        code: Exit code of a job that ended.
        in_step: Ranks that have taken all their steps.
        answer: Sentence of ``phalanx why`` about a job that stalled or was late; empty if there is none.
    """

    why: str
    code: int = 0
    in_step: Sequence[int] = ()
    answer: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of checking a script.

    Attributes:
        kind: ``same``, ``differ``, ``deadlock``, ``stalled``, ``failed`` or ``unknown``.
        code: Exit code of ``phalanx check``.
        words: The result in one line.
        evidence: Lines that prove the result.
    """

    kind: str
    code: int
    words: str
    evidence: Sequence[str] = ()


def result_of(record: Record, end: Stop, num_ranks: int, num_steps: int) -> Result:
    """Return the result of comparing the ranks' calls."""
    is_over = end.why in ("steps", "ended", "stalled")
    finished = end.in_step if end.why == "stalled" else record.calls if is_over else ()
    alike = first_difference(record)
    if (found := alike or (first_difference(record, finished) if not end.code else None)) is not None:
        where = "" if found.group in ("", "default") else f" of group {found.group!r}"
        words = f"the ranks differ in collective #{found.seq}{where}"
        return Result("differ", FOUND, words, found.lines)
    if end.why == "stalled":
        return _stalled(record, end.answer)
    if end.why == "ended" and end.code:
        return Result("failed", FOUND, f"the script failed with exit code {end.code}")
    if end.why == "late":
        words = "the time was up before every rank had taken its steps; see --seconds"
        return Result("unknown", NOTHING_FOUND, words, [f"when it was up: {end.answer}"] if end.answer else [])
    if not record.num_calls:
        words = "no rank made a collective on the CPU, so there is nothing to compare"
        return Result("unknown", NOTHING_FOUND, words)
    steps = counted(num_steps, "optimizer step")
    until = {"steps": f"in {steps}", "ended": "and the script ended", "calls": "before it was stopped"}[end.why]
    most = max(len(calls) for calls in record.calls.values())
    if any(call.is_message for calls in record.calls.values() for call in calls):
        return Result("same", SAME, f"{num_ranks} ranks made matching collectives and messages {until}")
    if num_ranks == 1:
        return Result("same", SAME, f"1 rank made {counted(most, 'call')} {until}")
    return Result("same", SAME, f"{num_ranks} ranks made the same {counted(most, 'call')} {until}")


def _stalled(record: Record, answer: str) -> Result:
    if found := circle(record):
        lines = [
            f"rank {call.rank} waits for rank {other.rank} in {call}"
            for call, other in zip(found, [*found[1:], found[0]], strict=True)
        ]
        return Result("deadlock", FOUND, "deadlock: each of these ranks waits for the next", lines)
    waits = record.waiting()
    missing = sorted({rank for call in waits.values() for rank in awaited(record, call)} - set(waits))
    lines = [f"rank {rank} waits in {call}" for rank, call in sorted(waits.items())]
    for rank in missing:
        calls = record.calls.get(rank)
        last = f"its last call was {calls[-1]}" if calls else "it has made no call yet"
        lines.append(f"rank {rank} has not arrived; {last}")
    who = named("rank", missing) if missing else "a message that nobody sends or takes"
    words = answer or f"{counted(len(waits), 'rank')} waiting for {who}"
    return Result("stalled", FOUND, f"stalled: {words}", lines)


def sequences(record: Record) -> list[str]:
    """Return the calls in order, as lines: ranks with the same calls share a block, and repeated calls share a line."""
    by_calls: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(record.calls):
        by_calls.setdefault(tuple(map(str, record.calls[rank])), []).append(rank)
    lines = []
    for calls, ranks in by_calls.items():
        lines.append(f"{named('rank', ranks)}: {counted(len(calls), 'call')}")
        number = 1
        for said, run in itertools.groupby(calls):
            length = len(list(run))
            span = str(number) if length == 1 else f"{number}-{number + length - 1}"
            lines.append(f"  {span:>7}  {said}")
            number += length
    return lines


def as_json(record: Record, result: Result, end: Stop) -> dict[str, Any]:
    """Return the result and all calls as an object for JSON."""
    calls = {rank: [_plain(call) for call in calls] for rank, calls in sorted(record.calls.items())}
    return {
        "result": result.kind, "words": result.words, "evidence": [*result.evidence], "ended": end.why,
        "exit_code": result.code, "calls": calls,
    }  # fmt: skip


def _plain(call: Call) -> dict[str, Any]:
    facts = dataclasses.asdict(call)
    return {name: facts[name] for name in ("group", "op", "seq", "num_elems", "line", "is_open", "is_message")}
