"""``python -m bench.sentinel``: how much longer a step takes while the ranks' copies of the model are compared.

Two ranks with one thread each train a model, and agree on a number every 0.1 s, as `phalanx.Trainer` does. In every
second turn of steps, the sentinel's numbers are exchanged together with that number. The result is the median ratio of
neighboring turns; their order alternates, so that other load on the machine affects both kinds equally. Two more
numbers are reported. One is the share of a turn that the sentinel's own calls take; it varies less on a busy machine,
but does not include the calls' effect on the caches. The other is the time of `phalanx.check_replicas`, which compares
all tensors at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from bench import record
from bench.ddp import CASES
from bench.report import machine_facts
from phalanx.parallel.divergence.sentinel import Sentinel
from phalanx.testing import run_ranks
from phalanx.wire.rank_group import RankGroup

_BATCH = 64  # samples of each rank in a step
_AGREE_S = 0.1
_TURN_S = 0.5
_WARM_UP = 12  # number of first turns, in which the sentinel finds out how often it may compare
_MOST = 1.01
MODELS = {name: CASES[name].build for name in ("MLP 784-1024-10", "MLP of 17 M")}
# keeps the model from learning, because a processor takes ten times as long for the tiny gradients of a trained model
_LR = 1e-9
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=_LR),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=_LR),
}


class _Loop:
    """A training loop of this rank, whose turns run with or without the sentinel."""

    def __init__(self, model: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = phalanx.DistributedDataParallel(MODELS[model]())
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self._ranks = RankGroup()
        self._images, self._labels = torch.randn(_BATCH, 1, 28, 28), torch.randint(10, (_BATCH,))
        self._num_steps = 0
        self._agree_every = 1
        self._looked_s = 0.0  # time in the sentinel's calls in this turn
        assert dist.group.WORLD is not None
        self.sentinel = Sentinel(self.model, self.optimizer, dist.group.WORLD, "auto", lambda _: False, 0)

    def turn(self, num_steps: int, *, compares: bool) -> tuple[float, float]:
        """Run a turn after a barrier; return the time of a step, and the share of it that the sentinel's calls take."""
        dist.barrier()
        self._looked_s = 0.0
        begin_s = time.perf_counter()
        for step in range(num_steps):
            nn.functional.cross_entropy(self.model(self._images), self._labels).backward()
            if step % self._agree_every == 0:
                self._agree(step, compares)
            self.optimizer.step()
            self.optimizer.zero_grad()
        turn_s = time.perf_counter() - begin_s
        return turn_s / num_steps, self._looked_s / turn_s

    def _agree(self, step: int, compares: bool) -> None:
        if not compares:
            self._ranks.largest_of_each([0])
            return
        self._num_steps += self._agree_every
        begin_s = time.perf_counter()
        numbers = self.sentinel.look(self._num_steps)
        self._looked_s += time.perf_counter() - begin_s
        largest = self._ranks.largest_of_each([0, *numbers])[1:]
        begin_s = time.perf_counter()
        self.sentinel.hear(largest)
        self._looked_s += time.perf_counter() - begin_s

    def settle(self) -> int:
        """Choose after how many steps the ranks agree and compare; return a turn's steps, a multiple of this number."""
        for _ in range(_WARM_UP):
            step_s, _ = self._ranks.gather_numbers(self.turn(4 * self._agree_every, compares=True))[0]
            self.sentinel.adapt(self._num_steps, step_s)
            self._agree_every = max(1, int(_AGREE_S / step_s))
        return self._agree_every * max(1, int(_TURN_S / step_s / self._agree_every))


def _measure(rank: int, world_size: int, model: str, optimizer: str, rounds: int) -> dict[str, Any]:
    loop = _Loop(model, optimizer)
    num_steps = loop.settle()
    pairs, shares = [], []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        turns = {compares: loop.turn(num_steps, compares=compares) for compares in order}
        pairs.append((turns[False][0], turns[True][0]))
        shares.append(turns[True][1])
    checks_s = []
    for _ in range(9):
        dist.barrier()
        begin_s = time.perf_counter()
        phalanx.check_replicas(loop.model, loop.optimizer)
        checks_s.append(time.perf_counter() - begin_s)
    return {
        "pairs_s": pairs, "share": statistics.median(shares), "every": loop.sentinel.every,
        "check_s": statistics.median(checks_s),
    }  # fmt: skip


def _row(model: str, optimizer: str, rounds: int) -> tuple[list[record.Value], list[tuple[float, float]]]:
    result = run_ranks(_measure, 2, model, optimizer, rounds, timeout_s=60 + 10 * rounds)[0]
    pairs: Sequence[tuple[float, float]] = result["pairs_s"]
    ratios = [compared / plain for plain, compared in pairs]
    without, compared = (statistics.median(column) for column in zip(*pairs, strict=True))
    low, ratio, high = statistics.quantiles(ratios, n=4)
    error = (high - low) / len(ratios) ** 0.5
    verdict = "reached" if max(ratio - 2 * error, 1 + result["share"]) <= _MOST else "missed"
    print(
        f"{verdict}: {model}, {optimizer}: {1e3 * without:.3f} ms a step, {1e3 * compared:.3f} ms compared: "
        f"{ratio:.4f} +- {error:.4f} times (at most {_MOST}), its own calls {result['share']:.2%}; "
        f"all of it every {result['every']} steps; "
        f"check_replicas {1e3 * result['check_s']:.1f} ms",
        flush=True,
    )
    row = [f"{model}, {optimizer}", without, compared, ratio, result["share"], result["every"], result["check_s"]]
    return row, list(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=MODELS, help="model to measure; default: all")
    record.add_arguments(parser)
    args = parser.parse_args()
    names = [args.only] if args.only else list(MODELS)
    rows, raw = zip(*(_row(name, optimizer, args.rounds) for name in names for optimizer in OPTIMIZERS), strict=True)
    columns = [
        ("model", "text"), ("alone", "seconds"), ("compared", "seconds"), ("ratio", "ratio"),
        ("its own calls", "fraction"), ("all of it every", "count"), ("check_replicas", "seconds"),
    ]  # fmt: skip
    table = record.Table("sentinel", columns, rows)
    record.write(args.json, args.note, machine_facts(""), [table], {"turns_s": raw})


if __name__ == "__main__":
    main()
