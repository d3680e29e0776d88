"""``python -m bench.stragglers``: how many steps it takes to find a rank that computes 5 % longer on this machine.

Two ranks with one thread each train a model and average after each step; each rank records its computing time. The rule
of `phalanx.record.excess` is then applied to stretches of several lengths: to the measured times, and to the same times
with 5 % added for one of the ranks, each in turn. If the rule names a rank from the measured times alone, the speeds of
the cores may really have differed during that stretch. So the benchmark also reports the spread of the ranks'
difference over the stretches. Only if the spread is well below 5 % can a rule find a rank that is 5 % slower within a
stretch, without naming a rank when none is slower.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bench import record
from bench.report import machine_facts
from phalanx.record.excess import excesses, is_clear, trimmed_mean
from phalanx.testing import run_ranks

_SLOWER = 0.05
_STRETCHES = (50, 100, 300, 1000)  # lengths of stretches, in steps
_SETTLING = 20  # number of first steps, which do not count
Times = Sequence[tuple[float, ...]]  # for each step, the computing times of all ranks


def _compute(rank: int, world_size: int, num_steps: int, batch: int) -> list[float]:
    """Return the seconds for which this rank computed in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    grads = torch.zeros(1000)
    times = []
    for _ in range(_SETTLING + num_steps):
        begin_s = time.perf_counter()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin_s)
        dist.all_reduce(grads)
    return times[_SETTLING:]


def _stretches(times: Times, num_steps: int) -> Iterator[Times]:
    """Yield stretches of `num_steps` steps, each of which begins in the middle of the previous stretch."""
    for first in range(0, len(times) - num_steps + 1, num_steps // 2):
        yield times[first : first + num_steps]


def _by_rank(times: Times, step_s: float, slow: int | None = None) -> list[list[float]]:
    """Return the excesses of each rank in each step, after slowing down the times of rank `slow`."""
    made = [[one * (1 + _SLOWER * (rank == slow)) for rank, one in enumerate(row)] for row in times]
    return excesses(made, step_s)


def judge(times: Times, num_steps: int) -> tuple[int, float, float, float]:
    """Return the number of stretches, two shares, and the spread.

    The first share is the fraction of stretches in which the measured times alone make the rule name a rank; the second
    is the fraction in which the slowed rank is named. The spread is the standard deviation, over the stretches, of the
    second rank's mean excess.
    """
    named, found, differences = [], [], []
    for stretch in _stretches(times, num_steps):
        step_s = statistics.median(map(max, stretch))
        ranks = range(len(stretch[0]))
        as_it_was = _by_rank(stretch, step_s)
        differences.append(trimmed_mean(as_it_was[1]))
        named.append(any(is_clear(values, len(ranks)) for values in as_it_was))
        found += [is_clear(_by_rank(stretch, step_s, slow)[slow], len(ranks)) for slow in ranks]
    return len(named), statistics.fmean(named), statistics.fmean(found), statistics.pstdev(differences)


def main() -> None:
    """Print, for stretches of several lengths, the shares in which a rank is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="steps to train (default: 3000)")
    parser.add_argument("--batch", type=int, default=768, help="samples of a rank in a step (default: 768)")
    record.add_arguments(parser)
    given = parser.parse_args()
    by_rank = run_ranks(_compute, 2, given.steps, given.batch, timeout_s=60 + given.steps)
    times = list(zip(*by_rank, strict=True))
    step_s = statistics.median(map(max, times))
    print(f"{given.steps} steps of {1e3 * step_s:.1f} ms")
    rows: list[list[record.Value]] = []
    for num_steps in (length for length in _STRETCHES if length <= given.steps):
        number, named, found, spread = judge(times, num_steps)
        rows.append([num_steps, number, named, found, spread])
        print(
            f"{num_steps:5} steps, {number:4} stretches: one named in {named:.1%} as it was, "
            f"the rank 5 % slower in {found:.1%}; the cores' difference varies by {spread:.2%}"
        )
    columns = [
        ("steps", "count"), ("stretches", "count"), ("named as it was", "fraction"),
        ("slow rank named", "fraction"), ("spread", "fraction"),
    ]  # fmt: skip
    record.write(given.json, given.note, machine_facts(""), [record.Table("stragglers", columns, rows)], {"s": by_rank})


if __name__ == "__main__":
    main()
