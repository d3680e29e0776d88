"""Clocks of hosts, measured by heartbeats over a slow and uneven way."""

from __future__ import annotations

import json
import random

import pytest

from phalanx.launch.nodes.clocks import Clocks
from phalanx.record.clocks import load_clocks, save_clocks

AHEAD_S = -1234.5


def exchange(clocks, rng, begins_s):
    """Have a heartbeat go there and back; a tenth of a second passes there between."""
    came_s = begins_s + rng.expovariate(200) + 1e-4
    answered_s = came_s + 0.1
    back_s = answered_s + rng.expovariate(200) + 1e-4
    clocks.heard("other", begins_s, came_s + AHEAD_S, answered_s + AHEAD_S, back_s)
    return back_s


def test_the_error_is_what_it_is_said_to_be_and_becomes_small():
    rng, clocks, now_s = random.Random(3), Clocks(), 50.0
    for _ in range(50):
        now_s = exchange(clocks, rng, now_s)
        ahead_s, within_s = clocks.told(now_s)["other"]
        assert abs(ahead_s - AHEAD_S) <= within_s
    assert within_s < 0.002


def test_an_old_measurement_gives_way_to_a_new_one_that_is_as_good_as_it_still_is():
    clocks = Clocks()
    clocks.heard("other", 10.0, 20.001, 20.001, 10.002)
    assert clocks.told(10.002)["other"] == pytest.approx((10.0, 0.001))
    clocks.heard("other", 11.0, 21.5, 21.5, 11.01)
    assert clocks.told(11.01)["other"][0] == pytest.approx(10.0)
    clocks.heard("other", 110.0, 120.106, 120.106, 110.01)
    assert clocks.told(110.01)["other"] == pytest.approx((10.101, 0.005))


@pytest.mark.parametrize("sent_s", [float("nan"), float("-inf"), 99.0])
def test_nonsense_is_not_taken(sent_s):
    clocks = Clocks()
    clocks.heard("other", sent_s, 1.0, 1.0, 2.0)
    assert clocks.told(2.0) == {}


def test_what_is_saved_is_read_and_nonsense_is_nothing(tmp_path):
    save_clocks({}, tmp_path)
    assert [*tmp_path.iterdir()] == []
    save_clocks({"a": (1.5, 2e-6)}, tmp_path)
    assert load_clocks(tmp_path) == {"a": (1_500_000_000, 2000)}
    for told in ("[]", "{", json.dumps({"a": 1}), json.dumps({"a": [1, 2, 3]}), '{"a": [NaN, 1]}', '{"a": [1e999, 1]}'):
        (tmp_path / "clocks.json").write_text(told)
        assert load_clocks(tmp_path) == {}
