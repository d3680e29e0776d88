"""One rank of ``python -m bench.top``: trains forever; rank 0 counts its steps in a file that the benchmark reads."""

from __future__ import annotations

import argparse
import mmap
import struct
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench.step_models import mlp
from phalanx.record import writer

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=Path, required=True, help="file of 8 bytes: the number of rank 0's steps")
    given = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("phalanx")
    model = phalanx.DistributedDataParallel(mlp(784, 1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    with open(given.count, "r+b") as file, mmap.mmap(file.fileno(), 8) as count:
        for step in range(1, 1 << 40):
            recorded = writer.begin_step(step, BATCH)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.end(recorded)
            if dist.get_rank() == 0:
                struct.pack_into("<Q", count, 0, step)


if __name__ == "__main__":
    main()
