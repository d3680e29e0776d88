"""host_groups: the ranks of this host, and the groups across hosts."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

import phalanx

pytestmark = pytest.mark.kept_ranks


def members(group):
    return dist.get_process_group_ranks(group) if group is not None else None


def find_groups(rank, world_size, names, nodes):
    """Return this rank's groups, by the names given or by the nodes that a launcher would tell."""
    if nodes:
        os.environ["GROUP_RANK"] = str(nodes[rank])
    groups = phalanx.host_groups(names and names[rank])
    facts = groups.num_hosts, groups.num_rails, groups.num_ranks, groups.rail, groups.weight
    return members(groups.host), members(groups.across), facts


@pytest.mark.parametrize("by", ["name", "node"])
def test_rails_cross_hosts_of_equal_size(run_ranks, by):
    told = [0, 1, 0, 1]
    names, nodes = ([f"host {i}" for i in told], None) if by == "name" else (None, told)
    results = run_ranks(find_groups, 4, names, nodes)
    assert [result[0] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [result[1] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result[2] for result in results] == [(2, 2, 4, rail, 1.0) for rail in (0, 0, 1, 1)]


def test_a_rank_beyond_those_of_the_smallest_host_has_no_rail(run_ranks):
    results = run_ranks(find_groups, 4, ["a", "a", "a", "b"], None)
    assert [result[0] for result in results] == [[0, 1, 2]] * 3 + [[3]]
    assert [result[1] for result in results] == [[0, 3], None, None, [0, 3]]
    assert [result[2] for result in results] == [(2, 1, 4, rail, 1.5) for rail in range(3)] + [(2, 1, 4, 0, 0.5)]


def test_ranks_of_this_machine_are_one_host(run_ranks):
    results = run_ranks(find_groups, 2, None, None)
    assert results == [([0, 1], [rank], (1, 2, 2, rank, 1.0)) for rank in range(2)]


def choose_backends(rank, world_size):
    groups = phalanx.host_groups(f"host {rank // 2}", host_backend="phalanx", across_backend="gloo")
    dist.barrier()  # Gloo fails to connect to a rank that has ended already
    return [dist.get_backend(group) for group in (groups.host, groups.across)]


def test_each_group_can_have_a_backend_of_its_own(run_ranks):
    assert run_ranks(choose_backends, 4, backend="gloo") == [["phalanx", "gloo"]] * 4
