"""bridge_hook averages exactly within hosts and with a torch hook between them, and sends one copy for each host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx.parallel import Bf16State, bf16_feedback_hook, bridge_hook

pytestmark = pytest.mark.kept_ranks

DDPS = {"phalanx": phalanx.DistributedDataParallel, "torch": TorchDDP}
SMALL_MB = 3e-4  # several buckets


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10), nn.Tanh(), nn.Linear(10, 10))


def batch(rank, step):
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(1000 * rank + step))


def groups_of(rank, hosts):
    return phalanx.host_groups(f"host {hosts[rank]}")


def train(ddp, batches, lr=0.1):
    """Return the gradients of each step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    grads = []
    for x in batches:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        grads.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
    return grads


def assert_close(one, other, **tolerance):
    for ours, theirs in zip(one, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **tolerance)


# ---- exact hooks ---------------------------------------------------------------------------------------------------


def train_both_ways(rank, world_size, hosts):
    """Return, for torch's DistributedDataParallel and ours, gradients over the bridge and of plain averaging."""
    groups = groups_of(rank, hosts)
    batches = [batch(rank, step) for step in range(3)]
    results = {}
    for name, ddp in DDPS.items():
        bridged, plain = (ddp(build_model(), bucket_cap_mb=SMALL_MB) for _ in range(2))
        bridged.register_comm_hook(None, bridge_hook(groups, groups.across, default_hooks.allreduce_hook))
        results[name] = train(bridged, batches), train(plain, batches)
    return results


@pytest.mark.parametrize(
    ("hosts", "backend"), [([0, 1, 0, 1], "phalanx"), ([0, 0, 1], "phalanx"), ([0, 0, 0, 1, 1], "gloo"), ([0], "gloo")]
)
def test_an_exact_hook_averages_over_all_ranks(run_ranks, hosts, backend):
    results = run_ranks(train_both_ways, len(hosts), hosts, backend=backend)
    for name in DDPS:
        for result in results:
            assert_close(*result[name])
            assert_close(result[name][0], results[0][name][0], rtol=0, atol=0)


# ---- PowerSGD ------------------------------------------------------------------------------------------------------


def power_sgd(rank, world_size, hosts, name):
    """Train one matrix, which one rail compresses; return its gradients."""
    groups = groups_of(rank, hosts)
    torch.manual_seed(0)
    model = DDPS[name](nn.Linear(20, 30, bias=False))
    state = powerSGD_hook.PowerSGDState(groups.across, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(None, bridge_hook(groups, state, powerSGD_hook.powerSGD_hook))
    batches = [batch(rank, step) for step in range(6)]
    if world_size == 2:  # the batches of both ranks of a host
        batches = [torch.cat([batch(2 * rank, step), batch(2 * rank + 1, step)]) for step in range(6)]
    return train(model, batches)


@pytest.mark.parametrize("name", DDPS)
def test_power_sgd_compresses_only_between_hosts(run_ranks, name):
    of_four = run_ranks(power_sgd, 4, [0, 0, 1, 1], name)
    of_two = run_ranks(power_sgd, 2, [0, 1], name)
    exact = run_ranks(train_exactly, 2, name)
    for grads in of_four:
        assert_close(grads, of_two[0], rtol=1e-3, atol=1e-5)
        assert_close(grads, of_four[0], rtol=0, atol=0)
    assert_close(of_two[0][:2], exact[0][:2], rtol=1e-4, atol=1e-6)
    assert torch.linalg.matrix_rank(of_two[0][4][0]) == 2 < torch.linalg.matrix_rank(exact[0][4][0])


def train_exactly(rank, world_size, name):
    torch.manual_seed(0)
    model = DDPS[name](nn.Linear(20, 30, bias=False))
    return train(model, [torch.cat([batch(2 * rank, step), batch(2 * rank + 1, step)]) for step in range(6)])


def power_sgd_of_a_model(rank, world_size, hosts):
    """More rails than some buckets have gradients: each rail must count every bucket to know when to begin."""
    groups = groups_of(rank, hosts)
    model = TorchDDP(build_model(), bucket_cap_mb=SMALL_MB)
    state = powerSGD_hook.PowerSGDState(groups.across, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(None, bridge_hook(groups, state, powerSGD_hook.powerSGD_hook))
    grads = train(model, [batch(rank, 0)] * 40, lr=0)
    exact = train(TorchDDP(build_model()), [batch(rank, 0)], lr=0)[0]
    # With error feedback, what is sent adds up to what there was.
    total = [sum(step[i] for step in grads) / len(grads) for i in range(len(exact))]
    return state.iter, total, exact


def test_error_feedback_of_power_sgd_makes_up_for_what_it_leaves_out(run_ranks):
    for steps, total, exact in run_ranks(power_sgd_of_a_model, 4, [0, 0, 1, 1]):
        assert steps >= 40
        for mean, want in zip(total, exact, strict=True):
            assert (mean - want).norm() < 0.15 * want.norm() + 1e-6


# ---- bf16 ----------------------------------------------------------------------------------------------------------


class Weigh(nn.Module):
    """Has the gradient that it is fed."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (3, 5, 1))

    def forward(self, x):
        return sum((w * x).sum() for w in self.weights)


def add_up(rank, world_size, hosts, name):
    """Send a gradient of 1.001 for 64 steps, of which bf16 has 1.0."""
    groups = groups_of(rank, hosts)
    sums = []
    for hook, state in (
        (bf16_feedback_hook, Bf16State(groups.across)),
        (default_hooks.bf16_compress_hook, groups.across),
    ):
        model = DDPS[name](Weigh(), bucket_cap_mb=1e-6)
        model.register_comm_hook(None, bridge_hook(groups, state, hook))
        sums.append([torch.zeros_like(p) for p in model.parameters()])
        for _ in range(64):
            model.zero_grad()
            model(torch.tensor(1.001)).backward()
            torch._foreach_add_(sums[-1], [p.grad for p in model.parameters()])
    return sums


@pytest.mark.parametrize("name", DDPS)
def test_bf16_with_feedback_loses_nothing(run_ranks, name):
    for with_feedback, without in run_ranks(add_up, 4, [0, 0, 1, 1], name):
        assert torch.cat(with_feedback).tolist() == pytest.approx([64.064] * 9, abs=0.02)
        assert torch.cat(without).tolist() == [64.0] * 9


def count_what_crosses(rank, world_size, hosts):
    groups = groups_of(rank, hosts)
    model = phalanx.DistributedDataParallel(Weigh())
    model.register_comm_hook(None, bridge_hook(groups, Bf16State(groups.across), bf16_feedback_hook))
    sent, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, group=None, **kwargs):
        if group is groups.across:
            sent.append((tensor.numel(), tensor.dtype))
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = counting
    train(model, [torch.tensor(1.0)])
    return sent


def test_one_copy_for_each_host_crosses(run_fresh_ranks):
    results = run_fresh_ranks(count_what_crosses, 5, [0, 0, 1, 1, 1])
    assert [sent[0][1] for sent in results[:4]] == [torch.bfloat16] * 4
    assert results[0] == results[2]
    assert sum(sent[0][0] for sent in results[:2]) == 3 + 5 + 1
    assert results[4] == []


# ---- what goes wrong -----------------------------------------------------------------------------------------------


class Stumble(torch.autograd.Function):
    """Raises in backward, when told to."""

    stumbles = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Stumble.stumbles:
            raise KeyError("in backward")
        return grad


def fail_and_go_on(rank, world_size):
    """A backward pass that fails behind its first bucket leaves that on its way."""
    groups = groups_of(rank, [0, 1])
    first, last = nn.Linear(20, 30), nn.Linear(30, 10)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            return self.last(Stumble.apply(self.first(x)))

    model = phalanx.DistributedDataParallel(Net(), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, bridge_hook(groups, groups.across, default_hooks.allreduce_hook))
    train(model, [batch(rank, 0)], lr=0)
    Stumble.stumbles = True
    with pytest.raises(KeyError, match="in backward"):
        train(model, [batch(rank, 0)], lr=0)
    Stumble.stumbles = False
    again = train(model, [batch(rank, 1)], lr=0)
    plain = train(phalanx.DistributedDataParallel(Net()), [batch(rank, 1)], lr=0)
    return again, plain


def test_training_continues_after_an_error_in_backward(run_ranks):
    for again, plain in run_ranks(fail_and_go_on, 2, timeout_s=30):
        assert_close(again, plain)


def make_mistakes(rank, world_size):
    groups = groups_of(rank, [0, 1])
    for state in (None, dist.group.WORLD, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)):
        with pytest.raises(ValueError, match=r"the hook's state must average over groups\.across"):
            bridge_hook(groups, state, default_hooks.allreduce_hook)
    model = phalanx.DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    model.register_comm_hook(None, bridge_hook(groups, groups.across, default_hooks.allreduce_hook))
    with pytest.raises(ValueError, match=r"takes dense gradients, got a sparse one"):
        model(torch.tensor([1, 2])).sum().backward()


def test_mistakes_are_named(run_ranks):
    run_ranks(make_mistakes, 2)
