"""``python -m bench.verify``: what ``PHALANX_VERIFY`` costs, in small calls and in a step of training.

Groups of the same ranks take turns: a group that is not verified, a group with every hundredth call verified, and a
group with every call verified. The first group uses the same classes as a group in a process without verification. Each
time is the median over the rounds, and each ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import phalanx

WORDS = ("", "gloo:100", "gloo")
_NUM_CALLS, _NUM_STEPS = 1000, 100
_BATCH, _WIDTH = 64, 1024


def _group(word: str) -> dist.ProcessGroup:
    os.environ["PHALANX_VERIFY"] = word
    group = dist.new_group(backend="phalanx")
    os.environ["PHALANX_VERIFY"] = ""
    return group


def _calls(group: dist.ProcessGroup) -> Callable[[], float]:
    tensor = torch.ones(1)

    def call() -> float:
        began_s = time.perf_counter()
        for _ in range(_NUM_CALLS):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return (time.perf_counter() - began_s) / _NUM_CALLS

    return call


def _steps(group: dist.ProcessGroup) -> Callable[[], float]:
    torch.manual_seed(0)
    layers = (nn.Linear(784, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(_BATCH, 784), torch.randint(10, (_BATCH,))

    def step() -> float:
        began_s = time.perf_counter()
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return (time.perf_counter() - began_s) / _NUM_STEPS

    return step


def _measure(rank: int, num_rounds: int) -> dict[str, list[list[float]]]:
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    found = {}
    for name, make, words in (("all_reduce of 4 B", _calls, WORDS), ("step", _steps, WORDS[:2])):
        runs = [make(_group(word)) for word in words]
        for run in runs:
            run()
        found[name] = [[run() for run in runs] for _ in range(num_rounds)]
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    rows: dict[str, list[list[float]]] = phalanx.spawn(_measure, (given.rounds,), nprocs=given.ranks)[0]
    for name, rounds in rows.items():
        for i in range(len(rounds[0])):
            us = statistics.median(times[i] for times in rounds) * 1e6
            ratio = statistics.median(times[i] / times[0] for times in rounds)
            print(f"{name:<20} PHALANX_VERIFY={WORDS[i]:<10} {us:12.1f} us {ratio:8.3f}x")


if __name__ == "__main__":
    main()
