"""The picture that `phalanx top` draws fits any terminal."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx._text import duration
from phalanx.diagnose.top.gpu import Gpu
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.record import Steps
from phalanx.diagnose.top.screen import bars, draw, rate
from phalanx.diagnose.top.watch import JobView
from phalanx.record.box import Event

BUSY = RankView(
    rank=0, pid=71, state="computing", what="backward", site="train.py:31", since_s=0.002, note="", step=1204,
    num_steps=5000, steps_per_s=12.34, samples_per_s=790.0, step_times_s=[0.08, 0.09, 0.16], cpu_percent=99.6,
    rss_bytes=640 << 20, pss_bytes=410 << 20, num_threads=12, minor_faults_per_s=1234.0, major_faults_per_s=0.0,
    num_helpers=2, gpus=(),
)  # fmt: skip
WAITING = dataclasses.replace(BUSY, rank=1, state="waiting", what="all_reduce #1204", since_s=41.2, cpu_percent=0.0)
GONE = RankView(2, 73, "gone", "", "", None, "", *(None,) * 4, [], *(None,) * 6, 0, ())
JOB = JobView("train.py", "phalanx run", 70, 3, 754.0, "/runs/train", "", "", [BUSY, WAITING, GONE])


def drawn(job: JobView = JOB, width: int = 80, is_ascii: bool = False) -> list[str]:
    return [line.plain for line in draw([job], width, is_ascii)]


def test_at_80_columns_all_that_matters_is_there():
    head, progress, titles, busy, busy_at, waiting, waiting_at, gone = drawn()
    assert head.startswith("train.py  phalanx run, pid 70  3 ranks  since ")
    assert head.endswith(", 12 min")
    assert progress == "step 1,204 of 5,000 ━━━───────── 24%  12.3 steps/s  790 samples/s  5 min left"
    assert titles.split() == ["rank", "state", "step", "cpu%", "rss", "pss", "steptime", "thr", "flt/s"]
    assert busy.split()[-7:] == ["1,204", "100", "640M", "410M", "▅▅█", "12", "1,234"]
    assert busy.startswith("   0 computing 0.0 s backward ")
    assert waiting.startswith("   1 waiting 41 s all_reduce #1204 ")
    assert (busy_at, waiting_at) == ("     at train.py:31", "     at train.py:31")
    assert gone.split() == ["2", "gone"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_no_line_is_wider_than_the_terminal(width, is_ascii):
    note = "the black box of pid 71 can't be read: it is torn, and this goes on and on and on until the end of the line"
    job = dataclasses.replace(JOB, straggler="rank 2 has cost 9 % of the last 1,000 steps " * 3)
    job = dataclasses.replace(job, ranks=[*job.ranks, dataclasses.replace(BUSY, rank=1000, note=note)])
    lines = drawn(job, width, is_ascii)
    assert max(map(len, lines)) <= width
    assert not is_ascii or "".join(lines).isascii()
    assert sum(line.lstrip().startswith(("0 ", "1 ", "2 ", "1000 ")) for line in lines) == 4


def test_where_there_is_room_the_line_of_the_script_is_shown():
    assert "waiting 41 s all_reduce #1204 at train.py:31" in drawn(width=110)[4]


@pytest.mark.parametrize(
    ("width", "rows"),
    [
        (80, ["   1 asleep 41 s since all_reduce", "     #1204 at folder/missing.py:1042"]),
        (40, ["   1 asleep 41 s since all_reduce #1204", "     at missing.py:1042"]),
        (30, ["   1 asleep 41 s since", "     …#1204 at missing.py:1042"]),
        (20, ["   1 asleep 41 s", "     …issing.py:1042"]),
    ],
)
def test_where_there_is_little_room_the_rest_and_the_number_of_the_line_stand_below(width, rows):
    quiet = dataclasses.replace(WAITING, state="asleep", what="since all_reduce #1204", site="folder/missing.py:1042")
    first, second = drawn(dataclasses.replace(JOB, ranks=[quiet]), width)[-2:]
    assert first.startswith(rows[0])
    assert second == rows[1]


def test_what_nobody_knows_has_no_column():
    quiet = dataclasses.replace(BUSY, step=None, num_steps=None, steps_per_s=None, samples_per_s=None, step_times_s=[])
    head, titles, _ = drawn(dataclasses.replace(JOB, ranks=[quiet]))
    assert "1 of 3 ranks here" in head
    assert titles.split() == ["rank", "state", "cpu%", "rss", "pss", "thr", "flt/s"]


def test_gpus_stand_beside_the_rank_that_uses_them():
    busy = dataclasses.replace(BUSY, gpus=(Gpu(0, 73.0, 12 << 30),))
    _, _, titles, row = drawn(dataclasses.replace(JOB, ranks=[busy]), 120)
    assert "gpu" in titles.split()
    assert "73% 12.0G" in row


def test_the_straggler_has_a_line():
    assert "rank 2 has cost 9 % of the last 1,000 steps" in drawn(
        dataclasses.replace(JOB, straggler="rank 2 has cost 9 % of the last 1,000 steps")
    )


def test_a_straggler_that_is_told_at_length_takes_two_lines_of_80_columns():
    words = (
        "rank 2 has cost 9% of the last 1,000 steps; its time before all_reduce at train.py:10 takes 1.12x the others'"
    )
    _, _, first, second, *_ = drawn(dataclasses.replace(JOB, straggler=words))
    assert f"{first} {second}" == words


def test_of_several_jobs_it_is_said_how_to_see_one():
    other = dataclasses.replace(JOB, launcher_pid=4711)
    assert [line.plain for line in draw([JOB, other], 80)][-1] == "phalanx top 4711 shows this last job alone"
    by_hand = dataclasses.replace(JOB, launcher_pid=0)
    assert f"phalanx top {by_hand.ranks[0].pid} shows" in draw([JOB, by_hand], 80)[-1].plain


def test_without_jobs_the_picture_says_so():
    assert [line.plain for line in draw([], 80)] == ["no job of this user on this host"]


@pytest.mark.parametrize(
    ("values", "shown"), [([], ""), ([0.0], "▁"), ([1, 1, 1], "███"), ([1, 2, 4, 8], "▂▃▅█"), ([0.001, 100], "▁█")]
)
def test_bars_are_as_high_as_their_share_of_the_largest(values, shown):
    assert bars(values) == shown
    assert len(bars(values, is_ascii=True)) == len(shown)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (41.2, "41 s"), (300, "5 min"), (12000, "3 h 20 min"), (200000, "2 d 7 h")],
)
def test_durations_are_short(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.253, "0.25"), (12.34, "12.3"), (787.4, "787"), (1580, "1,580"), (12500, "12.5k"), (2.5e6, "2.5M")],
)
def test_rates_are_short(value, words):
    assert rate(value) == words


def step(number: int, begun_s: float, ended_s: float, text: str = "") -> Event:
    return Event(number, int(begun_s * 1e9), int(ended_s * 1e9), "step", "", text, "", 1, number, 64)


def test_rates_are_those_of_the_last_ten_seconds_and_fall_while_a_step_is_overdue():
    steps = Steps()
    assert steps.rates(0) is None
    for number in range(1, 101):  # two seconds a step, then half a second
        begun = 2.0 * number if number <= 60 else 120 + 0.5 * (number - 60)
        steps.add(step(number, begun, begun + 0.4, "of 200"))
    assert (steps.step, steps.num_steps) == (100, 200)
    assert steps.rates(int(140.9e9)) == (pytest.approx(2.0), pytest.approx(128.0))
    slow, _ = steps.rates(int(160e9))
    assert slow < 0.1
    assert steps.times_s[-1] == pytest.approx(0.4)
    assert len(steps.times_s) == 60
