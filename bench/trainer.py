"""``python -m bench.trainer``: what `phalanx.Trainer` adds to a step, against the same loop by hand.

Two ranks with one thread each train the MLP 784-1024-10 in turns, in one pair of processes: by hand, with
phalanx.DataLoader and DistributedDataParallel, and with the Trainer on the same data.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.testing import run_ranks

_BATCH = 64  # of each rank
_WARM_UP = 30  # steps
_MOST_MS = 0.05


class _Times:
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, _: object) -> None:
        self.ends.append(time.perf_counter())

    @property
    def median_ms(self) -> float:
        steps = [b - a for a, b in zip(self.ends[_WARM_UP:-1], self.ends[_WARM_UP + 1 :], strict=True)]
        return 1e3 * statistics.median(steps)


def _data(num_steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    length = 2 * _BATCH * num_steps
    return TensorDataset(torch.randn(length, 784, generator=generator), torch.randint(10, (length,)))


def _make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _by_hand(data: TensorDataset) -> float:
    model, optimizer = _make()
    ddp = phalanx.DistributedDataParallel(model)
    times = _Times()
    for inputs, targets in phalanx.DataLoader(data, _BATCH, shuffle=True, num_workers=0):
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.on_step(None)
    return times.median_ms


def _with_trainer(data: TensorDataset, folder: str) -> float:
    times = _Times()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = phalanx.Trainer(
            *_make(), nn.functional.cross_entropy, max_epochs=1, global_batch_size=2 * _BATCH, folder=folder,
            callbacks=(times,),
        )  # fmt: skip
        trainer.fit(data)
    return times.median_ms


def _measure(rank: int, world_size: int, num_rounds: int, num_steps: int, base: str) -> list[tuple[float, float]]:
    data = _data(num_steps)
    rounds = []
    for number in range(num_rounds):
        rounds.append((_by_hand(data), _with_trainer(data, f"{base}/{number}")))
        dist.barrier()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150, help=f"of a turn; the first {_WARM_UP} do not count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        rounds = run_ranks(_measure, 2, args.rounds, args.steps, base, timeout_s=600)[0]
    by_hand, with_trainer = (statistics.median(column) for column in zip(*rounds, strict=True))
    added = statistics.median(ours - hand for hand, ours in rounds)
    print(f"by hand {by_hand:.3f} ms, Trainer {with_trainer:.3f} ms a step (medians of {len(rounds)} rounds)")
    verdict = "reached" if added <= _MOST_MS else "missed"
    print(f"{verdict}: the Trainer adds {added:.3f} ms to a step (at most {_MOST_MS})")


if __name__ == "__main__":
    main()
