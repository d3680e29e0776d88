"""What `phalanx.tune.search` concludes from speeds."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from phalanx.host.cpus import Machine
from phalanx.tune.offers import offers
from phalanx.tune.search import compare, default_ranks, race
from phalanx.tune.trials import Setup

ONE, TWO, THREE = (Setup(ranks=ranks, threads=1) for ranks in (1, 2, 3))


def test_a_race_ends_once_the_difference_is_clear():
    speeds = {ONE: itertools.cycle([100, 101, 99]), TWO: itertools.cycle([110, 111, 109])}
    found = race([ONE, TWO], lambda setup: next(speeds[setup]), math.inf)
    assert len(found[ONE]) == 3
    gain = compare(found[TWO], found[ONE])
    assert gain.is_certain
    assert gain.ratio == pytest.approx(1.1, rel=0.01)


def test_turns_go_backwards_every_second_round():
    order = []
    race([ONE, TWO], lambda setup: order.append(setup) or 100.0, math.inf)
    assert order == [ONE, TWO, TWO, ONE, ONE, TWO]


def test_the_hopeless_take_no_more_turns():
    drawn = random.Random(0)
    means = {ONE: 100, TWO: 103, THREE: 50}
    found = race([ONE, TWO, THREE], lambda setup: drawn.gauss(means[setup], 10), math.inf)
    assert len(found[THREE]) == 3
    assert len(found[ONE]) == len(found[TWO]) > 3


def test_a_setup_that_fails_takes_no_further_part():
    speeds = {ONE: itertools.repeat(100.0), TWO: iter([110.0, None])}
    found = race([ONE, TWO], lambda setup: next(speeds[setup]), math.inf)
    assert [*found] == [ONE]
    assert race([ONE], lambda _: None, math.inf) == {}


def test_a_difference_within_the_noise_is_no_gain():
    drawn = random.Random(1)
    found = race([ONE, TWO], lambda _: drawn.gauss(100, 10), math.inf)
    assert not compare(found[TWO], found[ONE]).is_certain
    assert not compare([100.4, 100.5, 100.4], [100, 100, 100]).is_certain  # certain, and not worth a word


def test_what_fails_is_out_of_the_race():
    speeds = {ONE: itertools.cycle([100.0]), TWO: iter([110.0, None])}
    assert [*race([ONE, TWO], lambda setup: next(speeds[setup]), math.inf)] == [ONE]
    assert race([ONE, TWO], lambda _: None, math.inf) == {}


def test_a_race_ends_at_its_deadline():
    drawn = random.Random(2)
    found = race([ONE, TWO], lambda _: drawn.gauss(100, 30), 0.0)
    assert len(found[ONE]) == 3


@pytest.mark.parametrize("has_stream", [False, True])
def test_a_stream_is_not_offered_processes_each_of_which_would_yield_it_whole(has_stream):
    facts = {"can_fuse": False, "trainer": None, "has_stream": has_stream}
    names = [offer.name for offer in offers(ONE, facts, 0.5, ["auto"])]
    assert names == ([] if has_stream else ["DataLoader(num_workers=2)"])


@pytest.mark.parametrize(("loading_share", "num_workers"), [(0.06, 1), (0.5, 2), (0.79, 5), (0.97, 8), (1, 8)])
def test_as_many_loading_processes_are_offered_as_keep_up_with_the_steps(loading_share, num_workers):
    facts = {"can_fuse": False, "trainer": None, "has_stream": False}
    [offer] = offers(ONE, facts, loading_share, ["auto"])
    assert dict(offer.setup.changes) == {"num_workers": num_workers}


@pytest.mark.parametrize(("cores", "ranks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_ranks_to_try_reach_from_one_to_one_for_each_core(cores, ranks):
    machine = Machine(cores=tuple((cpu,) for cpu in range(cores)), numa_nodes=(0,) * cores)
    assert default_ranks(machine) == ranks
