"""Random sequences of operations over overlapping groups, blocking and not, compared with Gloo result by result.

A plan is drawn from a seed, so every rank draws the same one. The short form runs in `make test`; PHALANX_TEST_LONG=1
runs the long one.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.distributed as dist

from tests.backend._calls import CALLS, REDUCING, Call, check_equal, gloo_group

pytestmark = pytest.mark.kept_ranks

LONG = os.environ.get("PHALANX_TEST_LONG", "0") == "1"
NUM_PLANS = 40 if LONG else 4
NUM_STEPS = 400 if LONG else 60

ReduceOp = dist.ReduceOp
SHAPES = [(1,), (7,), (12,), (3, 5), (0,), (0, 2), (513,), (8192,), (8193, 1), (64, 300), (70_001,)]
# What Gloo reduces; the numbers are small, so both are exact in any order. Products stay below 2^11 for halves.
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
REDUCE_OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
MOST_PENDING = 6


def make_groups(draw: random.Random, world_size: int) -> list[tuple[list[int], dist.ProcessGroup, dist.ProcessGroup]]:
    """Return groups of phalanx and their twins of Gloo: the world, overlapping subsets, some in reversed order."""
    subsets = [list(c) for n in range(1, world_size + 1) for c in itertools.combinations(range(world_size), n)]
    chosen = [list(range(world_size)), *draw.sample(subsets, min(3, len(subsets)))]
    for ranks in chosen[1:]:
        draw.shuffle(ranks)
    return [(ranks, dist.new_group(ranks, sort_ranks=False), gloo_group(ranks)) for ranks in chosen]


def draw_call(draw: random.Random, group: dist.ProcessGroup, size: int, seed: int) -> Call:
    name = draw.choice(sorted(CALLS))
    dtype = draw.choice(DTYPES)
    op = draw.choice(REDUCE_OPS if name in REDUCING else [ReduceOp.SUM])
    if op == ReduceOp.PRODUCT and dtype is torch.bfloat16:
        op = ReduceOp.SUM  # 4 ** 6 needs more bits than Gloo keeps while it multiplies
    return Call(name, group, draw.choice(SHAPES), dtype, op, draw.randrange(size), seed, draw.random() < 0.5)


def follow_plan(rank, world_size, plan, num_steps):
    draw = random.Random(f"{plan} of {world_size}")
    groups = make_groups(draw, world_size)
    pending, num_compared = [], 0

    def settle(which):
        nonlocal num_compared
        step, call, works, results, wanted = pending.pop(which)
        for work in works:
            work.wait()
        for got, want in zip(results, wanted, strict=True):
            check_equal(got, want, f"plan {plan}, step {step}: {call}")
        num_compared += len(results)

    for step in range(num_steps):
        ranks, ours, gloo = draw.choice(groups)
        # Drawn on every rank, member or not, so that all draw the same.
        order, wait_now = draw.random(), draw.random() < 0.4
        call = draw_call(draw, ours, len(ranks), step)
        if rank not in ranks:
            continue
        works, results = call.start()
        pending.append((step, call, works, results, Call.run(call.on(gloo))))
        while pending and (wait_now or len(pending) > MOST_PENDING):
            settle(int(order * len(pending)))
    while pending:
        settle(0)
    return num_compared


def check_numbers(plans, world_size, run_ranks):
    for plan in plans:
        compared = run_ranks(follow_plan, world_size, plan, NUM_STEPS, timeout_s=300 if LONG else 60)
        assert sum(compared) > NUM_STEPS / 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_random_plans_give_what_gloo_gives(run_ranks, world_size):
    check_numbers(range(NUM_PLANS if 1 < world_size < 6 else 1), world_size, run_ranks)


@pytest.mark.parametrize(
    "env", [{"PHALANX_SPIN_US": "0"}, {"PHALANX_ONE_SHOT_BYTES": "0", "PHALANX_CHUNK_BYTES": "4096"}]
)
def test_random_plans_hold_whatever_the_settings(run_ranks, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    check_numbers([100, 101], 3, run_ranks)
