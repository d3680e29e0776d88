"""Point-to-point: order, tags, any source, many and large ones, to oneself and around a ring."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backend._calls import check_equal, gloo_group, values

pytestmark = pytest.mark.kept_ranks

# Nothing, one, a fragment (64 KiB), a ring (256 KiB) and a bit around each, and several rings.
LENGTHS = [0, 1, 3, 16_383, 16_384, 16_385, 65_535, 65_537, 300_003]


def pass_around(rank, world_size):
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for n in LENGTHS:
        mine, got = values(rank, (n,), torch.float32), torch.full((n,), -1.0)
        works = [dist.isend(mine, after), dist.irecv(got, before)]
        for work in works:
            work.wait()
        check_equal(got, values(before, (n,), torch.float32), f"{n} elements")
        # Blocking, in the order that cannot lock up.
        got.fill_(-1)
        if rank == 0:
            dist.send(mine, after)
            assert dist.recv(got, before) == before
        else:
            assert dist.recv(got, before) == before
            dist.send(mine, after)
        check_equal(got, values(before, (n,), torch.float32), f"{n} elements, blocking")


def answer_out_of_order(rank, world_size):
    """Rank 0 sends by falling tags, the others receive by rising ones; within a tag the order stays."""
    tags, each = [9, 4, 7, 0, 2], 3
    large = {4}  # one kind of message is larger than the ring
    if rank == 0:
        works = []
        for dst in range(1, world_size):
            for tag in tags:
                for i in range(each):
                    n = 100_000 if tag in large else 5
                    works.append(dist.isend(torch.full((n,), 100.0 * tag + i), dst, tag=tag))
        for work in works:
            work.wait()
        return None
    seen = []
    for tag in sorted(tags):
        for _ in range(each):
            got = torch.zeros(100_000 if tag in large else 5)
            dist.recv(got, 0, tag=tag)
            seen.append(got.unique().item())
    return seen


def receive_from_anybody(rank, world_size):
    if rank == 0:
        found = {}
        for turn in range(2):
            for _ in range(world_size - 1):
                got = torch.zeros(4 if turn == 0 else 90_000)
                src = dist.recv(got, tag=turn)
                found.setdefault(turn, {})[src] = got.unique().tolist()
        # Not blocking: the source is told by the work.
        got = torch.zeros(2)
        work = dist.irecv(got, tag=7)
        dist.barrier()
        work.wait(timedelta(seconds=20))
        return found, work._source_rank(), got.tolist()
    dist.send(torch.full((4,), float(rank)), 0, tag=0)
    dist.send(torch.full((90_000,), 10.0 + rank), 0, tag=1)
    dist.barrier()
    if rank == world_size - 1:
        dist.send(torch.tensor([5.0, 6.0]), 0, tag=7)
    return None


def receive_in_a_subgroup(rank, world_size):
    """Ranks of a group are numbered by the world in calls and in what recv returns, also in a reversed group."""
    order = [3, 1]
    group = dist.new_group(order, sort_ranks=False)
    if rank not in order:
        return None
    other = 4 - rank
    works = [dist.isend(torch.tensor([float(rank)]), other, group=group)]
    got = torch.zeros(1)
    src = dist.recv(got, group=group)
    for work in works:
        work.wait()
    named = torch.zeros(1)
    work = dist.isend(torch.tensor([rank + 10.0]), group=group, group_dst=1 - group.rank())
    dist.recv(named, group=group, group_src=1 - group.rank())
    work.wait()
    return src, got.item(), named.item()


def batch_around(rank, world_size):
    gloo = gloo_group()
    results = []
    for group in (None, gloo):
        ops, outputs = [], []
        for peer in range(world_size):
            for i in range(2):
                if peer == rank:
                    continue
                outputs.append(torch.zeros(1000 * (i + 1)))
                ops.append(
                    dist.P2POp(dist.isend, values(rank * 7 + i, (1000 * (i + 1),), torch.float32), peer, group, i)
                )
                ops.append(dist.P2POp(dist.irecv, outputs[-1], peer, group, i))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        results.append(outputs)
    for got, want in zip(*results, strict=True):
        check_equal(got, want, "batch_isend_irecv")
    return len(results[0])


def flood(rank, world_size):
    """Hundreds of messages each way before anybody receives: senders must not wait for receivers."""
    peer, num = 1 - rank, 300
    sent = [dist.isend(torch.full((700,), float(i)), peer, tag=i % 3) for i in range(num)]
    dist.barrier()
    got = [torch.zeros(700) for _ in range(num)]
    received = [dist.irecv(tensor, peer, tag=i % 3) for i, tensor in enumerate(got)]
    for work in [*reversed(received), *sent]:
        work.wait()
    return [tensor.unique().item() for tensor in got] == [float(i) for i in range(num)]


def send_to_oneself(rank, world_size):
    try:
        dist.send(torch.ones(1), rank)
    except ValueError as error:
        return str(error)
    return "no error"


def messages_and_collectives(rank, world_size):
    """They do not overtake or block each other: a receive stays open across collectives."""
    got = torch.zeros(30_000)
    work = dist.irecv(got, (rank - 1) % world_size)
    total = torch.ones(30_000)
    for _ in range(5):
        dist.all_reduce(total)
    assert not work.is_completed()
    dist.barrier()
    dist.send(total, (rank + 1) % world_size)
    work.wait()
    check_equal(got, total, "across collectives")
    return work.is_completed()


def receive_the_rest_of_a_message(rank, world_size):
    """Rank 0 stands still once its rings are full; rank 1 has taken what they held before it asks for the message."""
    pid = torch.tensor([os.getpid() if rank == 0 else 0])
    dist.all_reduce(pid)
    large, small = values(0, (300_003,), torch.float32), values(1, (5,), torch.float32)
    if rank == 0:
        works = [dist.isend(large, 1, tag=1), dist.isend(small, 1, tag=2)]
        os.kill(os.getpid(), signal.SIGSTOP)
        for work in works:
            work.wait()
        return
    got_large, got_small = torch.zeros_like(large), torch.zeros_like(small)
    state = Path(f"/proc/{pid.item()}/stat")
    try:
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # a process that stops makes no event for another than its parent
        works = [dist.irecv(got_small, 0, tag=2), dist.irecv(got_large, 0, tag=1)]
        assert not any(work.is_completed() for work in works)
    finally:
        os.kill(int(pid), signal.SIGCONT)
    for work in works:
        work.wait()
    check_equal(got_small, small, "the message that was asked for first")
    check_equal(got_large, large, "the message of which a part had arrived")


def test_a_receive_takes_over_a_message_that_has_arrived_in_part(run_ranks):
    run_ranks(receive_the_rest_of_a_message, 2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_messages_of_every_length_go_around(run_ranks, world_size):
    run_ranks(pass_around, world_size)


def mix_any_and_one_source(rank, world_size):
    """Receives of equal tags are served in the order of posting, whether they name a source or not."""
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        for i in range(6):
            dist.send(torch.tensor([float(i)]), 0, tag=i % 2)
        return None
    got = [torch.zeros(1) for _ in range(6)]
    sources, tags = [1, None, None, 1, 1, None], [0, 0, 1, 1, 0, 1]
    works = [dist.irecv(g, src, tag=tag) for g, src, tag in zip(got, sources, tags, strict=True)]
    dist.send(torch.zeros(1), 1)
    for work in works:
        work.wait()
    return [int(g.item()) for g in got]


def post_thousands(rank, world_size, early):
    """Return the CPU time of this process for 500 and for 4,000 messages, received in the reverse order of sending."""
    spent = []
    for num in (500, 500, 4000):  # the first warms up
        got = [torch.zeros(1) for _ in range(num)]
        mine = [torch.tensor([float(i)]) for i in range(num)]
        begun = time.process_time()
        if early:  # receives wait for their messages
            receives = [dist.irecv(g, 1 - rank, tag=i) for i, g in enumerate(got)]
            dist.barrier()
        sends = [dist.isend(one, 1 - rank, tag=i) for i, one in reversed([*enumerate(mine)])]
        if not early:
            dist.barrier()
            receives = [dist.irecv(g, 1 - rank, tag=i) for i, g in enumerate(got)]
        for work in (*receives, *sends):
            work.wait()
        spent.append(time.process_time() - begun)
        assert torch.stack(got).flatten().tolist() == list(range(num))
        dist.barrier()
    return spent[1:]


def test_receives_with_and_without_a_source_keep_their_order(run_ranks):
    assert run_ranks(mix_any_and_one_source, 2)[0] == [0, 2, 1, 3, 4, 5]


@pytest.mark.parametrize("early", [True, False], ids=["posted", "unexpected"])
def test_the_cost_of_a_message_does_not_grow_with_the_number_that_waits(run_ranks, early):
    for few, many in run_ranks(post_thousands, 2, early):
        assert many < 3 * 8 * few, f"{many:.2f} s of CPU for 4,000 messages, {few:.2f} s for 500"


@pytest.mark.parametrize("world_size", [2, 3])
def test_receives_pick_by_tag_and_keep_the_order_within_one(run_ranks, world_size):
    results = run_ranks(answer_out_of_order, world_size)
    assert results[1:] == [[100.0 * tag + i for tag in (0, 2, 4, 7, 9) for i in range(3)]] * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_receive_from_anybody_says_who_it_was(run_ranks, world_size):
    found, source, got = run_ranks(receive_from_anybody, world_size)[0]
    assert found[0] == {r: [float(r)] for r in range(1, world_size)}
    assert found[1] == {r: [10.0 + r] for r in range(1, world_size)}
    assert (source, got) == (world_size - 1, [5.0, 6.0])


def test_messages_in_a_reversed_group_name_ranks_by_the_world(run_ranks):
    results = run_ranks(receive_in_a_subgroup, 4)
    assert results == [None, (3, 3.0, 13.0), None, (1, 1.0, 11.0)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_give_what_gloo_gives(run_ranks, world_size):
    assert run_ranks(batch_around, world_size) == [2 * (world_size - 1)] * world_size


def test_hundreds_of_messages_wait_for_their_receives(run_ranks):
    assert run_ranks(flood, 2) == [True, True]


def test_a_rank_cannot_send_to_itself(run_ranks):
    assert all("same as" in text or "itself" in text for text in run_ranks(send_to_oneself, 2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_receive_stays_open_across_collectives(run_ranks, world_size):
    assert run_ranks(messages_and_collectives, world_size) == [True] * world_size
