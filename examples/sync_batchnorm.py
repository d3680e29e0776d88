"""Batch normalization when the batch is divided: each rank by its own part, or all by the whole.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/sync_batchnorm.py
    torchrun --nproc-per-node 2 examples/sync_batchnorm.py
    python examples/sync_batchnorm.py                                  # a world of one
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import phalanx


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.BatchNorm1d(16),
        nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def make_batch(step, size):
    """Return a batch sorted by brightness: parts of it differ as much as they can."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size, 1, 8, 8, generator=generator) + torch.linspace(-2, 2, size).view(-1, 1, 1, 1)
    return images, torch.randint(10, (size,), generator=generator)


def train(model, args, rank, world_size):
    """Train on this rank's part of each batch; return all parameters and running statistics in one tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        images, labels = (tensor.tensor_split(world_size)[rank] for tensor in make_batch(step, args.batch_size))
        optimizer.zero_grad()
        # The ranks' gradients are averaged: so weighted, their mean is that of all images, however many each has.
        loss = F.cross_entropy(model(images), labels, reduction="sum") * world_size / args.batch_size
        loss.backward()
        optimizer.step()
    return torch.cat([value.flatten() for value in model.state_dict().values() if value.is_floating_point()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=18, help="of all ranks together")
    args = parser.parse_args()

    with phalanx.init() as session:
        place = session.rank, session.world_size
        alone = train(make_model(), args, rank=0, world_size=1)  # every rank by itself, on whole batches

        plain = train(phalanx.DistributedDataParallel(make_model()), args, *place)
        model = phalanx.convert_sync_batchnorm(make_model())  # replaces every BatchNorm layer, before DDP
        synced = train(phalanx.DistributedDataParallel(model), args, *place)

        for name, state in (("BatchNorm", plain), ("SyncBatchNorm", synced)):
            difference = (state - alone).norm() / alone.norm()
            dist.all_reduce(difference, op=dist.ReduceOp.MAX)
            if session.rank == 0:
                print(
                    f"{name:13} on {session.world_size} ranks: {difference.item():.0e} away from one on whole batches"
                )


if __name__ == "__main__":
    main()
