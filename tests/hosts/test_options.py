"""What may be chosen for one group: ``pg_options=phalanx.GroupOptions(...)``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import phalanx

pytestmark = pytest.mark.kept_ranks


def sum_in_a_group_of_its_own(rank, world_size):
    group = dist.new_group(backend="phalanx", pg_options=phalanx.GroupOptions(bridge="gloo", silence_s=3.0))
    total = torch.full((2000,), rank + 1.0)
    dist.all_reduce(total, group=group)
    return total.unique().tolist()


def name_an_unknown_bridge(rank, world_size):
    with pytest.raises(ValueError, match="GroupOptions: bridge must be one of gloo, mpi, got 'tcp'"):
        dist.new_group(backend="phalanx", pg_options=phalanx.GroupOptions(bridge="tcp"))


def choose_differently(rank, world_size):
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    bridge = ("gloo", "mpi")[rank]
    with pytest.raises(phalanx.PhalanxError, match="run different bridges: gloo on rank 0, mpi on rank 1"):
        dist.new_group(backend="phalanx", pg_options=phalanx.GroupOptions(bridge=bridge))


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=["one host", "two hosts"])
def test_a_group_takes_options_of_its_own(run_ranks, hosts):
    assert run_ranks(sum_in_a_group_of_its_own, 2, hosts=hosts) == [[3.0]] * 2


def test_an_unknown_bridge_is_refused(run_ranks):
    run_ranks(name_an_unknown_bridge, 2)


def test_ranks_that_choose_differently_are_told(run_ranks):
    run_ranks(choose_differently, 2, hosts=(1, 1))
