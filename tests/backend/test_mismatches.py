"""Ranks that call different things: an error on every rank within a second, with a table of who called what where."""

from __future__ import annotations

import concurrent.futures
import inspect
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveMismatch, GroupUnusable
from tests.faults._watch import wait_until_asleep

pytestmark = pytest.mark.kept_ranks

ReduceOp = dist.ReduceOp


def ones(num=4, dtype=torch.float32):
    return torch.ones(num, dtype=dtype)


# Each: what most ranks call, what the last rank calls, and how both stand in the table.
MISMATCHES = {
    "operation": (lambda n: dist.all_reduce(ones()), lambda n: dist.barrier(), "all_reduce(float32", "barrier()"),
    "moving operation": (
        lambda n: dist.broadcast(ones(), 0),
        lambda n: dist.all_gather([ones() for _ in range(n)], ones()),
        "broadcast(float32, count=4, src=0)",
        "all_gather(float32, count=4)",
    ),
    "dtype": (
        lambda n: dist.all_reduce(ones()),
        lambda n: dist.all_reduce(ones(dtype=torch.int32)),
        "all_reduce(float32",
        "all_reduce(int32",
    ),
    "count": (lambda n: dist.all_reduce(ones(4)), lambda n: dist.all_reduce(ones(5)), "count=4", "count=5"),
    "large count": (
        lambda n: dist.all_reduce(ones(200_000)),
        lambda n: dist.all_reduce(ones(3)),
        "count=200000",
        "count=3,",
    ),
    "root": (lambda n: dist.broadcast(ones(), 0), lambda n: dist.broadcast(ones(), 1), "src=0", "src=1"),
    "destination": (lambda n: dist.reduce(ones(), 0), lambda n: dist.reduce(ones(), 1), "dst=0", "dst=1"),
    "reduce op": (
        lambda n: dist.all_reduce(ones()),
        lambda n: dist.all_reduce(ones(), ReduceOp.MAX),
        "op=SUM",
        "op=MAX",
    ),
    "premultiplied": (
        lambda n: dist.all_reduce(ones()),
        lambda n: dist.all_reduce(ones(), dist._make_nccl_premul_sum(2.0)),
        "op=SUM",
        "op=PREMUL_SUM",
    ),
    "reduce_scatter": (
        lambda n: dist.reduce_scatter_tensor(ones(2), ones(2 * n)),
        lambda n: dist.reduce_scatter_tensor(ones(2), ones(2 * n), ReduceOp.AVG),
        "op=SUM",
        "op=AVG",
    ),
    "splits": (
        lambda n: dist.all_to_all_single(ones(n), ones(n)),
        lambda n: dist.all_to_all_single(ones(n), ones(n), [n] + [0] * (n - 1), [n] + [0] * (n - 1)),
        "all_to_all(float32, count=1)",
        "all_to_all(float32, split sizes)",
    ),
    "sizes": (
        lambda n: dist.all_gather([ones() for _ in range(n)], ones()),
        lambda n: dist.all_gather([ones(2), *(ones() for _ in range(n - 1))], ones()),
        "all_gather(float32, count=4)",
        "all_gather(float32, s",  # split sizes, or between hosts what they are
    ),
    "asynchronous": (
        lambda n: dist.all_reduce(ones(), async_op=True).wait(),
        lambda n: dist.all_reduce(ones(9), async_op=True).wait(),
        "count=4",
        "count=9",
    ),
    "blocking and not": (
        lambda n: dist.all_reduce(ones(), async_op=True).wait(),
        lambda n: dist.broadcast(ones(), 0),
        "all_reduce",
        "broadcast",
    ),
}


DIFFERENCES = {  # where it is not the size of an all_reduce
    "operation": "called different collectives",
    "moving operation": "called different collectives",
    "blocking and not": "called different collectives",
    "dtype": "called all_reduce with different dtypes",
    "root": "called broadcast with different roots",
    "destination": "called reduce with different roots",
    "reduce op": "called all_reduce with different reduce operations",
    "premultiplied": "called all_reduce with different reduce operations",
    "reduce_scatter": "called reduce_scatter with different reduce operations",
    "splits": "called all_to_all with different sizes",
    "sizes": "called all_gather with different sizes",
}


def line_of(call):
    path, line = inspect.getsourcefile(call), call.__code__.co_firstlineno
    return f"{os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path}:{line}"


def disagree(rank, world_size, kind):
    usual, odd, _, _ = MISMATCHES[kind]
    dist.all_reduce(ones())  # not the very first
    dist.barrier()
    start = time.monotonic()
    try:
        (odd if rank == world_size - 1 else usual)(world_size)
    except CollectiveMismatch as error:
        took_s = time.monotonic() - start
        with pytest.raises(GroupUnusable) as after:
            dist.barrier()
        return str(error), error.ranks, error.op, error.seq, took_s, str(after.value)
    return "no error"


def disagree_about_split_sizes(rank, world_size):
    """Rank 0 sends 3 elements to rank 1, which expects 2."""
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [2, 2])
    with pytest.raises(CollectiveMismatch) as error:
        dist.all_to_all_single(ones(sum(received)), ones(sum(sent)), received, sent)
    return str(error.value)


def disagree_in_a_group(rank, world_size):
    """Ranks are told by their numbers in the world; other groups go on."""
    group = dist.new_group([2, 1], sort_ranks=False)
    text = None
    if rank:
        with pytest.raises(CollectiveMismatch) as error:
            dist.broadcast(ones(), rank, group=group)
        text = str(error.value)
    total = ones()
    dist.all_reduce(total)
    return text, total.tolist()


def disagree_and_die_before_the_other_looks(rank, world_size):
    """Rank 0 waits; rank 1 holds it, sees the mismatch and dies of it before rank 0 may look."""
    pids = torch.tensor([os.getpid() if rank == 0 else 0])
    dist.all_reduce(pids)
    if rank == 0:
        with pytest.raises(CollectiveMismatch) as error:
            dist.all_reduce(ones(4))
        return str(error.value)
    wait_until_asleep(int(pids))
    os.kill(int(pids), signal.SIGSTOP)
    try:
        dist.all_reduce(ones(5))
    except CollectiveMismatch as error:
        dist.group.WORLD._operations.shutdown(str(error))
    finally:
        os.kill(int(pids), signal.SIGCONT)
    return ""


def send_the_wrong_size(rank, world_size, what):
    """A receive that does not fit what was sent fails; so does the sender, at the latest in its next call."""
    if rank == 0:
        with pytest.raises((CollectiveMismatch, GroupUnusable)):
            dist.send(ones(6), 1)
            dist.barrier()
        return ""
    other = {"size": ones(5), "dtype": ones(6, torch.int32), "width": ones(3, torch.int64)}[what]
    with pytest.raises(CollectiveMismatch) as error:
        dist.recv(other, 0)
    return str(error.value)


def call_in_another_order(rank, world_size):
    """The classic: a branch that one rank takes alone. It shows with the next collective, a barrier."""
    if rank == 0:
        dist.all_reduce(ones(1))
    dist.barrier()


@pytest.mark.parametrize("kind", sorted(MISMATCHES))
def test_a_mismatch_is_an_error_on_every_rank_with_a_table(run_ranks, kind):
    usual, odd, usual_text, odd_text = MISMATCHES[kind]
    results = run_ranks(disagree, 3, kind)
    for rank, (text, named, op, seq, took_s, after) in enumerate(results):
        assert took_s < 1.0, f"rank {rank} took {took_s} s"
        rows = [row for row in text.splitlines() if row.startswith("  rank ")]
        assert [row.split(":")[0] for row in rows] == ["  rank 0", "  rank 1", "  rank 2"], text
        for r, row in enumerate(rows):
            assert (odd_text if r == 2 else usual_text) in row, text
            assert row.endswith(" at " + line_of(odd if r == 2 else usual)), text
        assert named == ((0, 1) if rank == 2 else (2,))
        assert seq > 2
        assert f"rank {rank}: {op} #{seq}" in text
        assert "same collectives in the same order" in text
        assert f"the ranks of this group {DIFFERENCES.get(kind, 'called all_reduce with different sizes')}\n" in text
        assert "of this group called" in after
        assert "init_process_group" in after


@pytest.mark.parametrize("world_size", [2, 6])
def test_a_mismatch_is_seen_on_any_number_of_ranks(run_ranks, world_size):
    for text, *_ in run_ranks(disagree, world_size, "count"):
        assert text.count("\n  rank ") == world_size


def test_the_line_of_a_rank_that_has_died_of_the_mismatch_is_still_named(run_ranks):
    text, _ = run_ranks(disagree_and_die_before_the_other_looks, 2)
    (row,) = (row for row in text.splitlines() if row.startswith("  rank 1: "))
    assert re.search(r"all_reduce\(float32, count=5, op=SUM\) at .*test_mismatches.py:\d+$", row)


def test_different_split_sizes_are_named(run_ranks):
    for text in run_ranks(disagree_about_split_sizes, 2):
        assert "rank 0 sends 3 elements to rank 1, which expects 2" in text


def test_a_mismatch_in_a_group_speaks_of_the_worlds_ranks_and_ends_only_it(run_ranks):
    results = run_ranks(disagree_in_a_group, 3)
    for text, total in results:
        assert total == [3.0] * 4
        assert text is None or ("rank 1: broadcast(float32, count=4, src=1)" in text and "src=2" in text)
    assert [text is None for text, _ in results] == [True, False, False]


@pytest.mark.parametrize("what", ["size", "dtype", "width"])
def test_a_receive_of_the_wrong_kind_is_named(run_ranks, what):
    text = run_ranks(send_the_wrong_size, 2, what)[1]
    assert "rank 0 sent send(float32, count=6)" in text
    assert "test_mismatches.py" in text


def test_a_call_that_one_rank_makes_alone_is_found_at_the_next(run_ranks):
    for outcome in run_ranks(call_in_another_order, 2, expect_failures=True):
        assert isinstance(outcome.error, CollectiveMismatch), str(outcome)
        assert "all_reduce(float32, count=1" in str(outcome.error)


def call_in_a_thread_of_a_library(rank, world_size):
    """A thread runs a function of torch's: no line of this file is in it."""
    if rank == 0:
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="saver") as pool:
            pool.submit(dist.all_gather_object, [None, None], 1).result()
    else:
        dist.all_reduce(ones())


def test_a_thread_without_a_line_of_the_script_is_named_with_torchs_line(run_ranks):
    for outcome in run_ranks(call_in_a_thread_of_a_library, 2, expect_failures=True):
        text = str(outcome.error)
        row = r"  rank 0: all_gather\(int64, count=1\) at torch/distributed/\S+\.py:\d+, in thread 'saver_0'\n"
        assert re.search(row, text), text
        assert "two threads that share a group mix their calls. Give each a group of its own: new_group()." in text
