"""Behaviours of DistributedDataParallel: how it treats a module and its options."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.parallel._ddp_tools import (
    Net,
    assert_grads,
    assert_same_on_all_ranks,
    batch,
    behaviour,
    behaviour_of_several,
    mean_grads,
    train_step,
    wrap,
)


def different_models(rank):
    yield "a shape", nn.Linear(4, 3 + rank), "[3, 4]"
    yield "a name", nn.ModuleDict({f"layer{min(rank, 1)}": nn.Linear(2, 2)}), "layer0.weight"
    yield "the number of parameters", nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + (rank == 1))]), "no further"
    yield "a dtype", nn.Linear(2, 2).to(torch.float64 if rank else torch.float32), "float64"
    yield "what is frozen", nn.Linear(2, 2, bias=False).requires_grad_(rank == 0), "frozen"
    yield "a buffer", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=rank == 0)), "1.running_mean"


@behaviour_of_several
def models_that_differ_are_the_same_error_on_every_rank(rank, world_size):
    for what, module, part in different_models(rank):
        with pytest.raises(ValueError, match="differs between ranks") as caught:
            wrap(module)
        message = str(caught.value)
        assert message.startswith(f"rank {rank}: "), what
        assert part in message, f"{what}: {message}"
        every = [None] * world_size
        dist.all_gather_object(every, message.partition(":")[2])
        assert len(set(every)) == 1, f"{what}: {every}"


@behaviour
def parameters_and_buffers_become_those_of_rank_0(rank, world_size):
    module = Net(norm=True)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(rank)
    wrap(module)
    for got, want in zip(module.state_dict().values(), Net(norm=True).state_dict().values(), strict=True):
        assert torch.equal(got, want)


@behaviour_of_several
def buffers_may_be_copied_once_and_then_differ(rank, world_size):
    module = Net(norm=True)
    module.norm.running_var.add_(rank)
    model = wrap(module, forward_sync_buffers=False)
    assert_same_on_all_ranks(module.norm.running_var)
    with model.join():
        for number in range(2):
            train_step(model, rank, number)
    own = module.norm.running_mean
    every = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(every, own)
    assert not torch.equal(every[0], every[1])
    assert wrap(Net(), forward_sync_buffers=True).broadcast_buffers


@behaviour
def without_init_sync_each_rank_keeps_its_own(rank, world_size):
    module = Net()
    with torch.no_grad():
        module.first.bias.fill_(rank)
    wrap(module, init_sync=False)
    assert module.first.bias.eq(rank).all()


@behaviour_of_several
def buffers_are_broadcast_from_rank_0(rank, world_size):
    model = wrap(Net(norm=True))
    for number in range(3):
        train_step(model, rank, number)
        own = model.module.norm.running_mean.clone()
        model.module.norm.eval()
        model(batch(rank))
        model.module.norm.train()
        dist.broadcast(own, 0)
        assert torch.equal(model.module.norm.running_mean, own)
    model = wrap(Net(norm=True), broadcast_buffers=False)
    train_step(model, rank)
    own = model.module.norm.running_mean.clone()
    train_step(model, rank)
    assert not torch.equal(own, model.module.norm.running_mean)
    every = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(every, own)
    assert not torch.equal(every[0], every[1])


@behaviour
def ranks_may_evaluate_different_numbers_of_batches(rank, world_size):
    model = wrap(Net(norm=True))
    for number in range(2):
        train_step(model, rank, number)
        model.eval()
        with torch.no_grad():
            for _ in range(1 + 2 * rank):
                model(batch(rank))
        model.train()
    dist.barrier()
    train_step(model, rank)


@behaviour
def a_model_that_trains_nothing_is_an_error(rank, world_size):
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match="no parameter of the module requires a gradient"):
            wrap(module)


@behaviour
def devices_that_do_not_fit_are_an_error(rank, world_size):
    for device_ids in ([0], [0, 1], ["cpu"]):
        with pytest.raises(ValueError, match="device_ids must name the one GPU"):
            wrap(Net(), device_ids=device_ids)


@behaviour
def options_of_torch_that_are_not_supported_are_an_error(rank, world_size):
    with pytest.raises(ValueError, match="mixed_precision is not supported"):
        wrap(Net(), mixed_precision=object())
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
        wrap(Net(), bucket_cap=3)
    wrap(Net(), mixed_precision=None, delay_all_reduce_named_params=None)


@behaviour
def an_optimizer_within_backward_is_an_error(rank, world_size):
    module = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="a parameter has an optimizer that steps within backward"):
        wrap(module)


@behaviour_of_several
def a_subgroup_trains_among_itself(rank, world_size):
    group = dist.new_group([0, 1])
    if rank < 2:
        model = wrap(Net(), process_group=group)
        for _ in range(2):
            train_step(model, rank)
            assert_grads(model.module, mean_grads(2, 0))
    dist.barrier()


@behaviour_of_several
def ignored_parameters_are_left_alone(rank, world_size):
    module = Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["last.bias"])
    with torch.no_grad():
        module.last.bias.fill_(rank)
    model = wrap(module)
    assert module.last.bias.eq(rank).all()
    for _ in range(2):
        train_step(model, rank)
        mine = module.last.bias.grad.clone()
        every = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(every, mine)
        assert not torch.equal(every[0], every[1])
        assert_same_on_all_ranks(module.last.weight.grad)
