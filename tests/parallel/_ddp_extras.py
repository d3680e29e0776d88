"""Behaviours of DistributedDataParallel: grad_norm, communication hooks and join."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import phalanx
from tests.parallel._ddp_tools import (
    Net,
    assert_grads,
    assert_same_on_all_ranks,
    batch,
    behaviour,
    behaviour_of_several,
    grads_of,
    mean_grads,
    train_step,
    wrap,
)


@behaviour
def grad_norm_is_the_norm_of_all_gradients(rank, world_size):
    for module in (Net(), Net(spare=True), Net().double(), nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 3, 1))):
        model = wrap(module, find_unused_parameters=True)
        dtype = next(module.parameters()).dtype
        norms = []
        for _ in range(3):
            model.zero_grad()
            model(batch(rank).to(dtype)).square().sum().backward()
            norms += [model.grad_norm().float(), model.grad_norm().float()]
            want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            torch.testing.assert_close(norms[-1], want.float())
        torch.testing.assert_close(torch.stack(norms), norms[0].expand(6))
        assert_same_on_all_ranks(torch.stack(norms))


@behaviour
def grad_norm_of_no_gradients_is_zero(rank, world_size):
    assert wrap(Net()).grad_norm() == 0


@behaviour
def one_rank_alone_may_ask_for_grad_norm(rank, world_size):
    model = wrap(Net())
    for _ in range(3):
        train_step(model, rank)
        if rank == 1:
            want = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            torch.testing.assert_close(model.grad_norm(), want)


@behaviour
def torchs_communication_hooks_average(rank, world_size):
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = wrap(Net(spare=True), find_unused_parameters=True)
        model.register_comm_hook(None, hook)
        for number in range(3):
            train_step(model, rank, number)
            for (name, parameter), want in zip(
                model.module.named_parameters(), mean_grads(world_size, number, spare=True).values(), strict=True
            ):
                assert (parameter.grad is None) == (want is None), name
                if want is not None:
                    rounding = 5e-3 if hook is default_hooks.fp16_compress_hook else 1e-5
                    torch.testing.assert_close(parameter.grad, want, rtol=rounding, atol=5 * rounding)
            assert_same_on_all_ranks(*(p.grad for p in model.parameters() if p.grad is not None))


@behaviour
def power_sgd_trains_as_with_torchs_class(rank, world_size):
    grads = []
    for make in (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(3)
        model = make(Net())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for number in range(5):
            train_step(model, rank, number)
        grads.append(grads_of(model.module))
        assert_same_on_all_ranks(*(p.grad for p in model.parameters()))
    for name in grads[0]:
        assert grads[0][name].abs().sum() > 0
        torch.testing.assert_close(grads[0][name].norm(), grads[1][name].norm(), rtol=0.5, atol=0.5)


@behaviour
def a_hook_of_ones_own_sees_every_bucket(rank, world_size):
    seen = []

    def hook(state, bucket):
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: [2 * done.value()[0]])

    model = wrap(Net())
    model.register_comm_hook("state", hook)
    for _ in range(2):
        seen.clear()
        train_step(model, rank)
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert sum(count for _, _, count in seen) == len(list(model.parameters()))
        want = mean_grads(world_size, 0)
        assert_grads(model.module, {name: 2 * world_size * gradient for name, gradient in want.items()})
    with pytest.raises(RuntimeError, match="only be called once"):
        model.register_comm_hook("state", hook)
    with pytest.raises(TypeError, match="callable"):
        wrap(Net()).register_comm_hook(None, 3)


def train_unevenly(model, rank, world_size, **options):
    """Rank r has r + 1 batches."""
    with model.join(**options):
        for number in range(rank + 1):
            train_step(model, rank, number)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)


def train_unevenly_in_one_process(world_size, *, initial: bool):
    module = Net()
    for number in range(world_size):
        having = range(number, world_size)
        module.zero_grad()
        for rank in having:
            (module(batch(rank, number)).square().sum() / (world_size if initial else len(having))).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
    return module


@behaviour
def join_shadows_ranks_that_ran_out_of_data(rank, world_size):
    for initial in (True, False):
        model = wrap(Net())
        train_unevenly(model, rank, world_size, divide_by_initial_world_size=initial)
        want = train_unevenly_in_one_process(world_size, initial=initial)
        for got, other in zip(model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)
        assert_same_on_all_ranks(*model.parameters())
        with torch.no_grad():  # and then as before
            for parameter, other in zip(model.parameters(), Net().parameters(), strict=True):
                parameter.copy_(other)
        for _ in range(2):
            train_step(model, rank)
            assert_grads(model.module, mean_grads(world_size, 0))


@behaviour
def join_equals_torchs_with_buffers_and_accumulation(rank, world_size):
    group = dist.new_group(backend="gloo")  # torch's class wants a future that phalanx's works do not have in C++
    states = []
    for make in (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = make(Net(norm=True), process_group=group)
        with model.join(divide_by_initial_world_size=False):
            for number in range(2 + rank):
                with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                    model(batch(rank, number)).square().sum().backward()
                if number % 2:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.sub_(parameter.grad, alpha=0.01)
                    model.zero_grad()
        states.append(model.state_dict())
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5, msg=lambda t, n=name: n + t)
    assert_same_on_all_ranks(*(tensor.float() for tensor in states[0].values()))


@behaviour
def join_with_unused_parameters_and_a_hook(rank, world_size):
    model = wrap(Net(spare=True), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train_unevenly_with_unused(model, rank)
    assert model.module.spare.weight.grad is None
    assert_same_on_all_ranks(*model.parameters())


def train_unevenly_with_unused(model, rank):
    with model.join():
        for number in range(1 + rank):
            train_step(model, rank, number, more=number == 0)


@behaviour_of_several
def join_divides_sparse_gradients_by_the_ranks_that_have_data(rank, world_size):
    for hook in (None, default_hooks.allreduce_hook):
        model = wrap(nn.Embedding(4, 3, sparse=True))
        if hook is not None:
            model.register_comm_hook(None, hook)
        with model.join(divide_by_initial_world_size=False):
            for _ in range(rank + 1):
                model.zero_grad()
                model(torch.tensor([2])).sum().backward()
                gradient = model.module.weight.grad.to_dense()
        assert gradient.tolist() == [[0.0] * 3, [0.0] * 3, pytest.approx([1.0] * 3), [0.0] * 3]


@behaviour_of_several
def join_can_end_all_ranks_early(rank, world_size):
    model = wrap(Net())
    num_steps = 0
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        for number in range(2 + rank):
            train_step(model, rank, number)
            num_steps += 1
    assert num_steps == 2
    train_step(model, rank)
    assert_grads(model.module, mean_grads(world_size, 0))


@behaviour
def a_hook_that_returns_something_else_is_an_error(rank, world_size):
    def done(value):
        future = torch.futures.Future()
        future.set_result(value)
        return future

    for returned, message in (
        (lambda bucket: None, "the communication hook returned None"),
        (lambda bucket: bucket.buffer(), "returned a tensor of shape"),
        (lambda bucket: done(None), "holds None"),
        (lambda bucket: done(bucket.buffer()[:1]), r"made a tensor of shape \[1\]"),
    ):
        model = wrap(Net())
        model.register_comm_hook(returned, lambda state, bucket: state(bucket))
        with pytest.raises((TypeError, ValueError), match=message):
            model(batch(rank)).sum().backward()
    model = wrap(Net())
    model.register_comm_hook(None, lambda state, bucket: done(torch.ones(1, bucket.buffer().numel())))
    model(batch(rank)).sum().backward()
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
