"""torch's DistributedDataParallel trains on phalanx to the bits that it trains to on Gloo."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.integration._compare import Comparison

NUM_STEPS = 4


class Net(nn.Module):
    """Layers of several sizes, buffers, and a branch that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.branch = nn.Linear(64, 64)
        self.last = nn.Linear(64, 3)

    def forward(self, x, *, branch=True):
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.middle(x))
        if branch:
            x = x + self.branch(x)
        return self.last(x)


def batches(rank, num_batches=NUM_STEPS):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(num_batches):
        yield torch.randn(8, 10, generator=generator), torch.randint(3, (8,), generator=generator)


def train(rank, world_size, kind):
    """Train a few steps; return the state, the gradients and the losses of this rank."""
    torch.manual_seed(rank)  # DDP has to bring rank 0's parameters and buffers to all
    options = {
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "bucket_view": {"gradient_as_bucket_view": True},
        "no_buffers": {"broadcast_buffers": False},
    }.get(kind, {})
    # PowerSGD's callbacks call collectives themselves, which only with one bucket is the same order on every rank.
    model = DistributedDataParallel(Net(), bucket_cap_mb=25 if kind == "power_sgd" else 0.01, **options)
    if kind == "fp16_compress":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step, (x, target) in enumerate(batches(rank)):
        accumulate = kind == "no_sync" and step % 2 == 0
        with model.no_sync() if accumulate else contextlib.nullcontext():
            branch = kind != "find_unused" or (step + rank) % 3 != 0
            loss = nn.functional.cross_entropy(model(x, branch=branch), target)
            loss.backward()
        losses.append(loss.item())
        if accumulate:
            continue
        optimizer.step()
        if step < NUM_STEPS - 1:  # the last gradients are part of the result
            optimizer.zero_grad(set_to_none=False)
    gradients = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    return dict(model.module.state_dict()), gradients, losses


def train_with_sampler(rank, world_size):
    """The usual loop: DistributedSampler, DDP, a metric that is summed over the ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 10, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accuracies = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        counts = torch.zeros(2)
        for x, target in loader:
            output = model(x)
            nn.functional.cross_entropy(output, target).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts += torch.tensor([(output.argmax(1) == target).sum(), len(target)])
        dist.all_reduce(counts)
        accuracies.append((counts[0] / counts[1]).item())
    return accuracies, dict(model.module.state_dict())


def train_uneven(rank, world_size, divide_by_initial_world_size):
    """Rank 1 has twice the batches; what it averages over is what `join` was told."""
    model = DistributedDataParallel(Net())
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for x, target in batches(rank, 2 + 2 * rank):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def train_compiled(rank, world_size):
    """torch.compile breaks its graphs where phalanx is called."""
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Linear(10, 3))

    @torch.compile(backend="eager")
    def loss_of(x, target):
        dist.broadcast(x, src=0)
        loss = nn.functional.cross_entropy(model(x), target)
        work = dist.all_reduce(loss.detach().clone(), async_op=True)
        work.wait()
        return loss

    x, target = next(batches(rank))
    loss = loss_of(x, target)
    loss.backward()
    return loss.item(), model.module.weight.grad


KINDS = [
    "several_buckets",
    "find_unused",
    "no_sync",
    "static_graph",
    "bucket_view",
    "no_buffers",
    "fp16_compress",
    "power_sgd",
]
PROGRAMS = {kind: (train, (kind,)) for kind in KINDS} | {
    "sampler": (train_with_sampler, ()),
    "join": (train_uneven, (True,)),
    "join, divided by those who go on": (train_uneven, (False,)),
    "compile": (train_compiled, ()),
}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return Comparison(2, tmp_path_factory.mktemp("ddp"), PROGRAMS)


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_trains_to_gloos_bits(comparison, kind):
    (state0, gradients0, losses0), (state1, gradients1, losses1) = comparison.same_on_gloo(kind)
    assert losses0 != losses1
    for name, gradient in gradients0.items():
        assert torch.equal(gradient, gradients1[name]), name
        assert torch.equal(state0[name], state1[name]), name
    assert gradients0["last.weight"].abs().max() > 0


def test_a_loop_with_distributed_sampler_trains_to_gloos_bits(comparison):
    (accuracies, _), _ = comparison.same_on_gloo("sampler")
    assert accuracies[-1] > accuracies[0]


def test_uneven_inputs_are_joined_to_gloos_bits(comparison):
    _, by_all = comparison.same_on_gloo("join")
    _, by_those_who_go_on = comparison.same_on_gloo("join, divided by those who go on")
    for name, gradient in by_all.items():
        assert torch.equal(gradient * 2, by_those_who_go_on[name]), name


def test_compiled_code_calls_collectives_and_ddp(comparison):
    (_, gradient0), (_, gradient1) = comparison.same_on_gloo("compile")
    assert torch.equal(gradient0, gradient1)
