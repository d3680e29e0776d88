"""What nodes agree on, over a simulated network."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from phalanx.launch.nodes.agreement import Agreement
from phalanx.launch.nodes.election import Election
from phalanx.launch.nodes.views import NO_VIEW, Result
from tests.launch.simulated_nodes import World, rules


def trains(world):
    """The names of the nodes that train, which they must do in one view that has them all."""
    training = [node for node in world.living() if node.training]
    views = {node.training for node in training}
    assert len(views) <= 1
    order = [member.host for member in training[0].agreement.view.members] if training else []
    assert sorted(order) == sorted(node.name for node in training)
    return "".join(sorted(order))


@pytest.fixture
def four():
    world = World(1, "abcd", rules(4))
    world.run(5)
    assert trains(world) == "abcd"
    return world


def test_all_meet(four):
    assert four.now_s == 5
    assert max(when_s for when_s, _, _ in four.starts) < 1.5
    assert four.finish() == [Result(None)] * 4


def test_a_node_that_is_known_at_another_address_than_its_own_is_the_same_node(four):
    agreement = four.nodes["b"].agreement
    agreement.me = dataclasses.replace(agreement.me, address="10.0.0.2")
    four.run(8)
    assert trains(four) == "abcd"
    assert len(four.starts) == 4  # the ranks were not started again


@pytest.mark.parametrize("lost", "abcd")
def test_the_others_go_on_when_one_is_killed(four, lost):
    four.kill(lost)
    four.run(6)
    assert trains(four) == "abcd".replace(lost, "")
    assert four.nodes["d" if lost != "d" else "a"].agreement.view.cause.ending.host == lost
    assert four.finish() == [Result(None)] * 3


@pytest.mark.parametrize("is_silent", [False, True])
def test_two_that_are_killed_together_are_gone_on_without(four, is_silent):
    four.kill("b", is_silent=is_silent)
    four.run(5.05)
    four.kill("d", is_silent=is_silent)
    four.run(9)
    assert trains(four) == "ac"  # half, with the leader


@pytest.mark.parametrize("lost", "abc")
@pytest.mark.parametrize("seed", range(20))
def test_with_a_spare_the_world_stays_as_large(seed, lost):
    world = World(seed, "abcd", rules(3, spares=1))
    world.run(5)
    names = trains(world)
    assert len(names) == 3  # the job does not begin as larger
    world.kill(lost if lost in names else "d")
    world.run(12)
    assert len(trains(world)) == 3
    sizes = {len([it for it in world.starts if it[2] == key]) for key in {it[2] for it in world.starts}}
    assert sizes == {3}


def test_a_job_does_not_wait_for_its_spares():
    world = World(1, "ab", rules(2, min_nodes=2, spares=2))
    world.run(2)
    assert trains(world) == "ab"


def test_a_node_that_may_begin_the_job_later_does_so_alone_and_leaves_it_to_one_that_has():
    world = World(1, "abc", rules(3))
    world.kill("a")
    world.run(3)
    assert trains(world) == ""
    world.nodes["b"].agreement.lead_first(world.now_s, may=True)
    world.root = "b"  # where the others look, too
    world.run(10)
    assert trains(world) == "bc"
    job = world.nodes["b"].agreement.view.job
    world.start("a")
    world.nodes["a"].agreement.lead_first(world.now_s, may=True)
    world.run(20)
    assert trains(world) == "abc"
    assert world.nodes["a"].agreement.view.job == job


def test_over_a_new_link_a_node_counts_once_it_has_answered(four):
    here, other = four.nodes["a"].agreement, four.nodes["b"]
    here.unlinked(other.node.id, has_ended=False, now_s=5.0)
    here.linked(other.node, 5.0)
    here.heard(other.node.id, other.agreement.state, 0.0)  # said before it heard from us
    assert not here._election.is_with_us(other.node.id)
    here.heard(other.node.id, other.agreement.state, 5.0)
    assert here._election.is_with_us(other.node.id)


# ---------------------------------------------------------------- accidents

NAMES = "abcde"


def play(seed, accidents, *, num_accidents=8, begins_whole=True):
    """Let accidents of these kinds happen to two to five nodes, mend, and return the world."""
    drawn = random.Random(seed)
    names = NAMES[: drawn.randint(2, 5)]
    clocks = {name: random.Random(name).uniform(0, 1e9) for name in names}  # each host's own
    world = World(seed, names, rules(len(names)), clocks=clocks)
    world.slowness_s = drawn.choice((0.002, 0.05, 0.4))
    while begins_whole and not any(node.agreement.state.running != NO_VIEW for node in world.living()):
        world.run(world.now_s + 0.1)
    world.run(world.now_s + drawn.uniform(0, 6))
    for _ in range(drawn.randint(1, num_accidents)):
        one, other = drawn.sample(names, 2)
        kind = drawn.choice(accidents)
        if kind in ("kill", "lose power") and world.nodes[one].is_alive and len(world.living()) > 1:
            world.kill(one, is_silent=kind == "lose power")
        elif kind == "come back" and not world.nodes[one].is_alive:
            # At the endpoint a new process that reaches nobody begins a job of its own: it can't know of another.
            world.start(one)
        elif kind == "pause":
            world.pause(one, drawn.uniform(0.5, 6))
        elif kind == "cut":
            world.cut(one, other, is_both=drawn.random() < 0.7)
        elif kind == "isolate":
            for name in names:
                world.cut(one, name)
        elif kind == "divide":
            side = set(drawn.sample(names, len(names) // 2))
            for name, peer in itertools.product(side, set(names) - side):
                world.cut(name, peer)
        elif kind == "mend":
            world.mend()
        elif kind == "fail":
            world.fail(one)
        world.run(world.now_s + drawn.choice((0, 0.05, 0.5, 1.5, 2.2, 5)))
    world.mend()
    world.run(world.now_s + 25)
    return world


# Of 25 seeds each, or of 8. With any of `QUICKLY_FOUND`, one of the first group fails in one of the tests.
GROUPS = [0, *(pytest.param(group, marks=pytest.mark.slow) for group in range(1, 80))]


@pytest.mark.parametrize("seeds", GROUPS)
def test_a_job_that_was_begun_a_second_time_behind_a_cut_joins_the_first_one(seeds):
    for seed in range(8 * seeds, 8 * seeds + 8):
        drawn = random.Random(seed)
        names = NAMES[: drawn.randint(2, 5)]
        world = World(seed, names, rules(len(names)))
        world.slowness_s = drawn.choice((0.002, 0.05, 0.4))
        world.run(5)
        [first] = {node.agreement.view.job for node in world.living()}
        world.kill(world.root)
        seen_s = 2 if len(names) == 2 else 0  # of two, the other goes on only if it has seen the first one's death
        world.run(world.now_s + drawn.uniform(seen_s, 4))
        for name in names[1:]:
            world.cut(world.root, name)
        world.start(world.root)
        for _ in range(drawn.randint(0, 6)):  # views of a job that is restarted often have the greater keys
            world.run(world.now_s + drawn.uniform(0, 2))
            world.fail(world.root)
        world.run(world.now_s + 5)
        assert world.nodes[world.root].agreement.view.job != first, seed
        world.mend()
        world.run(world.now_s + 25)
        assert trains(world) == "".join(sorted(names)), seed
        assert {node.agreement.view.job for node in world.living()} == {first}, seed


CUTS = ("cut", "isolate", "divide", "mend", "mend", "pause", "fail")
KILLS = ("kill", "kill", "come back", "fail")
ALL_ACCIDENTS = CUTS + KILLS + ("lose power",)


@pytest.mark.parametrize("seeds", GROUPS)
def test_after_cuts_all_are_together_again(seeds):
    for seed in range(25 * seeds, 25 * seeds + 25):
        world = play(seed, CUTS)
        assert trains(world) == "".join(sorted(world.nodes)), seed
        assert world.finish() == [Result(None)] * len(world.nodes), seed


@pytest.mark.parametrize("seeds", GROUPS)
def test_after_kills_all_that_live_are_together(seeds):
    for seed in range(25 * seeds, 25 * seeds + 25):
        world = play(seed, KILLS)
        if world.has_survivor():  # of the last view: others can't know how far the job has come
            assert trains(world) == "".join(sorted(node.name for node in world.living())), seed


@pytest.mark.parametrize("seeds", GROUPS)
def test_two_sides_never_train(seeds):
    for seed in range(25 * seeds, 25 * seeds + 25):
        play(seed, ALL_ACCIDENTS, num_accidents=14, begins_whole=False)


# ---------------------------------------------------------------- what each rule is for


def _silent_ones_are_dead(self, peer, *, has_ended, now_s):
    self.peers.pop(peer)
    self.dead.add(peer)


def _every_end_is_a_death(self, peer, *, has_ended, now_s):
    self.peers.pop(peer)
    self.dead |= {peer} if has_ended else set()


def _all_count_the_dead(self, group):
    votes = {node for node in group.ids if self.follows(node) or node in self.dead}
    return 2 * len(votes) > len(group.ids) or (2 * len(votes) == len(group.ids) and group.leader in votes)


def _no_votes(self, group):
    return True


def _half_is_enough(self, group):
    return 2 * sum(map(self.follows, group.ids)) >= len(group.ids)


def _old_votes_count(self, peer, now_s):
    return True


BASES = Agreement._bases


def _only_the_newest_view_votes(self):
    return BASES(self) if self.view is None else (self.view.group,)


def _only_the_old_view_votes(self):
    return BASES(self) if self.view is None or self._has_started else self.view.bases


def _not_shown_to_others(self):
    return self.view is not None and (self.view.ids[0] != self.me.id or self._attempt.port > 0)


# With the first seed that shows it: the search begins there.
QUICKLY_FOUND = [
    (Election, "unlinked", _silent_ones_are_dead, 8),
    (Election, "has_quorum", _no_votes, 8),
    (Election, "has_quorum", _half_is_enough, 21),
    (Election, "_is_fresh", _old_votes_count, 20),
    (Election, "unlinked", _every_end_is_a_death, 20),
    (Agreement, "_is_settled", _not_shown_to_others, 56),
]
RARE = [
    (Election, "has_quorum", _all_count_the_dead, 0),
    (Agreement, "_bases", _only_the_newest_view_votes, 0),
    (Agreement, "_bases", _only_the_old_view_votes, 0),
]


@pytest.mark.parametrize(
    ("owner", "rule", "broken", "first_seed"),
    [*QUICKLY_FOUND, *(pytest.param(*it, marks=pytest.mark.slow) for it in RARE)],
)
def test_without_any_one_of_the_rules_two_sides_do_train(monkeypatch, owner, rule, broken, first_seed):
    monkeypatch.setattr(owner, rule, broken)
    for seed in range(first_seed, first_seed + 1000):
        try:
            play(seed, ALL_ACCIDENTS, num_accidents=14, begins_whole=False)
        except AssertionError:
            return
    pytest.fail("no accident shows what the rule is for")


def test_every_node_says_whose_ranks_it_waits_for():
    world = World(1, "abc", rules(3))
    world.run(5)
    slow = world.nodes["b"]
    slow.ended = lambda *_: None  # its ranks do not end
    world.fail("c")
    world.run(8)
    for name in "ac":
        assert world.nodes[name].agreement.waits_for() == "waiting for the ranks on b to end"
    assert world.nodes["b"].agreement.waits_for() == ""  # its launcher says which rank it is


def test_a_job_that_fails_once_more_than_it_may_has_failed_on_all_nodes():
    world = World(1, "abc", rules(3, max_restarts=2))
    world.run(5)
    for number in range(1, 4):
        assert trains(world) == "abc"
        assert {node.agreement.view.restarts for node in world.living()} == {number - 1}
        world.fail("b")
        world.run(world.now_s + 5)
    results = [node.agreement.result for node in world.living()]
    assert results[0].cause is not None
    assert results == [results[0]] * 3
