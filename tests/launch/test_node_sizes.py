"""Nodes that go on with fewer ranks, each with as many as it has left, and take them back."""

from __future__ import annotations

import random

import pytest

from phalanx.launch.nodes.views import NO_VIEW, Result
from tests.launch.simulated_nodes import World, rules

ALL = {"a": 2, "b": 3, "c": 2}


def sizes(world):
    """Return how many ranks each node trains with, once all of them have been told the same world."""
    training = [node for node in world.living() if node.training]
    views = {node.training for node in training}
    assert len(views) == 1
    attempts = [node.attempt for node in training]
    numbers = [attempt.num_local_ranks for attempt in sorted(attempts, key=lambda it: it.node_rank)]
    for attempt in attempts:
        assert (attempt.world_size, attempt.num_nodes) == (sum(numbers), len(numbers))
        assert attempt.first_rank == sum(numbers[: attempt.node_rank])
    return {node.name: node.attempt.num_local_ranks for node in training}


@pytest.fixture
def three():
    world = World(1, "abc", rules(3), num_ranks=ALL)
    world.run(5)
    assert sizes(world) == ALL
    return world


@pytest.mark.parametrize("name", "abc")
def test_the_node_whose_rank_is_lost_goes_on_with_fewer_and_the_others_as_before(three, name):
    three.fail(name, num_ranks=ALL[name] - 1)
    three.run(8)
    assert sizes(three) == {**ALL, name: ALL[name] - 1}
    assert {node.agreement.view.restarts for node in three.living()} == {1}


def test_of_two_failures_only_that_which_is_the_cause_changes_a_number(three):
    fewer = {"b": 2, "c": 1}
    for name, number in fewer.items():
        three.fail(name, num_ranks=number)
    three.run(8)
    cause = three.nodes["a"].agreement.view.cause.message
    assert sizes(three) == {**ALL, cause: fewer[cause]}


def test_the_number_stays_when_another_node_fails_or_is_lost(three):
    three.fail("b", num_ranks=1)
    three.run(8)
    three.fail("a")
    three.run(11)
    assert sizes(three) == {**ALL, "b": 1}
    three.kill("a")
    three.run(14)
    assert sizes(three) == {"b": 1, "c": 2}
    view = three.nodes["b"].agreement.view
    assert view.cause.kind == "NodeLost"
    assert view.restarts == 3


def test_ranks_come_back_after_a_snapshot_without_counting_as_a_failure(three):
    three.fail("b", num_ranks=1)
    three.run(8)
    three.nodes["b"].agreement.ask_for(3)
    three.run(11)
    assert sizes(three) == ALL
    view = three.nodes["b"].agreement.view
    assert (view.attempt, view.restarts) == (2, 1)
    assert sum("watch" in node.signals for node in three.living()) == 1


def test_ranks_wait_for_a_snapshot_as_long_as_it_takes_and_nodes_do_not(three):
    three.fail("b", num_ranks=1)
    three.run(8)
    for node in three.living():
        node.whole = lambda: None  # none is ever whole
    three.nodes["b"].agreement.ask_for(3)
    three.run(60)
    assert sizes(three) == {**ALL, "b": 1}
    three.kill("c")
    three.run(65)
    assert sizes(three) == {"a": 2, "b": 3}  # all start again anyway
    three.fail("b", num_ranks=1)
    three.run(70)
    three.nodes["b"].agreement.ask_for(3)
    three.run(90)
    three.start("c")
    three.run(97)
    assert sizes(three) == {"a": 2, "b": 1}
    three.run(105)
    assert sizes(three) == ALL


def test_ranks_do_not_come_back_where_some_have_come_to_their_end(three):
    three.fail("b", num_ranks=1)
    three.run(8)
    three.nodes["a"].ended("succeeded", three.nodes["a"].training)
    three.nodes["b"].agreement.ask_for(3)
    three.run(11)
    assert {node.agreement.view.attempt for node in three.living()} == {1}
    assert three.finish() == [Result(None)] * 3


def test_a_failure_that_is_free_counts_as_none(three):
    three.fail("b", num_ranks=1, is_free=True)
    three.run(8)
    view = three.nodes["a"].agreement.view
    assert (view.attempt, view.restarts) == (1, 0)


@pytest.mark.parametrize("name", "abc")
def test_a_node_with_too_few_ranks_leaves_and_the_others_go_on(three, name):
    three.fail(name, num_ranks=0)
    three.run(8)
    assert sizes(three) == {node: number for node, number in ALL.items() if node != name}
    view = next(iter(three.living())).agreement.view
    assert (view.restarts, view.cause.message) == (1, name)  # not once more for a lost node


def test_a_node_with_too_few_ranks_stays_if_its_failure_was_not_the_cause(three):
    three.fail("a", num_ranks=1)  # it leads, so it knows of this one first
    three.fail("b", num_ranks=0)
    three.run(8)
    assert sizes(three) == {**ALL, "a": 1}
    assert three.nodes["a"].agreement.view.restarts == 1


def test_the_last_node_of_the_fewest_that_leaves_is_waited_for():
    world = World(1, "ab", rules(2, min_nodes=2), num_ranks={"a": 2, "b": 2})
    world.run(5)
    world.fail("b", num_ranks=0)
    world.run(20)
    assert not any(node.training for node in world.living())
    assert "waiting for nodes: 1 of at least 2" in world.nodes["a"].agreement.waits_for()
    world.start("b")
    world.run(25)
    assert sizes(world) == {"a": 2, "b": 2}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_numbers_are_the_same_on_all_nodes(seed):
    drawn = random.Random(seed)
    names = "abcd"[: drawn.randint(2, 4)]
    most = {name: drawn.randint(1, 4) for name in names}
    world = World(seed, names, rules(len(names)), num_ranks=most)
    world.slowness_s = drawn.choice((0.002, 0.05, 0.4))
    while not any(node.agreement.state.running != NO_VIEW for node in world.living()):
        world.run(world.now_s + 0.1)
    for _ in range(10):
        world.run(world.now_s + drawn.uniform(0, 3))
        name = drawn.choice(names)
        node, kind = world.nodes[name], drawn.randrange(5)
        if kind == 0:
            world.fail(name, num_ranks=drawn.randint(1, most[name]), is_free=drawn.random() < 0.5)
        elif kind == 1:
            node.agreement.ask_for(most[name])
        elif kind == 2:
            world.pause(name, drawn.uniform(0, 4))
        elif kind == 3:
            world.cut(*drawn.sample(names, 2))
        else:
            world.mend()
    world.mend()
    world.run(world.now_s + 30)
    assert sizes(world).keys() == set(names)
    assert all(number <= most[name] for name, number in sizes(world).items())
