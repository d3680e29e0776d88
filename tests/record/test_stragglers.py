"""The ledger names the rank that the others wait for, says where it loses the time, and blames nobody for chance."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from phalanx.record.excess import over_others, trimmed_mean
from phalanx.record.stragglers import Ledger, Summary
from tests.record.made import MS, Job, looks


def summary_of(job: Job, num_steps: int, **options) -> Summary:
    ledger = Ledger(**options)
    ledger.add(job.boxes(num_steps))
    return ledger.summary()


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_five_percent_are_named_within_fifty_steps_in_99_of_100_runs(num_ranks):
    jitter = 0.02 if num_ranks == 2 else 0.03  # of two ranks, the difference is as uncertain as both together
    found = 0
    for seed in range(100):
        slow = seed % num_ranks
        summary = summary_of(Job(num_ranks, jitter=jitter, slower={slow: 0.05}, seed=seed), 51)
        found += summary.kind == "rank" and summary.named[0].rank == slow
    assert found >= 99


@pytest.mark.slow
def test_nobody_is_named_in_100_runs_without_a_slow_rank():
    for seed in range(100):
        ledger = Ledger()
        boxes = Job(4, has_phases=False, seed=seed).boxes(500)
        for seen in looks(boxes, 1000 * MS):
            ledger.add(seen)
            assert not ledger.summary().named, f"seed {seed}"


def test_the_cost_the_phase_and_its_ratio_are_told():
    summary = summary_of(Job(4, slower={2: 0.22}, phase="load data", seed=3), 1200)
    assert str(summary) == "rank 2 has cost 18% of the last 1,000 steps; its data loading takes 2.1x the others'"
    assert [account.is_named for account in summary.accounts] == [False, False, True, False]
    assert summary.accounts[2].awaited_s > 10 * max(summary.accounts[rank].awaited_s for rank in (0, 1, 3))
    assert summary.step_s == pytest.approx(12.2e-3, rel=0.05)


def test_without_steps_and_phases_the_line_is_told_before_which_time_is_lost():
    summary = summary_of(Job(3, slower={0: 0.1}, has_phases=False, seed=4), 200)
    assert summary.kind == "rank"
    assert str(summary) == (
        f"rank 0 has cost {summary.cost:.0%} of the last 196 steps; "
        f"its time before all_reduce at train.py:31 takes {summary.named[0].ratio:.2f}x the others'"
    )
    assert 1.08 < summary.named[0].ratio < 1.12


def test_pauses_that_come_back_are_found_and_a_single_one_is_not():
    summary = summary_of(Job(4, slower=lambda rank, step: 2.0 if rank == 1 and step % 20 == 7 else 0.0, seed=5), 1001)
    assert [account.rank for account in summary.named] == [1]
    assert 0.07 < summary.cost < 0.12
    once = summary_of(Job(4, slower=lambda rank, step: 500.0 if rank == 1 and step == 70 else 0.0, seed=6), 1001)
    assert once.named == ()


def test_a_slow_host_is_named_as_a_host():
    hosts = ["a", "a", "a", "b", "b", "b"]
    summary = summary_of(Job(6, slower={3: 0.1, 4: 0.1, 5: 0.1}, hosts=hosts, seed=7), 300)
    assert summary.kind == "host"
    assert {account.rank for account in summary.named} == {3, 4, 5}
    assert str(summary).startswith("each rank of host b has cost up to ")
    one = summary_of(Job(6, slower={4: 0.1}, hosts=hosts, seed=7), 300)
    assert (one.kind, one.named[0].rank) == ("rank", 4)


def test_waiting_for_another_rank_each_time_is_jitter():
    rng = random.Random(8)
    late = [rng.randrange(4) for _ in range(300)]
    summary = summary_of(Job(4, slower=lambda rank, step: 0.5 * (late[step] == rank), seed=8), 300)
    assert (summary.kind, summary.named) == ("jitter", ())
    assert "each time for a different one" in str(summary)
    assert summary_of(Job(4, jitter=0.005, pauses=0, seed=8), 300).kind == "even"


def test_two_slow_ranks_of_eight_are_both_named():
    summary = summary_of(Job(8, slower={1: 0.1, 6: 0.2}, seed=9), 300)
    assert (summary.kind, [account.rank for account in summary.named]) == ("ranks", [6, 1])
    assert str(summary).startswith("ranks 6, 1 have each cost up to ")


def test_looking_once_a_second_finds_the_same_as_looking_once():
    boxes = Job(4, slower={3: 0.08}, seed=10).boxes(600)
    often, once = Ledger(), Ledger()
    for seen in looks(boxes, 1000 * MS):
        often.add(seen)
    once.add(boxes)
    assert often.summary() == once.summary()
    assert often.summary().named[0].rank == 3


def test_only_the_window_counts():
    job = Job(4, slower=lambda rank, step: 0.2 if rank == 1 and step < 500 else 0.0, seed=11)
    assert summary_of(job, 900).named[0].rank == 1
    assert summary_of(job, 900, window_s=2).named == ()


def test_what_was_overwritten_before_it_was_read_is_left_out():
    boxes = Job(4, slower={2: 0.1}, seed=12).boxes(400)
    torn = [dataclasses.replace(box, events=box.events[:600] + box.events[1200 + 40 * box.rank :]) for box in boxes]
    ledger = Ledger()
    ledger.add(torn)
    summary = ledger.summary()
    assert 200 < summary.num_steps < 300
    assert summary.named[0].rank == 2
    assert summary.step_s == pytest.approx(11e-3, rel=0.05)


def test_a_phase_whose_end_was_overwritten_does_not_last_for_ever():
    boxes = Job(2, slower={1: 0.2}, seed=14).boxes(400)
    first = boxes[1].events[0]
    outer = first._replace(kind="phase", text="epoch", ended_ns=0)
    ledger = Ledger()
    ledger.add([boxes[0].with_events(boxes[0].events[:600]), boxes[1].with_events([outer, *boxes[1].events[1:600]])])
    ledger.add([boxes[0], boxes[1].with_events(boxes[1].events[500:])])
    assert ledger.summary().named[0].phase == "backward"


def test_ranks_that_hide_their_waits_are_not_judged():
    boxes = Job(2, slower={1: 0.3}).boxes(200)
    calls = [event._replace(kind="call") if event.kind == "collective" else event for event in boxes[0].events]
    ledger = Ledger()
    ledger.add([boxes[0].with_events(calls), boxes[1]])
    assert ledger.summary().kind == "unknown"


def test_a_restart_begins_anew():
    ledger = Ledger()
    ledger.add(Job(2, slower={0: 0.3}).boxes(100))
    assert ledger.summary().named
    ledger.add([dataclasses.replace(box, pid=box.pid + 50) for box in Job(2, jitter=0.001, pauses=0).boxes(40)])
    assert (ledger.summary().kind, ledger.summary().num_steps) == ("even", 36)


def test_too_few_steps_or_a_single_rank_are_not_judged():
    assert summary_of(Job(4, slower={0: 1.0}), 20).kind == "unknown"
    assert summary_of(Job(1), 200).kind == "unknown"
    assert Ledger().summary().num_steps == 0
    assert "too few to tell" in str(Ledger().summary())


def test_the_median_of_the_others_and_the_mean_are_what_statistics_says():
    import statistics

    rng = random.Random(13)
    for size in range(2, 9):
        times = [rng.randrange(20) for _ in range(size)]
        want = [time - statistics.median(times[:i] + times[i + 1 :]) for i, time in enumerate(times)]
        assert over_others(times) == pytest.approx(want)
    assert trimmed_mean([-math.inf, 1, 2, 3, math.inf]) == 2
