"""DistributedDataParallel over a whole training and at its ends: without a group, and when a rank stops early."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx

pytestmark = pytest.mark.kept_ranks

BATCH = 12  # of all ranks: divisible by 1, 2, 3 and 4
NUM_STEPS = 60


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_curve(model, part):
    """Train on this part of each batch; return the mean loss of each step, on this part."""
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(p) for p in parameters]
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(NUM_STEPS):
        x = torch.randn(BATCH, 6, generator=generator)
        loss = (model(x[part]) - x[part, :2].sum(1, keepdim=True).sin()).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter, momentum in zip(parameters, momenta, strict=True):
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=0.05)
        losses.append(loss.detach())
    return torch.stack(losses)


def loss_curves(rank, world_size):
    """Return the curve of the whole batch as the first 1, 2, ... ranks train on it."""
    curves = []
    for num_ranks in range(1, world_size + 1):
        group = dist.new_group(range(num_ranks))
        if rank >= num_ranks:
            continue
        model = phalanx.DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=1e-3)
        size = BATCH // num_ranks
        curve = loss_curve(model, slice(rank * size, (rank + 1) * size))
        dist.all_reduce(curve, group=group)
        curves.append(curve / num_ranks)
    return curves


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_loss_curves_do_not_depend_on_the_number_of_ranks(run_ranks, backend):
    want = loss_curve(mlp(), slice(None))
    assert want[-20:].mean() < 0.5 * want[:20].mean()
    curves = run_ranks(loss_curves, 4, backend=backend)[0]
    assert len(curves) == 4
    for curve in curves:
        torch.testing.assert_close(curve, want, rtol=1e-3, atol=1e-4)


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match=r"phalanx\.init\(\)"):
        phalanx.DistributedDataParallel(nn.Linear(2, 2))


def train_and_stop_early(rank, world_size, with_buffers):
    norm = nn.BatchNorm1d(4) if with_buffers else nn.Identity()
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), norm))
    for _ in range(3 if rank == 1 else 5):
        model(torch.ones(4, 6)).sum().backward()


def train_until_a_rank_is_killed(rank, world_size):
    model = phalanx.DistributedDataParallel(torch.nn.Linear(6, 2))
    for step in range(5):
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(4, 6)).sum().backward()


def test_a_rank_that_was_killed_is_not_suspected_of_too_little_data(run_ranks):
    outcomes = run_ranks(train_until_a_rank_is_killed, 2, expect_failures=True)
    assert isinstance(outcomes[0].error, phalanx.RankFailed)
    assert not getattr(outcomes[0].error, "__notes__", [])
    assert "join()" not in str(outcomes[0].error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
@pytest.mark.parametrize("with_buffers", [False, True])
def test_a_rank_that_stops_early_is_named_with_a_hint(run_ranks, with_buffers):
    outcomes = run_ranks(train_and_stop_early, 3, with_buffers, expect_failures=True)
    assert outcomes.pop(1).ok
    for outcome in outcomes:
        assert isinstance(outcome.error, phalanx.PhalanxError), outcome
        assert "rank 1" in str(outcome.error)
        said = "\n".join([str(outcome.error), *getattr(outcome.error, "__notes__", [])])
        assert "join()" in said
        assert said.count("DistributedSampler") == 1  # in the backend's own message or in a note, not in both
