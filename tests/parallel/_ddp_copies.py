"""Behaviours of DistributedDataParallel: state dictionaries, copies, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import torch
import torch.distributed as dist
from torch import nn

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
def states_load_into_torchs_class_and_back(rank, world_size):
    ours, theirs = wrap(Net(norm=True)), nn.parallel.DistributedDataParallel(Net(norm=True))
    train_step(ours, rank)
    with torch.no_grad():
        ours.module.first.weight.add_(1)
    theirs.load_state_dict(ours.state_dict())
    again = wrap(Net(norm=True))
    again.load_state_dict(theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        assert name.startswith("module.")
        assert torch.equal(tensor, again.state_dict()[name])


@behaviour
def copies_train_on_their_own(rank, world_size):
    model = wrap(Net())
    train_step(model, rank)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        before = grads_of(model.module)
        for number in range(1, 3):
            train_step(other, rank, number)
            assert_grads(other.module, mean_grads(world_size, number))
        for name, gradient in grads_of(model.module).items():
            assert torch.equal(gradient, before[name])
    train_step(model, rank, 3)
    assert_grads(model.module, mean_grads(world_size, 3))


@behaviour
def one_rank_alone_may_copy_the_model(rank, world_size):
    model = wrap(Net())
    train_step(model, rank)
    if rank == 0:
        copy.deepcopy(model)
    dist.barrier()
    train_step(model, rank)


@behaviour
def two_runs_give_the_same_bits(rank, world_size):
    results = []
    for _ in range(2):
        model = wrap(Net(norm=True))
        for number in range(4):
            train_step(model, rank, number)
        results.append(grads_of(model.module))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name])
    assert_same_on_all_ranks(*results[0].values())


@behaviour
def a_dropped_model_is_freed_and_leaves_no_hooks(rank, world_size):
    module = Net()
    for _ in range(2):
        model = wrap(module)
        train_step(model, rank)
        hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
        assert all(len(each) == 1 for each in hooks)
        output = model(batch(rank))
        gone = weakref.ref(model)
        gc.disable()  # no cycles either
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()
        assert not any(hooks)
        output.sum().backward()  # of the module alone


@behaviour
def wrapping_again_leaves_no_hooks_of_before(rank, world_size):
    module = Net()
    model = wrap(module)
    train_step(model, rank)
    model = wrap(module)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in module.parameters())
    for number in range(3):
        train_step(model, rank, number)
        assert_grads(module, mean_grads(world_size, number))


@behaviour
def two_wrappers_of_a_module_do_not_disturb_each_other(rank, world_size):
    module = Net()
    models = [wrap(module), wrap(module)]
    for number in range(4):
        train_step(models[number % 2], rank, number)
        assert_grads(module, mean_grads(world_size, number))
