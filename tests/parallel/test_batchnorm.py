"""SyncBatchNorm on a CPU equals one BatchNorm on the batch of all ranks."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx

pytestmark = pytest.mark.kept_ranks

NUM_CHANNELS = 3
PLAIN = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]  # by number of dimensions after N and C
NUM_STEPS = 3

# Relative and absolute: rounding in the compute type, then to the type of the output.
CLOSE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def batch(step, sizes, spatial, dtype=torch.float64):
    """Return the whole batch of a step and the gradient of its output, far from mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(sizes), NUM_CHANNELS, *spatial)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = torch.arange(1, NUM_CHANNELS + 1).view(1, -1, *[1] * len(spatial))
    return (2.0 * scale * x + 10.0 * scale).to(dtype), grad.to(dtype)


def give_weights(norm):
    """Let the affine parameters be other than 1 and 0."""
    lowest = {"weight": 0.5, "bias": -1.0}
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(torch.linspace(lowest[name], 2.0, NUM_CHANNELS))
    return norm


def step_through(norm, parts):
    """Forward and backward through each part; return outputs, gradients of the inputs, and the state it leaves."""
    outputs, input_grads = [], []
    for x, grad in parts:
        x = x.clone().requires_grad_()
        y = norm(x)
        y.backward(grad)
        outputs.append(y.detach())
        input_grads.append(x.grad)
    grads = {name: parameter.grad for name, parameter in norm.named_parameters()}
    return outputs, input_grads, grads, dict(norm.state_dict())


@dataclasses.dataclass
class Case:
    """A layer to normalize with, and the batches of all ranks: `sizes` are those of each rank."""

    sizes: list[int]
    spatial: tuple[int, ...] = (4, 5)
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def batches(self):
        return [batch(self.seed + step, self.sizes, self.spatial, self.dtype) for step in range(NUM_STEPS)]


def normalize(rank, world_size, cases, group_size=None):
    """Normalize this rank's part of each case's batches; if ranks form groups, each has batches of its own."""
    group, _ = dist.new_subgroups(group_size) if group_size else (None, None)
    results = []
    for case in cases:
        case = of_group(case, rank // group_size) if group_size else case
        norm = phalanx.SyncBatchNorm(NUM_CHANNELS, process_group=group, **case.options)
        norm = give_weights(norm.double() if case.dtype == torch.float64 else norm)
        place = dist.get_rank(group)
        own = slice(sum(case.sizes[:place]), sum(case.sizes[: place + 1]))
        results.append(step_through(norm, [(x[own], grad[own]) for x, grad in case.batches()]))
    return results


def of_group(case, number):
    return dataclasses.replace(case, seed=100 * number)


def check_against_whole(case, results):
    """Compare what the ranks have together with one BatchNorm in float64 on the same numbers."""
    plain = give_weights(PLAIN[len(case.spatial)](NUM_CHANNELS, **case.options).double())
    outputs, input_grads, grads, state = step_through(
        plain, [(x.double(), grad.double()) for x, grad in case.batches()]
    )

    def check(got, want, what):
        torch.testing.assert_close(got.double(), want, **CLOSE[case.dtype], msg=lambda text: f"{case}, {what}: {text}")

    for step in range(NUM_STEPS):
        for name, place, want in (("output", 0, outputs), ("input's gradient", 1, input_grads)):
            got = [result[place][step] for result in results]
            assert all(part.dtype == case.dtype for part in got)
            assert [len(part) for part in got] == case.sizes
            check(torch.cat(got), want[step], f"{name} of step {step}")
    for name, want in grads.items():
        check(sum(result[2][name] for result in results), want, f"{name}'s gradient")
    for rank, result in enumerate(results):
        assert result[3].keys() == state.keys()
        for name, want in state.items():
            check(result[3][name], want.double(), f"{name} of rank {rank}")
            assert torch.equal(result[3][name], results[0][3][name]), f"{case}: {name} differs on rank {rank}"


def check_each(run_ranks, world_size, cases):
    for case, *results in zip(cases, *run_ranks(normalize, world_size, cases), strict=True):
        check_against_whole(case, results)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_equals_one_batchnorm_on_the_whole_batch(run_ranks, world_size):
    shapes = [(), (5,), (4, 5), (2, 3, 2)]  # (N, C), (N, C, L), images, volumes
    check_each(run_ranks, world_size, [Case([4] * world_size, spatial) for spatial in shapes])


@pytest.mark.parametrize("sizes", [[1, 6], [5, 0], [0, 7, 2], [0, 0, 2], [1, 1, 1, 1]], ids=str)
def test_the_ranks_parts_may_be_unequal_and_empty(run_ranks, sizes):
    check_each(run_ranks, len(sizes), [Case(sizes)])


def test_one_value_on_each_rank_is_enough(run_ranks):
    check_each(run_ranks, 2, [Case([1, 1], ())])


def test_lower_precision_differs_by_rounding_only(run_ranks):
    check_each(run_ranks, 2, [Case([5, 3], dtype=dtype) for dtype in (torch.float32, torch.bfloat16)])


def test_options_mean_what_they_mean_for_batchnorm(run_ranks):
    options = [
        {"momentum": None},
        {"momentum": 1.0},
        {"momentum": 0.0},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 1.0},
    ]
    if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in every torch
        options.append({"bias": False})
    check_each(run_ranks, 2, [Case([2, 3], options=option) for option in options])


def test_each_process_group_normalizes_its_own_batch(run_ranks):
    case = Case([2, 3])
    results = run_ranks(normalize, 4, [case], 2)
    for number in (0, 1):
        check_against_whole(of_group(case, number), [result[0] for result in results[2 * number : 2 * number + 2]])


def far_from_zero(rank, world_size):
    """Return the relative error of the variance of float32 values with a mean 10,000 times their deviation."""
    generator = torch.Generator().manual_seed(rank)
    x = 1e4 + torch.randn(2000, 1, generator=generator)
    every = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(every, x)
    norm = phalanx.SyncBatchNorm(1, momentum=1.0)
    norm(x)
    want = torch.cat(every).double().var()
    return abs(norm.running_var.item() / want.item() - 1)


def test_a_mean_far_from_zero_costs_no_accuracy(run_ranks):
    assert max(run_ranks(far_from_zero, 2)) < 1e-3  # E[x^2] - E[x]^2 would be off by more than the variance


def in_eval_mode(rank, world_size):
    """Return whether eval mode is that of BatchNorm and leaves the state alone, with and without statistics."""
    x = batch(rank, [4], ())[0]
    same = []
    for tracks in (True, False):
        norm = phalanx.SyncBatchNorm(NUM_CHANNELS, track_running_stats=tracks).double()
        plain = nn.BatchNorm1d(NUM_CHANNELS, track_running_stats=tracks).double()
        norm(x)
        plain.load_state_dict(norm.state_dict())
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        # On one rank alone: no collective may run here.
        same.append(rank > 0 or torch.equal(norm.eval()(x), plain.eval()(x)))
        same += [torch.equal(value, before[name]) for name, value in norm.state_dict().items()]
    return same


def test_eval_mode_is_batchnorms_and_needs_no_other_rank(run_ranks):
    for same in run_ranks(in_eval_mode, 2):
        assert len(same) >= 2 + 5  # outputs, and parameters and buffers
        assert all(same)


def without_input_gradient(rank, world_size):
    """The first layer of a model: nobody asks for its input's gradient."""
    x, grad = batch(0, [2] * world_size, ())
    norm = give_weights(phalanx.SyncBatchNorm(NUM_CHANNELS).double())
    norm(x.split(2)[rank]).backward(grad.split(2)[rank])
    frozen = give_weights(phalanx.SyncBatchNorm(NUM_CHANNELS).double()).requires_grad_(False)
    x = x.split(2)[rank].clone().requires_grad_()
    frozen(x).backward(grad.split(2)[rank])
    return norm.weight.grad, norm.bias.grad, x.grad, frozen.weight.grad


def test_only_the_gradients_that_are_asked_for_are_made(run_ranks):
    results = run_ranks(without_input_gradient, 2)
    x, grad = batch(0, [2, 2], ())
    x.requires_grad_()
    plain = give_weights(nn.BatchNorm1d(NUM_CHANNELS).double())
    plain(x).backward(grad)
    torch.testing.assert_close(sum(result[0] for result in results), plain.weight.grad)
    torch.testing.assert_close(sum(result[1] for result in results), plain.bias.grad)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), x.grad)
    assert all(result[3] is None for result in results)


def with_another_layout(rank, world_size, memory_format):
    x, grad = (tensor[2 * rank : 2 * rank + 2] for tensor in batch(0, [2] * world_size, (4, 5)))
    norm = give_weights(phalanx.SyncBatchNorm(NUM_CHANNELS).double())
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    y = norm(x)
    y.backward(grad)
    # A view with gaps in memory, and a gradient that is one number expanded.
    gaps = x.detach().repeat_interleave(2, 0)[::2].requires_grad_()
    z = norm(gaps)
    z.sum().backward()
    return y.detach(), x.grad, torch.equal(z, y), gaps.grad.abs().max().item()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_any_memory_layout_gives_the_same(run_ranks, memory_format):
    results = run_ranks(with_another_layout, 2, memory_format)
    x, grad = batch(0, [2, 2], (4, 5))
    x.requires_grad_()
    y = give_weights(nn.BatchNorm2d(NUM_CHANNELS).double())(x)
    y.backward(grad)
    torch.testing.assert_close(torch.cat([result[0] for result in results]), y.detach())
    torch.testing.assert_close(torch.cat([result[1] for result in results]), x.grad)
    for _, _, same, largest in results:
        assert same
        assert largest < 1e-12  # all outputs shifted alike: no input could do that


def with_too_few_values(rank, world_size, sizes):
    norm = phalanx.SyncBatchNorm(NUM_CHANNELS)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        norm(torch.ones(sizes[rank], NUM_CHANNELS))
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is still good
    return str(caught.value), int(norm.num_batches_tracked), total.item()


@pytest.mark.parametrize("sizes", [[1, 0], [0, 0]])
def test_fewer_than_two_values_raise_on_every_rank(run_ranks, sizes):
    for rank, (message, num_tracked, total) in enumerate(run_ranks(with_too_few_values, 2, sizes)):
        assert f"rank {rank}:" in message
        assert f"got {sum(sizes)};" in message
        assert num_tracked == 0
        assert total == 2


def with_wrong_shapes(rank, world_size):
    norm = phalanx.SyncBatchNorm(NUM_CHANNELS)
    with pytest.raises(ValueError, match="at least 2D"):
        norm(torch.ones(NUM_CHANNELS))
    with pytest.raises(ValueError, match="non-zero"):
        phalanx.SyncBatchNorm(0)(torch.ones(4, 0))


def test_an_input_without_a_batch_is_refused(run_ranks):
    run_ranks(with_wrong_shapes, 2)


def test_without_a_process_group_it_is_batchnorm():
    x, grad = batch(0, [6], ())
    norms = [give_weights(kind(NUM_CHANNELS).double()) for kind in (phalanx.SyncBatchNorm, nn.BatchNorm1d)]
    (ours, our_grad, *_), (theirs, their_grad, *_) = (step_through(norm, [(x, grad)]) for norm in norms)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(our_grad[0], their_grad[0])


class Net(nn.Module):
    """Batch norms of several kinds, one of them used under two names."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.norm = nn.BatchNorm2d(4, eps=1e-3, momentum=None, track_running_stats=True)
        self.head = nn.ModuleDict({"fc": nn.Linear(4 * 9, 5), "norm": nn.BatchNorm1d(5, affine=False)})

    def forward(self, x):
        x = self.norm(self.features(x)).flatten(1)
        return self.head["norm"](self.head["fc"](x))


def test_conversion_keeps_parameters_buffers_options_and_mode():
    model = Net()
    model.norm.eval()
    model.features[1].weight.requires_grad_(False)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    converted = phalanx.convert_sync_batchnorm(model)
    after = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert converted is model
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())
    norms = [model.features[1], model.norm, model.head["norm"]]
    assert [type(norm) for norm in norms] == [phalanx.SyncBatchNorm] * 3
    assert [norm.training for norm in norms] == [True, False, True]
    assert (model.norm.eps, model.norm.momentum, model.head["norm"].affine) == (1e-3, None, False)
    assert not model.features[1].weight.requires_grad


@pytest.mark.parametrize("convert", [phalanx.convert_sync_batchnorm, phalanx.SyncBatchNorm.convert_sync_batchnorm])
def test_conversion_replaces_a_lone_layer_and_torchs_own(convert):
    assert type(convert(nn.BatchNorm1d(2))) is phalanx.SyncBatchNorm
    model = convert(nn.Sequential(nn.SyncBatchNorm(2), nn.InstanceNorm1d(2)))
    assert [type(layer) for layer in model] == [phalanx.SyncBatchNorm, nn.InstanceNorm1d]
    assert convert(model[0]) is model[0]


def test_a_layer_under_two_names_stays_one_layer():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm, nn.Sequential(norm))
    converted = phalanx.convert_sync_batchnorm(model)
    assert type(converted[0]) is phalanx.SyncBatchNorm
    assert converted[2] is converted[0]
    assert converted[3][0] is converted[0]


def test_conversion_hands_on_the_process_group(run_ranks):
    run_ranks(convert_for_a_group, 2)


def convert_for_a_group(rank, world_size):
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    model = phalanx.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), alone)
    assert model[0].process_group is alone
    # torch's own layer, converted without naming a group, keeps the one that it has.
    model = phalanx.convert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(2, process_group=alone)))
    assert model[0].process_group is alone


def train(model, batches, scale):
    """Take a few steps of gradient descent on the sum of squares, times `scale`; return the state."""
    for x, target in batches:
        model.zero_grad()
        (((model(x) - target) ** 2).sum() * scale).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def images(num):
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(num, 1, 7, 7, generator=generator, dtype=torch.float64),
            torch.randn(num, 5, generator=generator, dtype=torch.float64),
        )
        for _ in range(NUM_STEPS)
    ]


def train_on_ranks(rank, world_size, sizes, kind):
    torch.manual_seed(rank)
    model = kind(phalanx.convert_sync_batchnorm(Net().double()))
    model.module.load_state_dict(initial_state())
    parts = [(x.split(sizes)[rank], target.split(sizes)[rank]) for x, target in images(sum(sizes))]
    return train(model, parts, world_size / sum(sizes))  # the mean over ranks is then the mean over samples


def initial_state():
    torch.manual_seed(11)
    return Net().double().state_dict()


@pytest.mark.parametrize(
    ("sizes", "kind", "backend"),
    [
        ([4, 4], phalanx.DistributedDataParallel, "phalanx"),
        ([1, 5], phalanx.DistributedDataParallel, "phalanx"),
        ([3, 0, 4], phalanx.DistributedDataParallel, "phalanx"),
        ([1, 5], nn.parallel.DistributedDataParallel, "phalanx"),
        ([4, 4], nn.parallel.DistributedDataParallel, "gloo"),
    ],
)
def test_training_under_ddp_equals_one_process_on_the_whole_batch(run_ranks, sizes, kind, backend):
    alone = Net().double()
    alone.load_state_dict(initial_state())
    want = train(alone, images(sum(sizes)), 1 / sum(sizes))
    for rank, state in enumerate(run_ranks(train_on_ranks, len(sizes), sizes, kind, backend=backend)):
        assert state.keys() == want.keys()
        for name, value in want.items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-9), f"rank {rank}: {name}"
