"""Fully sharded data parallelism, FSDP2: parameters, gradients and optimizer state divided; torch's `fully_shard`.

Start it with any number of ranks; four show most:

    phalanx run --nproc-per-node 4 examples/fully_sharded.py
    torchrun --nproc-per-node 4 examples/fully_sharded.py
    python examples/fully_sharded.py                                   # a world of one

It trains the same model on whole batches beside it, and ends with an error if the two part.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx

WIDTH, NUM_LAYERS, BATCH_SIZE = 64, 4, 16


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(MLP() for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, 10))


def shard(model, mesh):
    """Shard layer by layer: each is gathered when it computes, and let go behind it."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def one_mesh(model, world_size):
    """Each parameter divided among all ranks, each of which trains on its own part of the batch."""
    mesh = init_device_mesh("cpu", (world_size,))
    shard(model, mesh)
    return mesh


def hybrid(model, world_size):
    """HSDP: a whole copy in each row, divided within it; for rows that are hosts, between which only gradients pass."""
    mesh = init_device_mesh("cpu", rows_and_columns(world_size), mesh_dim_names=("copy", "shard"))
    shard(model, mesh)
    return mesh


def with_tensor_parallel(model, world_size):
    """A mesh of two dimensions: layers divided within a row, which sees one batch, and sharded along columns."""
    mesh = init_device_mesh("cpu", rows_and_columns(world_size), mesh_dim_names=("data", "layer"))
    for layer in list(model)[:-1]:
        parallelize_module(layer, mesh["layer"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["data"])
    return mesh["data"]


def rows_and_columns(world_size):
    num_columns = 2 if world_size % 2 == 0 else 1
    return world_size // num_columns, num_columns


def train(model, steps, part=0, num_parts=1):
    """Train on one part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH_SIZE, WIDTH, generator=generator).tensor_split(num_parts)[part]
        y = torch.randint(10, (BATCH_SIZE,), generator=generator).tensor_split(num_parts)[part]
        optimizer.zero_grad()
        # Gradients are averaged over the parts: so weighted, their mean is that of the whole batch.
        loss = F.cross_entropy(model(x), y, reduction="sum") * num_parts / BATCH_SIZE
        loss.backward()
        optimizer.step()


def whole(parameter):
    """Return the tensor that a DTensor is a part of; one dimension of the mesh after the other."""
    inner = parameter.placements[1:]
    return parameter.redistribute(placements=[Replicate(), *inner]).full_tensor()


def own_elems(model):
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    with phalanx.init(device="cpu") as session:
        undivided = build_model()
        train(undivided, args.steps)
        for way in (one_mesh, hybrid, with_tensor_parallel):
            model = build_model()
            mesh = way(model, session.world_size)  # along which the batch is divided
            train(model, args.steps, part_of(mesh), mesh.size())
            difference = 0.0
            for parameter, want in zip(model.parameters(), undivided.parameters(), strict=True):
                got = whole(parameter)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
                difference = max(difference, (got - want).abs().max().item())
            if session.rank == 0:
                share = own_elems(model) / own_elems(undivided)
                print(
                    f"{way.__name__}: {share:.0%} of the parameters on each rank, at most "
                    f"{difference:.0e} away from one rank on whole batches"
                )


def part_of(mesh):
    """Return this rank's place in a mesh, row by row."""
    place = 0
    for size, at in zip(mesh.shape, mesh.get_coordinate(), strict=True):
        place = place * size + at
    return place


if __name__ == "__main__":
    main()
