"""What black boxes say of calls, without a job."""

from __future__ import annotations

import pytest

from phalanx.diagnose.check.calls import Record, circle, first_difference
from phalanx.diagnose.check.result import Stop, result_of
from phalanx.record.box import Box, Event


def box(rank, *calls, num_events=0):
    """Return a box whose calls are tuples of group, op, seq, elements, and whether the call is open."""
    events = [
        Event(number, 10 * number, 0 if is_open else 10 * number + 5, kind, op, group, f"x.py:{seq}", 1, seq, elems)
        for number, (group, op, seq, elems, is_open) in enumerate(calls, 1)
        for kind in ["message" if op in ("send", "recv") else "collective"]
    ]
    return Box(rank, 2, 100 + rank, 0, "here", 0, num_events or len(events), tuple(events))


def did(op="all_reduce", seq=1, elems=4, group="default", is_open=False):
    return group, op, seq, elems, is_open


def test_gathers_may_differ_in_size_and_reductions_may_not():
    assert first_difference(Record.of([box(0, did("all_gather")), box(1, did("all_gather", elems=9))])) is None
    found = first_difference(Record.of([box(0, did(elems=1)), box(1, did(elems=9))]))
    assert found is not None
    assert found.lines == [
        "rank 0 called all_reduce of 1 element at x.py:1",
        "rank 1 called all_reduce of 9 elements at x.py:1",
    ]


def test_a_rank_that_may_still_call_is_no_difference():
    record = Record.of([box(0, did(), did(seq=2)), box(1, did())])
    assert first_difference(record) is None
    found = first_difference(record, finished=[1])
    assert found is not None
    assert found.seq == 2
    assert found.lines[1] == "rank 1 called nothing after all_reduce of 4 elements at x.py:1"


def test_calls_that_a_full_box_has_forgotten_are_not_missing():
    full = box(0, did(seq=8), did(seq=9), num_events=9)
    record = Record.of([full, box(1, *(did(seq=seq) for seq in range(1, 10)))])
    assert not record.is_whole
    assert first_difference(record, finished=[0, 1]) is None


def test_the_earliest_difference_of_all_groups_counts():
    first = [did(seq=1, group="b"), did(seq=1, group="a")]
    other = [did("broadcast", seq=1, group="b"), did("broadcast", seq=1, group="a")]
    found = first_difference(Record.of([box(0, *first), box(1, *other)]))
    assert found is not None
    assert found.group == "b"


def test_ranks_in_two_groups_wait_for_each_other():
    ways = {rank: [did("join", 0, 0, group) for group in "ab"] for rank in (0, 1)}
    record = Record.of(
        [
            box(0, *ways[0], did(group="a", is_open=True)),
            box(1, *ways[1], did(group="b", is_open=True)),
        ]
    )
    assert [(call.rank, call.group) for call in circle(record)] == [(0, "a"), (1, "b")]


def test_whoever_waits_for_a_rank_that_computes_is_in_no_circle():
    record = Record.of([box(0, did(is_open=True)), box(1, did("join", 0, 0))])
    assert circle(record) == []


@pytest.mark.parametrize(("why", "kind"), [("stalled", "stalled"), ("late", "unknown")])
def test_a_result_of_ranks_that_wait_has_the_answer_of_why(why, kind):
    record = Record.of([box(0, did(is_open=True)), box(1, did("join", 0, 0))])
    answer = "rank 1 has not called all_reduce #1"
    told = result_of(record, Stop(why, answer=answer), 2, 2)
    assert told.kind == kind
    assert answer in "\n".join([told.words, *told.evidence])
    assert "rank 1" not in result_of(record, Stop("late"), 2, 2).words
