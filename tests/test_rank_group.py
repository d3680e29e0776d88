"""What ranks tell one another, on any backend, in the world and in a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.wire.rank_group import RankGroup, group_or_world

LIMIT_S = 30


def tell(rank, world_size):
    world = RankGroup()
    group = dist.new_group([1, 2])
    told = {
        "ranks": world.gather((world.rank, world.world_size)),
        "numbers": world.gather_numbers([rank, 0.1]),
        "tensors": [tensor.tolist() for tensor in world.gather_tensor(torch.tensor([rank]))],
        "largest": world.largest(-rank),
        "largest_of_each": world.largest_of_each([rank, 2**62 - rank, rank == 1]),
    }
    world.barrier(LIMIT_S)
    if rank > 0:
        part = RankGroup(group)
        told["group"] = part.rank, part.world_size, part.gather(rank), part.largest(rank)
        part.barrier(LIMIT_S)
    else:
        with pytest.raises(RuntimeError, match=r"[Rr]anks? [12]"):
            world.barrier(0.3)
    return told


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_ranks_of_a_world_and_of_a_group_hear_one_another_and_a_barrier_names_who_is_missing(run_ranks, backend):
    results = run_ranks(tell, 3, backend=backend, timeout_s=LIMIT_S)
    for rank, told in enumerate(results):
        if rank > 0:
            assert told.pop("group") == (rank - 1, 2, [1, 2], 2)
        assert told == {
            "ranks": [(0, 3), (1, 3), (2, 3)],
            "numbers": [[0, 0.1], [1, 0.1], [2, 0.1]],
            "tensors": [[0], [1], [2]],
            "largest": 0,
            "largest_of_each": [2, 2**62, 1],
        }


def test_a_process_without_a_group_is_alone():
    alone = RankGroup()
    assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
    assert alone.gather("x") == ["x"]
    assert alone.gather_numbers([1, 2.5]) == [[1, 2.5]]
    assert alone.largest(3) == 3
    alone.barrier(0)
    with pytest.raises(ValueError, match="there is no process group yet"):
        group_or_world(None, "LocalSGD")
