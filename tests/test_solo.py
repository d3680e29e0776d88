"""Which programs in a group have trained apart, and which only look like it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import phalanx
from phalanx.backend.torch.dispatch import HAS_PYTHON_BACKENDS
from phalanx.rendezvous import solo


def make_optimizer(model):
    """Return an optimizer of a class of its own, which torch has not looked at yet."""
    kind = type("Plain", (torch.optim.SGD,), {"step": lambda self: torch.optim.SGD.step(self)})
    return kind(model.parameters(), lr=0.1)


def step(model, optimizer, each=None):
    model(torch.ones(2, 3)).sum().backward()
    for parameter in model.parameters() if each is not None else ():
        each(parameter)
    optimizer.step()


def train(each=None, end=None, num_steps=3, model=None):
    model = model or nn.Linear(3, 2)
    optimizer = make_optimizer(model)
    for _ in range(num_steps):
        step(model, optimizer, each)
    if end is not None:
        end(model)


def average(parameter):
    dist.all_reduce(parameter.grad)


def average_by_functions(parameter):
    parameter.grad = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD).wait()


def average_asynchronously(parameter):
    dist.all_reduce(parameter.grad, async_op=True).wait()


def gather_weights(model):
    dist.all_gather_object([None] * dist.get_world_size(), model.state_dict())


def to_a_server(parameter):
    dist.recv(parameter.grad, 1) if dist.get_rank() == 0 else dist.send(parameter.grad, 0)


def to_a_server_directly(parameter):
    one = phalanx.communicator()
    one.recv(parameter.grad, 1) if dist.get_rank() == 0 else one.send(parameter.grad, 0)


def in_a_subgroup():
    group = dist.new_group([0, 1])
    train(lambda parameter: dist.all_reduce(parameter.grad, group=group))
    dist.destroy_process_group(group)


def in_turns():
    """A generator and a discriminator, averaged together and then stepped."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [make_optimizer(model) for model in models]
    for model in models:
        model(torch.ones(2, 3)).sum().backward()
        for parameter in model.parameters():
            average(parameter)
    for optimizer in optimizers:
        optimizer.step()


def without_an_optimizer_at_first():
    """One step of gradients that were averaged before there was an optimizer."""
    model = nn.Linear(3, 2)
    model(torch.ones(2, 3)).sum().backward()
    for parameter in model.parameters():
        average(parameter)
    make_optimizer(model).step()


def with_other_words():
    """What ranks tell one another before they train is no exchange of gradients."""
    dist.broadcast_object_list(["settings"], 0)
    train()


def past_the_wrapper():
    model = nn.Linear(3, 2)
    phalanx.DistributedDataParallel(model)
    train(model=model)


def with_barriers(parameter):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    phalanx.communicator().barrier()
    dist.monitored_barrier()


APART = {
    "no wrapper": train,
    "barriers": lambda: train(with_barriers),
    "settings": with_other_words,
    "past the wrapper": past_the_wrapper,
}
TOGETHER = {
    "by hand": lambda: train(average),
    "asynchronously": lambda: train(average_asynchronously),
    "by functions": lambda: train(average_by_functions),
    "at the end": lambda: train(end=lambda model: dist.all_reduce(model.weight.data)),
    "as objects": lambda: train(end=gather_weights),
    "messages": lambda: train(to_a_server),
    "direct messages": lambda: train(to_a_server_directly),
    "a subgroup": in_a_subgroup,
    "phalanx's wrapper": lambda: train(model=phalanx.DistributedDataParallel(nn.Linear(3, 2))),
    "torch's wrapper": lambda: train(model=nn.parallel.DistributedDataParallel(nn.Linear(3, 2))),
    "two optimizers": in_turns,
    "averaged before": without_an_optimizer_at_first,
    "one step": lambda: train(num_steps=1),
    "no step": lambda: train(num_steps=0),
}


def was_apart(program):
    before, training = torch.optim.Optimizer.profile_hook_step, solo._Training()
    training.watch()
    try:
        program()
    finally:
        torch.optim.Optimizer.profile_hook_step = staticmethod(before)
    return training.was_apart()


def find_all(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: was_apart(program) for name, program in (APART | TOGETHER).items()}
        solo._note_group(dist.new_group(backend="gloo"))
        dist.barrier()  # Gloo fails on a rank that still connects when another ends
        return found | {"beside a group of Gloo": was_apart(train)}


def train_in_a_world_of_one(rank, world_size):
    return was_apart(train)


def test_what_trains_apart_in_a_group_and_what_does_not(run_ranks):
    want = dict.fromkeys(APART, HAS_PYTHON_BACKENDS) | dict.fromkeys([*TOGETHER, "beside a group of Gloo"], False)
    for found in run_ranks(find_all, 2):
        assert found == want


def test_a_rank_in_a_group_of_its_own_is_not_apart(run_ranks):
    assert run_ranks(train_in_a_world_of_one, 1) == [False]
