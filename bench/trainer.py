"""``python -m bench.trainer``: how much time `phalanx.Trainer` adds to a step, compared with a hand-written loop.

Two ranks with one thread each train the MLP 784-1024-10 on the same data: with the Trainer, and with a hand-written
loop around phalanx.DataLoader and DistributedDataParallel. Both loops take turns of a few steps, in one pair of
processes, so that other load on the machine affects both equally. The result is the median difference of neighboring
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from bench import record
from bench.report import machine_facts
from phalanx.testing import run_ranks

_BATCH = 64  # samples of each rank in a step
_TURN = 6  # steps in a turn
_SETTLING = 2  # first steps of a turn, which do not count, because the caches still hold the other loop's data
_WARM_UP = 5  # number of first turns, which do not count
_MOST_MS = 0.05


class _ByHand:
    """The hand-written loop. It is a callback of the trainer, and runs a turn of steps after each turn of the trainer.

    Attributes:
        turns: For each pair of turns, the median times of a step in ms, by hand and with the trainer.
    """

    def __init__(self, data: TensorDataset) -> None:
        self._model, self._optimizer = _make()
        self._ddp = phalanx.DistributedDataParallel(self._model)
        self._batches = itertools.chain.from_iterable(
            itertools.repeat(phalanx.DataLoader(data, _BATCH, shuffle=True, num_workers=0))
        )
        # the beginning of this turn, followed by the end of each step of the trainer in this turn
        self._ends = [time.perf_counter()]
        self.turns: list[tuple[float, float]] = []

    def on_step(self, _: object) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) > _TURN:
            trainers, ours = self._ends, [time.perf_counter()]
            for inputs, targets in itertools.islice(self._batches, _TURN):
                loss = nn.functional.cross_entropy(self._ddp(inputs), targets)
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                ours.append(time.perf_counter())
            self.turns.append((_median_ms(ours), _median_ms(trainers)))
            self._ends = [time.perf_counter()]


def _median_ms(ends: list[float]) -> float:
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(ends[_SETTLING:]))


def _data(num_steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    length = 2 * _BATCH * num_steps
    return TensorDataset(torch.randn(length, 784, generator=generator), torch.randint(10, (length,)))


def _make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _measure(rank: int, world_size: int, num_steps: int, folder: str) -> list[tuple[float, float]]:
    data = _data(num_steps)
    by_hand = _ByHand(data)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = phalanx.Trainer(
            *_make(), nn.functional.cross_entropy, max_epochs=1, global_batch_size=2 * _BATCH, folder=folder,
            callbacks=(by_hand,),
        )  # fmt: skip
        trainer.fit(data)
    return by_hand.turns[_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    record.add_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = run_ranks(_measure, 2, args.steps, folder, timeout_s=600)[0]
    by_hand, with_trainer = (statistics.median(column) for column in zip(*turns, strict=True))
    differences = [trainers - ours for ours, trainers in turns]
    added = statistics.median(differences)
    low, _, high = statistics.quantiles(differences, n=4)
    error = (high - low) / len(differences) ** 0.5
    print(f"by hand {by_hand:.3f} ms, Trainer {with_trainer:.3f} ms a step (medians of {len(turns)} turns)")
    rows = [["by hand", by_hand / 1e3], ["Trainer", with_trainer / 1e3], ["added by the Trainer", added / 1e3]]
    table = record.Table("trainer", [("a step", "text"), ("median", "seconds")], rows)
    record.write(args.json, args.note, machine_facts(""), [table], {"turns_ms": turns})
    verdict = "reached" if added <= _MOST_MS else "missed"
    print(f"{verdict}: the Trainer adds {added:.3f} +- {error:.3f} ms to a step (at most {_MOST_MS})")


if __name__ == "__main__":
    main()
