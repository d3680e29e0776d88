"""Whom the others wait for: what ranks do goes in, a sentence comes out."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx._text import duration
from phalanx.diagnose.jobs import NO_RANK
from phalanx.diagnose.stacks import Frame
from phalanx.diagnose.why.activity import Activity, Call
from phalanx.diagnose.why.clauses import clause
from phalanx.diagnose.why.findings import find
from phalanx.diagnose.why.wording import caution, sentence

LOADING = Frame("load_image", "data.py", 88, "")


def waits(rank: int, op: str = "all_reduce", seq: int = 7, group: str = "default", peer: int | None = None) -> Activity:
    """A rank of the phalanx backend that waits in a call."""
    call = Call(op, f"train.py:{seq}", group, seq, peer, since_s=41.2)
    return Activity(rank, 100 + rank, call, "asleep", progress={"default": 7, group: seq})


def stacked(rank: int, op: str, line: int) -> Activity:
    """A rank of another backend that waits in a call."""
    return Activity(rank, 100 + rank, Call(op, f"train.py:{line}", since_s=3.0), "asleep", since_s=3.0)


def elsewhere(rank: int, how: str = "asleep", seq: int = 6) -> Activity:
    since_s = None if how == "runs" else 41.0
    return Activity(rank, 100 + rank, None, how, LOADING, since_s=since_s, progress={"default": seq} if seq else {})


def answer(*activities: Activity, world_size: int = 0) -> str:
    return sentence(find(activities, world_size), activities)


def test_at_a_breakpoint_of_all_the_rank_with_the_debugger_is_named():
    waiting = Activity(0, 100, Call("phalanx.breakpoint", "train.py:4"), "asleep")
    held = Activity(1, 101, None, "breakpoint", Frame("<module>", "train.py", 5, ""), since_s=4.0)
    assert answer(waiting, held) == (
        "rank 1 has not left phalanx.breakpoint at train.py:4; it has been at a breakpoint in <module> at train.py:5 "
        "for 4.0 s; 1 rank waits for it"
    )


@pytest.mark.parametrize("culprit", range(4))
def test_a_rank_that_has_not_called_is_named_with_its_line_and_the_time(culprit):
    ranks = [elsewhere(rank) if rank == culprit else waits(rank) for rank in range(4)]
    assert answer(*ranks) == (
        f"rank {culprit} has not called all_reduce #7 of group 'default'; it has been in load_image at data.py:88 for "
        "41 s; 3 ranks have waited up to 41 s for it"
    )


@pytest.mark.parametrize(("rank", "name"), [(0, "rank 0"), (NO_RANK, "pid 4711")])
def test_a_process_alone_has_the_name_of_its_rank_if_it_is_one(rank, name):
    assert answer(Activity(rank, 4711, None, "runs", LOADING)) == f"{name} is running in load_image at data.py:88"


def test_a_short_wait_may_be_that_of_a_healthy_job():
    brief = dataclasses.replace(waits(0).call, since_s=0.04)
    found = find([dataclasses.replace(waits(0), call=brief), elsewhere(1)])
    assert caution(found).startswith("The longest wait has lasted 0.0 s: the job may well be running.")
    assert caution(find([waits(0), elsewhere(1)])) == ""


def test_a_wait_that_may_have_lasted_longer_is_told_as_at_least_so_long():
    def at_least(rank: int) -> Activity:
        return dataclasses.replace(waits(rank), call=dataclasses.replace(waits(rank).call, since_is_least=True))

    resting = dataclasses.replace(elsewhere(2), since_is_least=True)
    assert answer(waits(0), waits(1), resting).endswith("for at least 41 s; 2 ranks have waited up to 41 s for it")
    assert answer(at_least(0), resting).endswith("for at least 41 s; 1 rank has waited at least 41 s for it")
    assert answer(at_least(0), at_least(1), resting).endswith(
        "; 2 ranks have waited for it, the longest for at least 41 s"
    )


def test_no_time_is_not_told_as_a_time():
    begun = dataclasses.replace(waits(0), call=dataclasses.replace(waits(0).call, since_s=0.04))
    assert answer(begun, elsewhere(1)).endswith("; 1 rank waits for it")
    assert "0.0 s" not in clause(begun)


@pytest.mark.parametrize(
    ("how", "system_call", "since_s", "words"),
    [
        ("asleep", "nanosleep", 0.02, "is sleeping in load_image at data.py:88"),
        ("asleep", "nanosleep", 2.0, "has been sleeping in load_image at data.py:88 for at least 2.0 s"),
        ("runs", "", None, "is running in load_image at data.py:88"),
    ],
)
def test_of_a_rank_that_polls_or_loops_it_is_told_how_long_after_its_last_operation(how, system_call, since_s, words):
    last = Call("all_reduce", "train.py:6", "default", 6, since_s=41.0)
    polls = dataclasses.replace(
        elsewhere(1), how=how, since_s=since_s, since_is_least=True, system_call=system_call, last=last
    )
    assert answer(waits(0), polls) == (
        f"rank 1 has not called all_reduce #7 of group 'default'; it {words}, 41 s after its last recorded operation; "
        "1 rank has waited 41 s for it"
    )
    unknown = dataclasses.replace(polls, last=None)
    assert "0.0 s" not in clause(unknown)
    assert "after" not in clause(unknown)


def test_several_ranks_that_have_not_called_are_named_together():
    assert answer(waits(0), elsewhere(1), elsewhere(2, "stopped")) == (
        "ranks 1 and 2 have not called all_reduce #7 of group 'default'; rank 1 has been in load_image at data.py:88 "
        "for 41 s; rank 2 has been stopped (SIGSTOP or Ctrl-Z) in load_image at data.py:88 for 41 s; "
        "1 rank has waited 41 s for them"
    )


def test_a_rank_that_has_called_and_computes_meanwhile_is_not_waited_for():
    found = find([waits(0), waits(1), elsewhere(2, seq=7)])
    assert (found.kind, found.culprits) == ("together", ())


def test_a_rank_that_is_stopped_within_the_call_is_named():
    stopped = Activity(1, 101, waits(1).call, "stopped", LOADING, since_s=9.0, progress={"default": 7})
    found = find([waits(0), stopped, waits(2)])
    assert (found.kind, found.culprits, found.waiters) == ("halted", (1,), (0, 2))


def test_ranks_that_wait_for_each_other_in_two_groups_are_both_named():
    one, other = waits(0, "barrier", 8, "first"), waits(1, "barrier", 9, "second")
    one, other = (
        Activity(0, 100, one.call, "asleep", progress={"first": 8, "second": 8}),
        Activity(1, 101, other.call, "asleep", progress={"first": 7, "second": 9}),
    )
    assert answer(one, other) == (
        "rank 1 waits in barrier #9 of group 'second' at train.py:9, while rank 0 waits in barrier #8 of group 'first' "
        "at train.py:8: all ranks of a group must make the same calls in the same order"
    )


def test_a_rank_is_not_waited_for_in_a_group_that_it_is_not_in():
    found = find([waits(0, "barrier", 3, "pair"), elsewhere(1, seq=6), Activity(2, 102, progress={"pair": 2})])
    assert found.culprits == (2,)


def test_a_message_is_waited_for_from_its_sender():
    receiving = waits(0, "recv", 0, "default", peer=2)
    assert find([receiving, elsewhere(1), elsewhere(2)]).culprits == (2,)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("backward", "rank 1 has not reached the backward pass at train.py:12; it "),
        ("wait", "rank 1 has not reached the operation awaited at train.py:12; it "),
        ("recv", "rank 1 has not made the call that recv at train.py:12 waits for; it "),
        ("barrier", "rank 1 has not called barrier at train.py:12; it "),
    ],
)
def test_what_is_no_call_of_a_collective_is_named_as_what_it_is(op, words):
    assert answer(stacked(0, op, 12), elsewhere(1, seq=0)).startswith(words)


def test_without_numbers_the_fewer_ranks_are_named():
    ranks = [stacked(0, "all_reduce", 12), stacked(1, "broadcast", 9), stacked(2, "all_reduce", 12)]
    assert answer(*ranks) == (
        "rank 1 waits in broadcast at train.py:9, while ranks 0 and 2 wait in all_reduce at train.py:12: all ranks of "
        "a group must make the same calls in the same order"
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_one_number_in_different_operations_are_not_told_as_one(num_ranks):
    ranks = [waits(0), waits(1, "barrier"), waits(2, seq=1, group="pair")][:num_ranks]
    found = answer(*ranks)
    assert "rank 1 waits in barrier #7 of group 'default'" in found
    assert "rank 0 waits in all_reduce #7 of group 'default'" in found
    assert found.endswith("all ranks of a group must make the same calls in the same order")


def test_without_numbers_ranks_in_one_call_may_have_made_different_numbers_of_them():
    found = answer(stacked(0, "all_reduce", 12), stacked(1, "all_reduce", 12))
    assert found.startswith(
        "both ranks are in all_reduce at train.py:12, and no rank is missing: a rank made an extra call"
    )


@pytest.mark.parametrize("ops", [("all_reduce", "all_reduce"), ("all_reduce", "broadcast")])
def test_ranks_of_a_healthy_job_which_moved_while_it_was_looked_at_are_not_accused(ops):
    ranks = [stacked(0, ops[0], 12), stacked(1, ops[1], 12)]
    brief = [dataclasses.replace(one, call=dataclasses.replace(one.call, since_s=0.02)) for one in ranks]
    assert "all ranks of a group must" in answer(*ranks)
    assert "all ranks of a group must" not in answer(*brief)
    assert caution(find(brief)).startswith("The longest wait has lasted 0.0 s: the job may well be running.")


def test_ranks_on_other_hosts_are_named_if_all_here_wait():
    assert answer(waits(0), waits(1), world_size=4).endswith(
        "; ranks 2 and 3 run on other hosts that have not answered: type phalanx why there"
    )


def test_a_rank_that_no_host_has_started_yet_is_told_so():
    here = [waits(rank) for rank in range(3)]
    found = dataclasses.replace(find(here, 4), hosts=("hb",))
    assert sentence(found, here).endswith("; rank 3 has not started yet on host hb")


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (("hb",), "on host hb; run phalanx why on that host"),
        (("hb", "hc"), "on hosts hb, hc; run phalanx why there"),
        ((), "on another host; run phalanx why on that host"),
    ],
)
def test_of_a_job_that_has_ended_it_is_told_on_which_host_to_ask_about_the_others(hosts, where):
    here = [waits(0), waits(1)]
    found = dataclasses.replace(find(here, 3), is_over=True, hosts=hosts)
    assert sentence(found, here).endswith(f" at train.py:7, for rank 2, {where}")


def test_where_none_waits_each_says_what_it_does():
    assert answer(elsewhere(0, "runs"), elsewhere(1, "runs")) == (
        "no rank waits for another; each is running in load_image at data.py:88"
    )
    assert answer() == "no rank of this job runs on this host"


def test_where_none_waits_and_some_have_ended_those_that_live_come_first():
    ended = [Activity(rank, 100 + rank, None, "ended") for rank in (0, 2)]
    assert answer(ended[0], elsewhere(1), ended[1]) == (
        "rank 1 has been in load_image at data.py:88 for 41 s; ranks 0 and 2 have ended"
    )


def test_of_a_group_that_some_ranks_make_it_is_said_that_all_must():
    making = [stacked(rank, "new_group", 9) for rank in (0, 2)]
    rule = "every rank must call new_group, in the same order, member or not"
    assert answer(making[0], elsewhere(1), making[1]).endswith(f"; 2 ranks have waited up to 3.0 s for it: {rule}")
    assert answer(making[0], waits(1), making[1]).endswith(f" in new_group at train.py:9: {rule}")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (41, "41 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_times_are_short(seconds, text):
    assert duration(seconds) == text


def test_ranks_that_wait_for_each_others_messages_are_told_so():
    assert answer(waits(0, "recv", 0, peer=1), waits(1, "recv", 0, peer=0)) == (
        "ranks 0 and 1 wait for each other's messages: rank 0 waits in recv from rank 1 of group 'default' at "
        "train.py:0; rank 1 waits in recv from rank 0 of group 'default' at train.py:0"
    )


def test_of_a_chain_of_messages_the_last_is_named_with_the_call_that_waits_for_it():
    found = answer(waits(0, "recv", 0, peer=1), waits(1, "recv", 0, peer=2), elsewhere(2))
    assert found.startswith(
        "rank 2 has not sent the message that rank 1 waits for in recv at train.py:0; it has been in"
    )


def test_a_rank_whose_calls_in_a_group_are_too_long_ago_is_named():
    long_ago = dataclasses.replace(elsewhere(1), has_forgotten=True)
    assert answer(waits(0, "barrier", 3, "evaluation"), long_ago).startswith(
        "rank 1 has not called barrier #3 of group"
    )


def test_a_message_in_a_group_is_awaited_of_its_members_alone():
    member = dataclasses.replace(elsewhere(1), progress={"default": 6, "pair": 1})
    found = answer(waits(0, "recv", 0, "pair", peer=1), member, elsewhere(2))
    assert found.startswith(
        "rank 1 has not sent the message that rank 0 waits for in recv at train.py:0; it has been in"
    )
    found = answer(waits(0, "recv", 0, "pair", peer=1), member, dataclasses.replace(member, rank=2))
    assert found.startswith(
        "ranks 1 and 2 have not made the call that recv from rank 1 of group 'pair' at train.py:0 waits for; rank 1 "
    )


def test_a_message_that_is_not_received_is_told_of_its_receiver():
    assert answer(waits(0, "send", 0, peer=1), elsewhere(1)).startswith(
        "rank 1 has not received the message that rank 0 waits to send at train.py:0; it has been in load_image"
    )
    both = answer(waits(0, "isend", 0, peer=2), waits(1, "isend", 0, peer=2), elsewhere(2))
    assert both.startswith("rank 2 has not received the messages that ranks 0 and 1 wait to send at train.py:0; it ")
