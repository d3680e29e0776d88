"""Divide a dataset and average gradients by hand, as DistributedSampler and DistributedDataParallel do for you.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/partition.py
    torchrun --nproc-per-node 2 examples/partition.py
    python examples/partition.py                                       # a world of one
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_data
from torch import nn
from torch.utils.data import DataLoader

import phalanx


def own_part(dataset, rank, world_size):
    """Return this rank's part: the same shuffle on every rank, cut into as many parts as there are ranks."""
    parts = phalanx.DataPartitioner(dataset, sizes=[1 / world_size] * world_size, seed=1234)
    return parts.use(rank)


def accuracy(model, dataset):
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(args, rank, world_size):
    train_set, test_set = load_data(None)
    part = own_part(train_set, rank, world_size)
    # The whole batch is the same, however many ranks share it: so is the training, up to the order of the samples.
    batch_size = args.batch_size // world_size
    # Parts differ by a sample, and all ranks must take equally many steps: each averages with all others.
    num_steps = len(train_set) // world_size // batch_size
    loader = DataLoader(part, batch_size, shuffle=True)

    torch.manual_seed(1234)  # the same model on every rank; gradients that are the same keep it the same
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)  # from here on another shuffle on each rank
    for epoch in range(args.epochs):
        total = torch.tensor(0.0)
        for _, (x, y) in zip(range(num_steps), loader, strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            phalanx.average_gradients(model)  # between backward() and step()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {total.item() / num_steps:.3f}")
    print(f"rank {rank}: trained on {len(part)} images, test accuracy {accuracy(model, test_set):.2%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    args = parser.parse_args()
    with phalanx.init() as session:
        train(args, session.rank, session.world_size)


if __name__ == "__main__":
    main()
