"""Signals every few milliseconds, whose handlers call the backend too: nothing hangs, and every sum is right.

The handlers call a group of their rank alone, which the script uses as well: the ranks need not agree about the order,
and each call either works or raises GroupUnusable. Short here; PHALANX_TEST_LONG=1 runs for a minute.
"""

from __future__ import annotations

import os
import random
import signal
import time

import torch
import torch.distributed as dist

from phalanx import GroupUnusable

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
RUN_S = 60.0 if LONG else 1.5


def call_own_group(generator, own):
    """Make a random call on a group of this rank alone, and check what it gives."""
    tensor = torch.full((generator.choice([1, 100, 50_000]), 2), 5.0)
    part = tensor[:, 0] if generator.random() < 0.3 else tensor  # copied back at the end, where it is a view
    kind = generator.randrange(5)
    if kind == 0:
        dist.all_reduce(part, group=own)
    elif kind == 1:
        dist.all_reduce(part, group=own, async_op=True).wait()
    elif kind == 2:
        dist.all_reduce(part, group=own, async_op=True).get_future().wait()
    elif kind == 3:
        dist.broadcast(part, dist.get_rank(), group=own)
    else:
        works = [dist.barrier(group=own, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
            assert work.is_completed()
    assert (tensor == 5).all()


def compute_under_signals(rank, world_size, seed, run_s):
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    generator = random.Random(f"{seed} {rank}")
    agreed = random.Random(seed)
    counts = {"handled": 0, "refused": 0, "rounds": 0}
    is_handling = False

    def handle(signum, frame):
        nonlocal is_handling
        if is_handling:
            return
        is_handling = True
        try:
            counts["handled"] += 1
            call_own_group(generator, own)
        except GroupUnusable as error:
            if "signal handler that interrupted" not in str(error):
                raise
            counts["refused"] += 1
        finally:
            is_handling = False

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    end, go_on = time.monotonic() + run_s, torch.ones(1)
    while go_on.item():
        counts["rounds"] += 1
        num = agreed.choice([1, 1000, 100_000])
        total = torch.full((num,), rank + 1.0)
        if agreed.random() < 0.5:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total, async_op=True).wait()
        assert (total == world_size * (world_size + 1) / 2).all()
        sent = dist.isend(torch.full((num,), rank + 1.0), (rank + 1) % world_size)
        got = torch.empty(num)
        dist.recv(got, (rank - 1) % world_size)
        sent.wait()
        assert (got == (rank - 1) % world_size + 1).all()
        call_own_group(agreed, own)
        go_on.fill_(time.monotonic() < end)
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return counts


def test_calls_of_signal_handlers_work_or_raise_and_disturb_nothing(run_ranks):
    seed = random.SystemRandom().randrange(1 << 30) if LONG else 1
    for counts in run_ranks(compute_under_signals, 2, seed, RUN_S, group_timeout_s=20, timeout_s=RUN_S + 60):
        assert counts["handled"] > 10, (seed, counts)
        assert counts["rounds"] > 5, (seed, counts)
