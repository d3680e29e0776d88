"""Messages over several hosts: those that cross and those that stay, in order, by tag and from anybody."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, GroupUnusable, PhalanxError, RankFailed
from phalanx.wire.waiting import wait_until
from tests.backend._calls import check_equal, values
from tests.backend.test_coalescing import coalesce_messages
from tests.backend.test_messages import (
    answer_out_of_order,
    batch_around,
    flood,
    messages_and_collectives,
    pass_around,
    receive_from_anybody,
    receive_in_a_subgroup,
)
from tests.hosts._layouts import LAYOUTS, interleaved, layout_name

pytestmark = pytest.mark.kept_ranks

HEAD_BYTES = 25  # the rest of the 1024 is for a message that travels with its head
every_layout = pytest.mark.parametrize("hosts", LAYOUTS, ids=layout_name)
many_ranks = pytest.mark.parametrize("hosts", [[2, 2], [2, 1], [1, 1, 1]], ids=layout_name)


def pass_around_the_inline_limit(rank, world_size):
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for num in (1024 - HEAD_BYTES + d for d in (-1, 0, 1)):
        sent = dist.isend(values(rank, (num,), torch.uint8), after)
        got = torch.zeros(num, dtype=torch.uint8)
        dist.recv(got, before)
        sent.wait()
        check_equal(got, values(before, (num,), torch.uint8), f"{num} bytes")


def answer_everybody(rank, world_size):
    """Everybody sends to everybody, both ways at once, large and small ones in turn; receives come first or last."""
    for receives_first in (True, False):
        sizes = [3, 200_000, 0, 5_000]
        got = {peer: [torch.zeros(n) for n in sizes] for peer in range(world_size) if peer != rank}
        sent, received = [], []

        def receive(got=got, received=received):
            for peer, tensors in got.items():
                received += [dist.irecv(tensor, peer, tag=i) for i, tensor in enumerate(tensors)]

        if receives_first:
            receive()
        for peer in got:
            sent += [dist.isend(values(rank, (n,), torch.float32), peer, tag=i) for i, n in enumerate(sizes)]
        dist.barrier()
        if not receives_first:
            receive()
        for work in [*reversed(received), *sent]:
            work.wait()
        for peer, tensors in got.items():
            for n, tensor in zip(sizes, tensors, strict=True):
                check_equal(tensor, values(peer, (n,), torch.float32), f"{n} from {peer}")


def send_views(rank, world_size):
    whole = values(rank, (500, 4), torch.float64)
    work = dist.isend(whole[:, 1], (rank + 1) % world_size)
    got = torch.zeros(500, 3, dtype=torch.float64)
    dist.recv(got[:, 2], (rank - 1) % world_size)
    work.wait()
    want = torch.zeros_like(got)
    want[:, 2] = values((rank - 1) % world_size, (500, 4), torch.float64)[:, 1]
    check_equal(got, want, "a column")


def pick_by_tag_from_anybody(rank, world_size):
    """Receives from any rank take in turn what comes from here and from there, and leave other tags alone."""
    if rank:
        sent = [dist.isend(torch.full((9,), 10.0 * rank + tag), 0, tag=tag) for tag in (1, 2)]
        for work in sent:
            work.wait()
        return None
    taken = {}
    for tag in (2, 1):
        works, tensors = [], [torch.zeros(9) for _ in range(world_size - 1)]
        for tensor in tensors:
            works.append(dist.irecv(tensor, tag=tag))
        for work in works:
            work.wait()
        assert [t.unique().item() for t in tensors] == [
            10.0 * work._source_rank() + tag for work, t in zip(works, tensors, strict=True)
        ]
        taken[tag] = sorted(work._source_rank() for work in works)
    return taken


def look_without_waiting(rank, world_size):
    """A receive from any rank is done, and its future fulfilled, though nobody waits for it."""
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        dist.barrier()
        return None
    got = [torch.zeros(1) for _ in range(world_size - 1)]
    works = [dist.irecv(tensor) for tensor in got]
    futures = [work.get_future() for work in works]
    dist.barrier()
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    for future in futures:
        future.wait()
    assert [int(tensor) for tensor in got] == [work._source_rank() for work in works]
    return sorted(int(tensor) for tensor in got)


def move_without_threads(rank, world_size):
    """No thread can be had, as where the limit of processes is reached: that ends the group, with that reason."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "phalanx-messages" and rank == 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    with pytest.raises(PhalanxError) as error:
        (dist.isend if rank == 0 else dist.irecv)(torch.ones(5), 1 - rank).wait()
    return str(error.value)


def send_what_does_not_fit(rank, world_size, what, receives_first):
    other = {"size": torch.ones(5), "dtype": torch.ones(6, dtype=torch.int32)}[what]
    texts = []
    if rank == 0:
        if receives_first:
            dist.recv(torch.zeros(1), world_size - 1, tag=1)
        with pytest.raises((CollectiveMismatch, GroupUnusable)) as error:
            dist.send(torch.ones(6), world_size - 1)
            dist.barrier()
    elif rank == world_size - 1:
        if receives_first:
            work = dist.irecv(other, 0)
            dist.send(torch.zeros(1), 0, tag=1)
        with pytest.raises(CollectiveMismatch) as error:
            work.wait() if receives_first else dist.recv(other, 0)
    else:
        with pytest.raises(CollectiveMismatch) as error:
            dist.barrier()
    with pytest.raises(GroupUnusable):
        dist.barrier()
    texts.append(str(error.value))
    return texts[0]


@every_layout
def test_messages_of_every_length_go_around(run_ranks, hosts):
    run_ranks(pass_around, sum(hosts), hosts=hosts)


@every_layout
def test_everybody_answers_everybody(run_ranks, hosts):
    run_ranks(answer_everybody, sum(hosts), hosts=hosts)


def test_messages_cross_between_interleaved_hosts(run_ranks):
    run_ranks(interleaved, 4, "abab", answer_everybody, init=False)


@pytest.mark.parametrize("check", [pass_around_the_inline_limit, send_views])
def test_short_messages_and_views_arrive(run_ranks, check):
    run_ranks(check, 3, hosts=[1, 2])


@many_ranks
def test_receives_pick_by_tag_and_keep_the_order_within_one(run_ranks, hosts):
    results = run_ranks(answer_out_of_order, sum(hosts), hosts=hosts)
    assert results[1:] == [[100.0 * tag + i for tag in (0, 2, 4, 7, 9) for i in range(3)]] * (sum(hosts) - 1)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 1, 1]], ids=layout_name)
def test_a_receive_from_anybody_says_who_it_was(run_ranks, hosts):
    num = sum(hosts)
    found, source, got = run_ranks(receive_from_anybody, num, hosts=hosts)[0]
    assert found[0] == {r: [float(r)] for r in range(1, num)}
    assert found[1] == {r: [10.0 + r] for r in range(1, num)}
    assert (source, got) == (num - 1, [5.0, 6.0])


def receive_when_others_have_left(rank, world_size, leaving, folder):
    """Each rank in `leaving` leaves once the one before it has; the last one sends before."""
    if rank == 0:
        got = torch.zeros(2)
        work = dist.irecv(got)
        dist.barrier()
        work.wait()
        source = work._source_rank()
        with pytest.raises(RankFailed) as told:
            dist.recv(got)
        return source, got.tolist(), told.value.entry
    dist.barrier()
    before = leaving[: leaving.index(rank)]
    assert wait_until(lambda: all((folder / str(r)).exists() for r in before) or None, time.monotonic() + 30)
    if rank == leaving[-1]:
        dist.send(torch.tensor([1.0, 2.0]), 0)
    dist.destroy_process_group()
    (folder / str(rank)).touch()
    return None


@pytest.mark.parametrize(
    ("hosts", "leaving"),
    [([2, 2], [1, 2, 3]), ([2, 2], [2, 3, 1]), ([2, 2], [3, 1, 2]), ([1, 3], [1, 3, 2]), ([4], [2, 3, 1])],
)
def test_a_receive_from_anybody_outlives_those_who_leave_until_nobody_is_left(run_ranks, hosts, leaving, tmp_path):
    results = run_ranks(receive_when_others_have_left, 4, leaving, tmp_path, hosts=hosts)
    assert results[0] == (leaving[-1], [1.0, 2.0], "rank-left")


def die_when_others_have_left(rank, world_size, leaving, victim, folder):
    dist.barrier()
    if rank in leaving:
        dist.destroy_process_group()
        (folder / str(rank)).touch()
    elif rank == victim:
        assert wait_until(lambda: all((folder / str(r)).exists() for r in leaving) or None, time.monotonic() + 30)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        dist.recv(torch.zeros(2))


@pytest.mark.parametrize(("hosts", "leaving", "victim"), [([2, 2], [3], 2), ([1, 3], [1, 2], 3)])
def test_of_ranks_that_have_left_and_one_that_was_killed_a_receive_names_the_killed(
    run_ranks, hosts, leaving, victim, tmp_path
):
    endings = run_ranks(die_when_others_have_left, 4, leaving, victim, tmp_path, hosts=hosts, expect_failures=True)
    for ending in endings:
        if ending.rank not in (victim, *leaving):
            assert isinstance(ending.error, RankFailed)
            assert ending.error.ranks == (victim,), ending.error


@pytest.mark.parametrize("hosts", [[2, 2], [3, 1], [1, 3]], ids=layout_name)
def test_receives_from_anybody_are_told_apart_by_tags(run_ranks, hosts):
    results = run_ranks(pick_by_tag_from_anybody, 4, hosts=hosts)
    assert results[0] == {2: [1, 2, 3], 1: [1, 2, 3]}


@many_ranks
def test_a_receive_from_anybody_completes_by_itself(run_ranks, hosts):
    assert run_ranks(look_without_waiting, sum(hosts), hosts=hosts, timeout_s=20)[0] == list(range(1, sum(hosts)))


def test_messages_in_a_reversed_group_name_ranks_by_the_world(run_ranks):
    results = run_ranks(receive_in_a_subgroup, 4, hosts=[2, 2])
    assert results == [None, (3, 3.0, 13.0), None, (1, 1.0, 11.0)]


@many_ranks
def test_batches_give_what_gloo_gives(run_ranks, hosts):
    num = sum(hosts)
    assert run_ranks(batch_around, num, hosts=hosts) == [2 * (num - 1)] * num


def test_hundreds_of_messages_wait_for_their_receives(run_ranks):
    assert run_ranks(flood, 2, hosts=[1, 1]) == [True, True]


@many_ranks
def test_a_receive_stays_open_across_collectives(run_ranks, hosts):
    assert run_ranks(messages_and_collectives, sum(hosts), hosts=hosts) == [True] * sum(hosts)


def test_messages_share_a_handle(run_ranks):
    want = [[float((rank - 1) % 3)] * 2 for rank in range(3)]
    assert run_ranks(coalesce_messages, 3, hosts=[2, 1]) == want


@pytest.mark.parametrize("receives_first", [True, False], ids=["awaited", "unexpected"])
@pytest.mark.parametrize("what", ["size", "dtype"])
def test_a_message_that_does_not_fit_is_an_error_on_every_rank(run_ranks, what, receives_first):
    texts = run_ranks(send_what_does_not_fit, 3, what, receives_first, hosts=[2, 1])
    want = {"size": "recv(float32, count=5, src=0, tag=0)", "dtype": "recv(int32, count=6, src=0, tag=0)"}[what]
    for text in texts:
        assert want in text
        assert "on host host-0 sent" in text
        assert "send(float32, count=6)" in text
        assert "test_messages.py:" in texts[2]


def test_a_message_for_which_no_thread_can_be_had_says_so(run_fresh_ranks):
    for text in run_fresh_ranks(move_without_threads, 2, hosts=[1, 1], timeout_s=30):
        assert "can't start new thread" in text
