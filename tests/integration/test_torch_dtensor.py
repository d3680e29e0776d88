"""Random programs of DTensor: meshes, placements, uneven shards, operations; as without sharding, and as on Gloo."""

from __future__ import annotations

import random

import pytest
import torch

from tests.integration._compare import Comparison

NUM_OPERATIONS = 8
SEEDS = {2: range(12), 4: range(4)}
MESHES = {2: [(2,), (1, 2), (2, 1)], 4: [(4,), (2, 2)]}


def run_program(rank, world_size, seed):
    """Make and redistribute tensors and compute with them; return each result whole, and where its parts lay.

    Small whole numbers in 64 bits add up exactly, in whatever order.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", draw.choice(MESHES[world_size]))
    sides = draw.sample(range(1, 9), 2)

    def placements():
        return [draw.choice([Replicate(), Shard(0), Shard(1)]) for _ in range(mesh.ndim)]

    def made():
        whole = torch.randint(-3, 4, tuple(sides), generator=generator).double()
        return whole, distribute_tensor(whole, mesh, placements())

    def redistributed(whole, parts):
        return whole, parts.redistribute(mesh, placements()).redistribute(mesh, placements())

    def reduced(whole, parts):
        """Each rank has a summand of its own."""
        mine = parts.full_tensor() * (rank + 1)
        summands = DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim)
        return whole * (world_size * (world_size + 1) // 2), summands.redistribute(mesh, placements())

    def multiplied(whole, parts):
        other, other_parts = made()
        return whole @ other.T @ other, parts @ other_parts.T @ other_parts

    def added(whole, parts):
        other, other_parts = made()
        return whole + 2 * other, parts + 2 * other_parts

    def differentiated(whole, parts):
        whole, parts = (one.detach().requires_grad_() for one in (whole, parts.redistribute(mesh, placements())))
        other, other_parts = made()
        (whole * whole * other).sum().backward()
        (parts * parts * other_parts).sum().backward()
        return whole.grad, parts.grad

    operations = {
        "redistributed": redistributed,
        "reduced": reduced,
        "multiplied": multiplied,
        "added": added,
        "differentiated": differentiated,
        "summed": lambda whole, parts: (whole + whole.sum(0), parts + parts.sum(0)),
        "centred": lambda whole, parts: (whole - whole.sum(1, keepdim=True), parts - parts.sum(1, keepdim=True)),
        "turned": lambda whole, parts: (whole.T.contiguous().T, parts.T.contiguous().T),
        "flat": lambda whole, parts: (
            whole.reshape(-1).reshape(whole.shape),
            parts.redistribute(mesh, [Replicate()] * mesh.ndim).reshape(-1).reshape(whole.shape),
        ),
        "halved": lambda whole, parts: ((whole * 2) // 3, (parts * 2) // 3),
        "chosen": lambda whole, parts: (torch.where(whole > 0, whole, -whole), torch.where(parts > 0, parts, -parts)),
    }
    whole, parts = made()
    results = []
    for _ in range(NUM_OPERATIONS):
        name = draw.choice([*operations])
        whole, parts = operations[name](whole, parts)
        whole, parts = whole % 7, parts.redistribute(mesh, placements()) % 7
        gathered = parts.full_tensor()
        assert torch.equal(gathered, whole), f"{name} gives another result than without shards"
        results.append((name, gathered, str(parts.placements), list(parts.to_local().shape)))
    return results


@pytest.fixture(scope="module", params=SEEDS)
def comparison(request, tmp_path_factory):
    programs = {str(seed): (run_program, (seed,)) for seed in SEEDS[request.param]}
    return request.param, Comparison(request.param, tmp_path_factory.mktemp("dtensor"), programs)


def test_random_programs_give_gloos_bits(comparison):
    world_size, compared = comparison
    names = {name for seed in SEEDS[world_size] for name, *_ in compared.same_on_gloo(str(seed))[0]}
    assert len(names) >= 9
