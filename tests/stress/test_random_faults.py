"""Ranks are killed and stopped at random moments of random collectives; every survivor ends with a named error in time.

Short here; PHALANX_TEST_LONG=1 (`make stress`) runs the full counts. A failure names its seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx import CollectiveTimeout, PhalanxError, RankFailed
from phalanx.testing import reached, spawn_ranks

LONG = os.environ.get("PHALANX_TEST_LONG") == "1"
NUM_FAULTS = 300 if LONG else 10
WORLD_SIZES = (2, 3, 4)
NAMED_WITHIN_S = 1.0
KILL_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 1.0
LATE_BY_S = 1.5  # a loaded machine looks at its clock late


def operate_until_a_fault(rank, world_size, seed, timeout_s):
    try:
        operate_for_ever(rank, world_size, seed, timeout_s)
    except PhalanxError:
        reached("raised")
        raise


def operate_for_ever(rank, world_size, seed, timeout_s):
    """Run the same random operations on every rank, in two groups, some of them asynchronous."""
    generator = random.Random(seed)  # not by rank: the ranks must agree
    pair = dist.new_group([0, world_size - 1], timeout=timedelta(seconds=timeout_s))
    reached("running")
    while True:
        num_elems = generator.choice([1, 100, 10_000, 100_000, 1_000_000])
        tensor = torch.ones(num_elems)
        root = generator.randrange(world_size)
        kind = generator.randrange(9)
        if kind == 0:
            dist.all_reduce(tensor)
        elif kind == 1:
            dist.broadcast(tensor, src=root)
        elif kind == 2:
            dist.barrier()
        elif kind == 3:
            dist.all_gather([torch.empty(num_elems) for _ in range(world_size)], tensor)
        elif kind == 4:
            dist.reduce_scatter(tensor, [torch.ones(num_elems) for _ in range(world_size)])
        elif kind == 5:
            works = [dist.all_reduce(torch.ones(num_elems), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
        elif kind == 6:
            to, source = (rank + 1) % world_size, (rank - 1) % world_size
            sent = dist.isend(tensor, dst=to)
            dist.recv(torch.empty(num_elems), src=source)
            sent.wait()
        elif kind == 7:
            if rank in (0, world_size - 1):
                dist.all_reduce(tensor, group=pair)
        else:
            dist.reduce(tensor, dst=root)


def check_survivor(outcome, kinds, victim, limit):
    assert isinstance(outcome.error, kinds), outcome
    # Those who did not wait for the victim itself may be told by a survivor that it has failed in its turn.
    assert outcome.error.ranks, outcome
    assert outcome.rank not in outcome.error.ranks or isinstance(outcome.error, CollectiveTimeout), outcome
    assert outcome.when_s < limit, f"{outcome.when_s - limit:.2f} s late: {outcome}"
    return victim in outcome.error.ranks


def kill_one(seed):
    generator = random.Random(seed)
    world_size = generator.choice(WORLD_SIZES)
    victim = generator.randrange(world_size)
    with spawn_ranks(operate_until_a_fault, world_size, seed, KILL_TIMEOUT_S, group_timeout_s=KILL_TIMEOUT_S) as ranks:
        ranks.wait_until_reached("running")
        time.sleep(generator.random() * 0.05)  # the random moment
        killed_at = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.join(10)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    # Two groups: a survivor of one may have ended, and be the culprit of the other, before a third one looked.
    limit = killed_at + NAMED_WITHIN_S * 2
    named = [check_survivor(outcome, RankFailed, victim, limit) for outcome in survivors]
    assert any(named), f"nobody named rank {victim}: {outcomes}"


def stop_one(seed):
    generator = random.Random(seed)
    world_size = generator.choice(WORLD_SIZES)
    victim = generator.randrange(world_size)
    with spawn_ranks(operate_until_a_fault, world_size, seed, STOP_TIMEOUT_S, group_timeout_s=STOP_TIMEOUT_S) as ranks:
        ranks.wait_until_reached("running")
        time.sleep(generator.random() * 0.05)  # the random moment
        stopped_at = time.monotonic()
        ranks.stop(victim)
        survivors = [rank for rank in range(world_size) if rank != victim]
        ranks.wait_until_reached("raised", survivors)
        ranks.kill(victim)
        outcomes = ranks.join(10)
    limit = stopped_at + STOP_TIMEOUT_S + LATE_BY_S
    kinds = (CollectiveTimeout, RankFailed)
    named = [check_survivor(outcomes[rank], kinds, victim, limit) for rank in survivors]
    assert any(named), f"nobody named rank {victim}: {outcomes}"


@pytest.mark.parametrize("fault", [kill_one, stop_one])
def test_every_survivor_ends_with_a_named_error_in_time(fault):
    count = NUM_FAULTS * 2 // 3 if fault is kill_one else NUM_FAULTS - NUM_FAULTS * 2 // 3
    first = random.SystemRandom().randrange(1 << 30) if LONG else 1
    for seed in range(first, first + count):
        try:
            fault(seed)
        except BaseException as error:
            error.add_note(f"{fault.__name__}({seed})") if hasattr(error, "add_note") else print(f"seed {seed}")
            raise
