"""The choice of the region to write and of the snapshot to load, when each host has only a part of the state."""

from __future__ import annotations

import itertools
import random

import pytest

from phalanx.checkpoint.memory.holdings import Holding, lost_of, newest_of
from phalanx.checkpoint.memory.slots import Slots

FOLDER = b"f" * 16


def held(moment, world_size, *numbers, folder=FOLDER):
    return Holding(*moment, folder, world_size, numbers)


# ---------------------------------------------------------------- which snapshot


def test_the_newest_that_is_complete_between_the_hosts_is_chosen():
    by_rank = [
        [held((1, 10), 3, 0, 1), held((1, 20), 3, 0)],
        [held((1, 10), 3, 1, 2), held((1, 20), 3, 2)],
    ]
    choice = newest_of(by_rank, FOLDER)
    assert (choice.attempt, choice.step, choice.world_sizes) == (1, 10, (3, 3))
    assert choice.lacking == (frozenset({2}), frozenset({0}))
    assert choice.givers == {0: 0, 2: 1}
    by_rank[1].append(held((1, 20), 3, 1))
    assert newest_of(by_rank, FOLDER).step == 20


def test_a_later_attempt_is_newer_whatever_its_step():
    by_rank = [[held((1, 70), 2, 0, 1), held((2, 5), 2, 0)], [held((2, 5), 2, 1)]]
    choice = newest_of(by_rank, FOLDER)
    assert (choice.attempt, choice.step) == (2, 5)


def test_images_of_another_number_of_ranks_do_not_complete_it():
    by_rank = [[held((1, 5), 2, 0), held((1, 5), 3, 1)]]
    assert newest_of(by_rank, FOLDER) is None
    assert newest_of([[held((1, 5), 1, 0, folder=b"g" * 16)]], FOLDER) is None
    assert newest_of([[held((1, 5), 1 << 63, 0)]], FOLDER) is None


def test_a_host_that_has_all_by_itself_reads_that_and_one_alone_sends_it_to_others():
    by_rank = [[held((1, 5), 2, 0, 1)], [held((1, 5), 1, 0)], [], [held((1, 5), 2, 1)]]
    choice = newest_of(by_rank, FOLDER)
    assert choice.world_sizes == (2, 1, 2, 2)
    assert choice.lacking == (frozenset(), frozenset(), frozenset({0, 1}), frozenset({0}))
    assert choice.givers == {0: 0, 1: 0}


# ---------------------------------------------------------------- which region


def test_two_regions_are_written_in_turn_where_nothing_is_copied():
    slots = Slots()
    slots.loaded((1, 3), 1)
    assert [slots.next((2, n), is_to_be_copied=False, is_busy=False) for n in range(4)] == [0, 1, 0, 1]


def test_a_copy_that_is_done_in_time_needs_two_regions():
    slots = Slots()
    assert [slots.next((1, n), is_to_be_copied=True, is_busy=False) for n in range(4)] == [0, 1, 0, 1]
    assert (slots.safe, slots.copying) == ((1, 2), (1, 3))


def test_a_slow_copy_is_not_written_over_and_the_safe_one_stays():
    slots = Slots()
    busy = [False, False, True, True, False, True]
    assert [slots.next((1, n), is_to_be_copied=True, is_busy=is_busy) for n, is_busy in enumerate(busy)] == (
        [0, 1, 2, 2, 0, 2]
    )
    assert (slots.safe, slots.copying) == ((1, 1), (1, 4))


def test_without_memory_for_a_third_there_is_none_until_the_copy_is_done():
    slots = Slots()
    for n in range(2):
        slots.next((1, n), is_to_be_copied=True, is_busy=False)
    assert slots.next((1, 2), is_to_be_copied=True, is_busy=True) == 2
    slots.skip((1, 2))
    assert slots.next((1, 3), is_to_be_copied=True, is_busy=True) == -1
    slots.skip((1, 3))
    assert slots.next((1, 4), is_to_be_copied=True, is_busy=False) == 0
    assert slots.safe == (1, 1)


def test_without_memory_for_a_third_the_newest_is_written_over_once_an_older_one_is_safe():
    slots = Slots()
    slots.next((1, 0), is_to_be_copied=True, is_busy=False)
    assert slots.next((1, 1), is_to_be_copied=True, is_busy=True) == 1  # not to be copied, since another is being
    assert slots.next((1, 2), is_to_be_copied=True, is_busy=False) == 2
    slots.skip((1, 2))
    assert (slots.safe, slots.copying) == ((1, 0), None)
    assert slots.next((1, 3), is_to_be_copied=True, is_busy=False) == 1
    assert slots.copying == (1, 3)


@pytest.mark.parametrize("num_regions", [2, 3])
def test_what_was_safe_before_a_newer_one_was_loaded_stays_until_a_copy_is_done(num_regions):
    slots = Slots()
    slots.loaded((1, 9), 2 % num_regions, safe=(1, 5), safe_slot=1)
    for n, is_busy in enumerate([False, True, True]):
        slot = slots.next((2, n), is_to_be_copied=True, is_busy=is_busy)
        if slot >= num_regions:
            slots.skip((2, n))
        assert slot != 1
        assert slots.safe == (1, 5)
    copied = slots.copying
    assert copied is not None
    assert slots.next((2, 3), is_to_be_copied=True, is_busy=False) >= 0
    assert slots.safe == copied


class SimHost:
    """A host of one rank: its own regions, replicas of others', and how far its copying is."""

    def __init__(self):
        self.slots = Slots()
        self.own = {}
        self.replicas = {}  # by rank: moment by slot
        self.has_copied = True

    def told(self, rank, world_size):
        numbers = {}
        for moment in self.own.values():
            numbers.setdefault(moment, set()).add(rank)
        for other, slots in self.replicas.items():
            for moment in slots.values():
                numbers.setdefault(moment, set()).add(other)
        return [held(moment, world_size, *sorted(found)) for moment, found in numbers.items() if moment]


def receive(host, other, moment, safe):
    """Keep another rank's image as a receiver does: not in the place of the safe one, rather of the older."""
    slots = host.replicas.setdefault(other, {0: None, 1: None})
    slot = min((slot for slot in slots if slots[slot] is None or slots[slot] != safe), key=lambda s: slots[s] or (0, 0))
    slots[slot] = moment


def check(hosts, num_lost, at_least):
    """Look whether any so many hosts can be lost now."""
    for lost in itertools.combinations(range(len(hosts)), num_lost):
        choice = newest_of([host.told(rank, len(hosts)) for rank, host in enumerate(hosts) if rank not in lost], FOLDER)
        if at_least is not None:
            assert choice is not None
            assert (choice.attempt, choice.step) >= at_least


@pytest.mark.parametrize(("num_hosts", "num_replicas"), [(2, 1), (3, 1), (4, 2)])
def test_whichever_hosts_are_lost_at_any_moment_one_snapshot_is_whole(num_hosts, num_replicas):
    chance = random.Random(num_hosts)
    for _ in range(20):
        hosts = [SimHost() for _ in range(num_hosts)]
        for step in range(1, 25):
            is_busy = not all(host.has_copied for host in hosts)
            slots = [host.slots.next((1, step), is_to_be_copied=True, is_busy=is_busy) for host in hosts]
            safe, copying = hosts[0].slots.safe, hosts[0].slots.copying
            for moment in (None, (1, step)):  # torn, then whole
                for host, slot in zip(hosts, slots, strict=True):
                    host.own[slot] = moment
                    check(hosts, num_replicas, safe)
            for rank, host in enumerate(hosts):
                host.has_copied &= copying != (1, step)
                if not host.has_copied and chance.random() < 0.6:
                    for further in range(1, num_replicas + 1):
                        for moment in (None, copying):
                            receive(hosts[(rank + further) % num_hosts], rank, moment, safe)
                            check(hosts, num_replicas, safe)
                    host.has_copied = True


def test_lost_images_are_named_if_no_snapshot_is_complete():
    left = [Holding(1, 30, FOLDER, 4, (3, 1)), Holding(1, 20, FOLDER, 4, (0, 1))]
    assert lost_of([left, [Holding(1, 30, FOLDER, 4, (1,))]], FOLDER) == (30, (0, 2))
    assert lost_of([left, [Holding(1, 20, FOLDER, 4, (2, 3))]], FOLDER) is None
    assert lost_of([left], b"another") is None
