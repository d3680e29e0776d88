"""A batch too large for the memory, in several small ones: gradients add up on each rank, and are averaged once.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/gradient_accumulation.py
    torchrun --nproc-per-node 2 examples/gradient_accumulation.py
    python examples/gradient_accumulation.py                           # a world of one
"""

import argparse
import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn

import phalanx


def accumulate(model, micro_batches, *, average_once):
    """Leave the mean gradient of all micro-batches in the model; return its norm and how many seconds that took."""
    begin = time.perf_counter()
    model.zero_grad()
    for number, (x, y) in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        # The forward pass belongs inside as well: it is there that the model decides whether to average.
        with contextlib.nullcontext() if is_last or not average_once else model.no_sync():
            loss = F.mse_loss(model(x), y) / len(micro_batches)  # the sum of these is the mean over all
            loss.backward()
    norm = model.grad_norm().item()
    return norm, time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="of the model; its gradients are width^2 * 8 bytes")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    with phalanx.init() as session:
        torch.manual_seed(session.rank)
        layers = nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, args.width)
        model = phalanx.DistributedDataParallel(nn.Sequential(*layers).to(session.device))
        x, y = torch.randn(2, args.micro_batches * 4, args.width, device=session.device)
        whole = [(x, y)]
        pieces = list(zip(x.split(4), y.split(4), strict=True))
        ways = {
            "one large batch": (whole, False),
            f"{len(pieces)} small ones, averaged each time": (pieces, False),
            f"{len(pieces)} small ones, averaged once": (pieces, True),
        }
        for name, (batches, average_once) in ways.items():
            results = [accumulate(model, batches, average_once=average_once) for _ in range(args.steps)]
            norm, seconds = min(results, key=lambda result: result[1])
            if session.rank == 0:
                print(f"{name:36} {1e3 * seconds:7.1f} ms, gradient of norm {norm:.6f}")


if __name__ == "__main__":
    main()
