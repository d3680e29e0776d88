"""Gradients of which each rank needs a range are means there, and everywhere if any rank needs them whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx

pytestmark = pytest.mark.kept_ranks


class Net(nn.Module):
    """A transposed weight, one that some batches leave out, and small parameters between them."""

    def __init__(self):
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(24, 30), nn.Linear(30, 30), nn.Linear(30, 8)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()

    def forward(self, inputs, *, with_spare):
        hidden = self.first(inputs).tanh()
        return self.last(self.spare(hidden) if with_spare else hidden)


class Ranges:
    """Divides the parameters of more than 100 elements; `whole_on` is the rank that needs all elements."""

    def __init__(self, world_size, whole_on=None):
        self._world_size, self._whole_on = world_size, whole_on

    def length(self, parameter):
        return parameter.numel() // (4 * self._world_size) * 4 if parameter.numel() > 100 else 0

    def needs_whole(self):
        return dist.get_rank() == self._whole_on

    def own(self, parameter, rank):
        length = self.length(parameter)
        if not length:
            return slice(None)
        return slice(rank * length, parameter.numel() if rank == self._world_size - 1 else (rank + 1) * length)


def in_memory(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,)).clone()


def gradients(model, rank, division, *, spare_on, synchronizes=True):
    """Return the gradients of one pass, flat, in which the ranks of `spare_on` use all parameters."""
    model.divide_averaging(division)
    model.zero_grad()
    inputs = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    model.require_backward_grad_sync = synchronizes
    model(inputs, with_spare=rank in spare_on).square().sum().backward()
    return {name: p.grad if p.grad is None else in_memory(p.grad) for name, p in model.module.named_parameters()}


def compare(rank, world_size, spare_on):
    """Return the names whose gradient is not the mean on this rank's range, and those whose rest is not its own."""
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(Net(), find_unused_parameters=True)
    ranges = Ranges(world_size)
    own = gradients(model, rank, None, spare_on=spare_on, synchronizes=False)
    whole = gradients(model, rank, None, spare_on=spare_on)
    parts = gradients(model, rank, ranges, spare_on=spare_on)
    by_need = gradients(model, rank, Ranges(world_size, whole_on=world_size - 1), spare_on=spare_on)
    again = gradients(model, rank, None, spare_on=spare_on)
    wrong, touched = [], []
    for name, parameter in model.module.named_parameters():
        if whole[name] is None:
            wrong += [name] * (parts[name] is not None)
            continue
        place = ranges.own(parameter, rank)
        wrong += [name] * (not torch.equal(parts[name][place], whole[name][place]))
        wrong += [name] * (not (torch.equal(by_need[name], whole[name]) and torch.equal(again[name], whole[name])))
        rest = torch.ones(len(parts[name]), dtype=torch.bool)
        rest[place] = False
        expected = torch.zeros_like(whole[name]) if own[name] is None else own[name]
        touched += [name] * (not torch.equal(parts[name][rest], expected[rest]))
    return wrong, touched


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("spare_on", [(0, 1, 2, 3), (0,), ()], ids=["all", "rank 0 alone", "none"])
def test_each_rank_has_the_means_of_its_range(run_ranks, world_size, spare_on):
    assert run_ranks(compare, world_size, spare_on) == [([], [])] * world_size


def freeze(rank, world_size):
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(Net())
    ranges, found = Ranges(world_size), []
    for trains in (True, False, True):
        model.module.last.weight.requires_grad_(trains)
        whole = gradients(model, rank, None, spare_on=range(world_size))
        parts = gradients(model, rank, ranges, spare_on=range(world_size))
        place = ranges.own(model.module.spare.weight, rank)
        found.append(torch.equal(whole["spare.weight"][place], parts["spare.weight"][place]))
        found.append(not torch.equal(whole["spare.weight"], parts["spare.weight"]))
        found.append((parts["last.weight"] is not None) == trains)
    return found


def test_freezing_parameters_keeps_the_division(run_ranks):
    assert run_ranks(freeze, 2) == [[True] * 9] * 2


def ask_for_norms(rank, world_size):
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(Net())
    every = range(world_size)
    whole = gradients(model, rank, None, spare_on=every)
    gradients(model, rank, Ranges(world_size), spare_on=every)
    if rank == 1:
        model.grad_norm()
    found = gradients(model, rank, Ranges(world_size), spare_on=every)
    same = all(torch.equal(found[name], whole[name]) for name in whole)
    norm = torch.linalg.vector_norm(torch.cat([*whole.values()]))
    return same, torch.allclose(model.grad_norm(), norm)


def test_a_rank_that_asks_for_the_norm_has_whole_gradients_from_the_next_pass_on(run_ranks):
    assert run_ranks(ask_for_norms, 2) == [(True, True)] * 2
