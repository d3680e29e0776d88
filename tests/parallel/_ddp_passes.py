"""Behaviours of DistributedDataParallel: which backward passes are averaged, and which parameters."""

from __future__ import annotations

import contextlib
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel import _ddp_tools
from tests.parallel._ddp_tools import (
    Net,
    assert_grads,
    assert_same_on_all_ranks,
    batch,
    behaviour,
    grads_of,
    mean_grads,
    train_step,
    wrap,
)


@behaviour
def no_sync_accumulates_what_the_next_pass_averages(rank, world_size):
    model = wrap(Net())
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(batch(rank, 0)).square().sum().backward()
            model(batch(rank, 1)).square().sum().backward()
        model(batch(rank, 2)).square().sum().backward()
        assert_grads(model.module, mean_grads(world_size, 0, 1, 2))


@behaviour
def no_sync_does_not_communicate(rank, world_size):
    model = wrap(Net())
    train_step(model, rank)
    if rank == 0:
        with model.no_sync():
            for number in range(3):
                train_step(model, rank, number)
        own = grads_of(model.module)
        alone = Net()
        train_step(alone, rank, 2)
        for name, gradient in grads_of(alone).items():
            assert torch.equal(own[name], gradient), name
    dist.barrier()
    train_step(model, rank, 1)
    assert_grads(model.module, mean_grads(world_size, 1))


@behaviour
def a_parameter_that_only_no_sync_reached_is_averaged(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            model(batch(rank, 0), more=rank == 0).square().sum().backward()
        model(batch(rank, 1), more=False).square().sum().backward()
        module = Net()
        for r in range(world_size):
            (module(batch(r, 0), more=r == 0).square().sum() / world_size).backward()
            (module(batch(r, 1), more=False).square().sum() / world_size).backward()
        assert_grads(model.module, grads_of(module))


@behaviour
def freezing_between_accumulated_passes_keeps_what_was_accumulated(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    model.module.first.requires_grad_(False)
    model(batch(rank, 1), more=False).square().sum().backward()
    want = mean_grads(world_size, 0)
    got = grads_of(model.module)
    torch.testing.assert_close(got["more.weight"], want["more.weight"], rtol=1e-4, atol=1e-5)


def filled_grads_of(module):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


@behaviour
def what_a_frozen_parameter_has_accumulated_is_averaged_once(rank, world_size):
    """Whatever is frozen after no_sync, and on however few ranks it has a gradient, replicas stay alike."""
    for as_view in (True, False):
        for some in (True, False):  # one rank alone has accumulated a gradient of `more`
            model = wrap(Net(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
            train_step(model, rank)
            model.zero_grad()
            with model.no_sync():
                model(batch(rank, 0), more=some or rank == 0).square().sum().backward()
            frozen = [*model.module.first.parameters(), *model.module.more.parameters()]
            for parameter in frozen:
                parameter.requires_grad_(False)
            for _ in range(2):  # averaged in the first pass, and left alone in the second
                model(batch(rank, 1), more=False).square().sum().backward()
                assert_same_on_all_ranks(*filled_grads_of(model.module))
                module = Net()
                for r in range(world_size):
                    (module(batch(r, 0), more=some or r == 0).square().sum() / world_size).backward()
                want = grads_of(module)
                for name, gradient in grads_of(model.module).items():
                    if name.startswith(("first", "more")):
                        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=1e-5)
            for parameter in frozen:
                parameter.requires_grad_(True)
            train_step(model, rank)
            assert_grads(model.module, mean_grads(world_size, 0))


@behaviour
def gradients_are_alike_however_parameters_are_frozen_dropped_and_accumulated(rank, world_size):
    """Random plans, the same on all ranks: what is trained in each pass, which passes average, what is dropped."""
    for seed in range(6):
        draw = random.Random(seed)
        model = wrap(Net(), find_unused_parameters=True, gradient_as_bucket_view=draw.random() < 0.5)
        layers = list(model.module.children())
        for number in range(8):
            for layer in layers[1:]:
                layer.requires_grad_(draw.random() < 0.6)
            averages = number % 4 == 3 or draw.random() < 0.4
            more = draw.random() < 0.7 or rank == number % world_size
            with contextlib.nullcontext() if averages else model.no_sync():
                model(batch(rank, number), more=more).square().sum().backward()
            if averages:
                assert_same_on_all_ranks(*filled_grads_of(model.module))
                if draw.random() < 0.5:
                    model.zero_grad(set_to_none=draw.random() < 0.5)
            elif draw.random() < 0.2:
                layers[draw.randrange(len(layers))].zero_grad()


@behaviour
def a_rank_without_data_follows_the_freezing_of_the_others(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    with model.join():
        for number in range(3 if rank == 0 else 1):
            if number == 1:
                model.module.first.requires_grad_(False)
            train_step(model, rank, number)
        model.module.first.requires_grad_(False)
    assert_same_on_all_ranks(*model.module.parameters())


@behaviour
def accumulated_gradients_that_were_dropped_do_not_count(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    with model.no_sync():
        train_step(model, rank)
    for _ in range(2):
        train_step(model, rank, more=False)
        assert_grads(model.module, mean_grads(world_size, 0, more=False))


@behaviour
def several_forward_passes_may_share_one_backward(rank, world_size):
    model = wrap(Net())
    for _ in range(3):
        model.zero_grad()
        sum(model(batch(rank, number)).square().sum() for number in range(3)).backward()
        assert_grads(model.module, mean_grads(world_size, 0, 1, 2))


@behaviour
def each_of_several_backward_passes_is_averaged(rank, world_size):
    model = wrap(Net())
    for _ in range(3):
        model.zero_grad()
        for loss in [model(batch(rank, number)).square().sum() for number in range(3)]:
            loss.backward()
        assert_grads(model.module, mean_grads(world_size, 0, 1, 2))


@behaviour
def a_retained_graph_may_be_run_again(rank, world_size):
    model = wrap(Net())
    for _ in range(2):
        model.zero_grad()
        loss = model(batch(rank)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_grads(model.module, mean_grads(world_size, 0, 0, 0))


@behaviour
def gradients_that_are_zeroed_not_dropped_are_right_too(rank, world_size):
    for as_view in (True, False):
        model = wrap(Net(), gradient_as_bucket_view=as_view)
        for number in range(3):
            model.zero_grad(set_to_none=False)
            model(batch(rank, number)).square().sum().backward()
            assert_grads(model.module, mean_grads(world_size, number))


class Failing(torch.autograd.Function):
    """Raises in backward when told to."""

    fails = True

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Failing.fails:
            raise ArithmeticError("told to fail")
        return gradient


@behaviour
def training_goes_on_after_a_backward_pass_that_raised(rank, world_size):
    model = wrap(Net())
    model.module.norm.forward = Failing.apply
    for number in range(6):
        Failing.fails = number % 2 == 1
        model.zero_grad()
        loss = model(batch(rank, number)).square().sum()
        if Failing.fails:
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            loss.backward()
            assert_grads(model.module, mean_grads(world_size, number))


@behaviour
def an_unused_parameter_stays_none_after_a_backward_pass_that_raised(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    model.module.norm.forward = Failing.apply
    Failing.fails = True
    with pytest.raises(ArithmeticError):
        train_step(model, rank)
    Failing.fails = False
    for _ in range(2):
        train_step(model, rank, more=False)
        assert_grads(model.module, mean_grads(world_size, 0, more=False))


@behaviour
def autograd_grad_does_not_communicate(rank, world_size):
    model = wrap(Net())
    train_step(model, rank)
    if rank == 0:
        for wanted in ("input", "parameters", "one parameter"):
            x = batch(rank).requires_grad_()
            of = {"input": [x], "parameters": list(model.parameters()), "one parameter": [model.module.more.bias]}
            torch.autograd.grad(model(x).square().sum(), of[wanted])
            with model.no_sync():
                train_step(model, rank)
    dist.barrier()
    train_step(model, rank, 1)
    assert_grads(model.module, mean_grads(world_size, 1))


@behaviour
def a_penalty_on_the_inputs_gradient_is_averaged(rank, world_size):
    def penalty(model, x):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    model = wrap(Net())
    for _ in range(2):
        model.zero_grad()
        penalty(model, batch(rank)).backward()
        module = Net()
        for r in range(world_size):
            (penalty(module, batch(r)) / world_size).backward()
        assert_grads(model.module, grads_of(module))


@behaviour
def backward_for_some_parameters_averages_those(rank, world_size):
    model = wrap(Net(), find_unused_parameters=True)
    some = ["last.weight", "more.bias"]
    for _ in range(2):
        model.zero_grad()
        model(batch(rank)).square().sum().backward(inputs=[model.module.get_parameter(name) for name in some])
        want = mean_grads(world_size, 0)
        assert_grads(model.module, {name: grad if name in some else None for name, grad in want.items()})


@behaviour
def two_models_may_share_a_backward_pass(rank, world_size):
    one, other = wrap(Net()), wrap(Net())
    for _ in range(3):
        one.zero_grad()
        other.zero_grad()
        (one(batch(rank)).square().sum() + other(batch(rank, 1)).square().sum()).backward()
        assert_grads(one.module, mean_grads(world_size, 0))
        assert_grads(other.module, mean_grads(world_size, 1))


@behaviour
def frozen_parameters_are_left_alone(rank, world_size):
    model = wrap(Net())
    model.module.first.requires_grad_(False)
    for _ in range(2):
        train_step(model, rank)
        want = mean_grads(world_size, 0)
        assert_grads(model.module, {n: None if n.startswith("first") else gradient for n, gradient in want.items()})
    model.module.first.requires_grad_(True)
    train_step(model, rank)
    assert_grads(model.module, mean_grads(world_size, 0))


@behaviour
def torch_compile_of_the_wrapped_model_trains(rank, world_size):
    model = wrap(Net())
    costly = dist.get_backend() == "phalanx" and world_size == 2  # takes seconds to import
    compiled = torch.compile(model, backend="aot_eager" if costly else "eager")
    for number in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about itself
            compiled(batch(rank, number)).square().sum().backward()
        assert_grads(model.module, mean_grads(world_size, number))


@behaviour
def unused_parameters_are_named_once(rank, world_size):
    model = wrap(Net(spare=True))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(3):
            train_step(model, rank, number)
    assert len(warned) == 1
    assert_same_on_all_ranks(torch.tensor(list(str(warned[0].message).encode()), dtype=torch.uint8))
    assert "spare.weight" in str(warned[0].message)
    assert "find_unused_parameters=True" in str(warned[0].message)
    assert warned[0].filename == _ddp_tools.__file__, "the line that calls backward()"
    assert "first" not in str(warned[0].message)
    assert_grads(model.module, mean_grads(world_size, 2, spare=True))


@behaviour
def parameters_that_came_after_wrapping_are_named_once(rank, world_size):
    net = Net()
    net.inner = nn.Sequential(nn.Linear(4, 4))
    model = wrap(net, find_unused_parameters=True)
    train_step(model, rank)
    nn.Linear(4, 4).extra = nn.Linear(1, 1)  # of no wrapped model
    net.inner.append(nn.Linear(4, 4))
    net.inner.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    net.more.bias = nn.Parameter(torch.zeros_like(net.more.bias))  # in the place of another
    net.absent = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(batch(rank))
        for number in range(2):
            train_step(model, rank, number)
        net.inner[1].scale = nn.Parameter(torch.ones(1))  # to one that came late itself
        train_step(model, rank)
    names = ["'more.bias', 'inner.1.weight', 'inner.1.bias'", "'inner.1.scale'"] if world_size > 1 else []
    assert [str(warning.message).partition(" are not averaged")[0] for warning in warned] == [
        f"DistributedDataParallel: gradients of {of_step}" for of_step in names
    ]
    assert all(warning.filename == _ddp_tools.__file__ for warning in warned), "the line that calls the model"


@behaviour
def an_unused_parameter_is_named_when_it_is_first_left_out(rank, world_size):
    model = wrap(Net(spare=True))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(4):
            train_step(model, rank, number, more=number < 2)
    first, later = (str(one.message) for one in warned)
    assert "spare.weight" in first
    assert "more." not in first
    assert "more.weight" in later
    assert "spare." not in later


@behaviour
def expected_unused_parameters_are_not_named(rank, world_size):
    model = wrap(Net(spare=True), find_unused_parameters=True)
    for number in range(3):
        train_step(model, rank, number)  # warnings are errors
    assert_grads(model.module, mean_grads(world_size, 2, spare=True))


@behaviour
def a_gradient_that_one_rank_has_always_reaches_the_others(rank, world_size):
    # So often that a mark of use which is averaged again at each step would be 0 in float16.
    model = wrap(Net().half(), find_unused_parameters=True)
    for _ in range(30):
        model.zero_grad()
        model(batch(rank).half(), more=rank == 0).square().sum().backward()
        assert model.module.more.weight.grad is not None
        assert_same_on_all_ranks(*(p.grad for p in model.parameters()))
