"""``python -m bench.ddp``: what data parallel training costs, compared with the same step without any communication.

Two ranks with one thread each train all variants in turns, in one pair of processes. One variant has no communication.
Others use phalanx's and torch's DistributedDataParallel, on phalanx and on Gloo. One divides the optimizer's step as a
Trainer does, and one uses phalanx.ZeroRedundancyOptimizer with parameters in shared memory. The benchmark also measures
an epoch of each of two CNNs on one rank and on two, and the memory for parameters and optimizer state.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from bench import record
from bench.plan import parse_names
from bench.report import machine_facts, median_ratio, verdict_line
from bench.step_models import digits_cnn, mlp
from phalanx.train.step.shards import Shards, divisible

_BATCH = 64
_NONE = "no communication"
_OURS = "phalanx DDP on phalanx"
_TORCH = "torch DDP on phalanx"
_SHARDED = "phalanx DDP, ZeroRedundancyOptimizer"
_DIVIDED = "phalanx DDP, the step divided"
_PARTS = ("averaging", "waiting")  # parts of a step of our DDP; averaging includes waiting for the slower rank
_VARIANTS = (_NONE, _OURS, _TORCH, _SHARDED, _DIVIDED, "phalanx DDP on Gloo", "torch DDP on Gloo")


@dataclass(frozen=True)
class Case:
    """A model with an optimizer; `most` limits a variant's step, as a multiple of the step without communication."""

    build: Callable[[], nn.Module]
    optimizer: type[torch.optim.Optimizer]
    num_steps: int  # steps in a turn
    most: dict[str, float]
    side: int = 28  # width and height of an image, in pixels


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10),
    )  # fmt: skip


def _large_mlp() -> nn.Module:
    return mlp(784, 4096, 3360, 10)


CASES = {
    "MLP 784-1024-10": Case(lambda: mlp(784, 1024, 10), torch.optim.SGD, 50, {_OURS: 1.12, _TORCH: 1.25}),
    "MNIST CNN": Case(_cnn, torch.optim.SGD, 30, {_OURS: 1.04, _TORCH: 1.10}),
    "MLP of 17 M": Case(_large_mlp, torch.optim.SGD, 3, {_OURS: 1.06, _TORCH: 1.25, _SHARDED: 0.95}),
    "MLP of 17 M with Adam": Case(_large_mlp, torch.optim.Adam, 2, {_SHARDED: 0.85, _DIVIDED: 0.85}),
}
EPOCHS = {
    "MNIST CNN": (CASES["MNIST CNN"], 10_000),
    "digits CNN": (Case(digits_cnn, torch.optim.Adam, 30, {}, side=8), 1_797),
}
"""By name: a case, and the number of images in an epoch."""
_LEAST_SPEEDUP = 1.9
_EPOCH_WAYS = {"one rank": (1, _NONE), "two ranks": (2, _OURS), "two ranks apart": (2, _NONE)}
"""By name: a number of ranks and a variant. Two ranks without communication show the best possible speed of two
processes on this machine."""


class _Trainer:
    """One variant of one case on this rank: a model, an optimizer and a batch."""

    def __init__(self, case: Case, variant: str, gloo: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        module = case.build()
        group = gloo if variant.endswith("Gloo") else None
        if variant == _SHARDED:
            self.optimizer = phalanx.ZeroRedundancyOptimizer(
                module.parameters(), case.optimizer, lr=1e-3, share_parameters=True
            )
        else:
            self.optimizer = case.optimizer(module.parameters(), lr=1e-3)
        self.model = module
        if variant.startswith("phalanx"):
            self.model = phalanx.DistributedDataParallel(module, process_group=group)
        elif variant.startswith("torch"):
            self.model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        self.images = torch.randn(_BATCH, 1, case.side, case.side)
        self.labels = torch.randint(10, (_BATCH,))
        self._divides = variant == _DIVIDED
        self._shards: Shards | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        if self._shards is not None:
            self._shards.step(self.optimizer.step)
            return
        self.optimizer.step()
        if self._divides:  # after the first step, because only then the optimizer has its state
            parameters = divisible(self.optimizer, [*self.model.parameters()])
            self._shards = Shards(self.optimizer, parameters, dist.group.WORLD)
            self.model.divide_averaging(self._shards)

    def seconds(self, num_steps: int) -> float:
        """Return the time of `num_steps` steps. One step and a barrier precede them and do not count."""
        self.step()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        return time.perf_counter() - begin


def _turns(names: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of each round with every name; every second round is reversed, and round -1 is a warm-up."""
    for number in range(-1, rounds):
        for name in names[:: 1 if number % 2 else -1]:
            yield number, name


def _start(rank: int) -> None:
    """Join the group with one thread, pinned to a CPU of this rank's own, as under `phalanx run`."""
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    dist.init_process_group("phalanx")


def measure_steps(rank: int, case_name: str, rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds per step, by variant and round; for our DDP, also the seconds of each of `_PARTS`."""
    _start(rank)
    gloo = dist.new_group(backend="gloo")
    case = CASES[case_name]
    variants = [variant for variant in _VARIANTS if variant not in (_SHARDED, _DIVIDED) or variant in case.most]
    trainers = {variant: _Trainer(case, variant, gloo) for variant in variants}
    samples: dict[str, list[float]] = {variant: [] for variant in (*variants, *_PARTS)}
    for number, variant in _turns(variants, rounds):
        seconds = trainers[variant].seconds(case.num_steps) / case.num_steps
        ours = trainers[_OURS].model
        parts = [part_s / (case.num_steps + 1) for part_s in (ours.take_averaging_s(), ours.take_waiting_s())]
        if number >= 0:
            samples[variant].append(seconds)
            for name, part_s in zip(_PARTS, parts, strict=True) if variant == _OURS else ():
                samples[name].append(part_s)
    dist.destroy_process_group()
    return samples


def measure_epochs(rank: int, name: str, rounds: int, num_images: int) -> dict[str, list[float]]:
    """Return the seconds of an epoch of a CNN, by `_EPOCH_WAYS` and round."""
    _start(rank)
    case, _ = EPOCHS[name]
    trainers = {variant: _Trainer(case, variant, None) for variant in (_NONE, _OURS)}
    samples: dict[str, list[float]] = {way: [] for way in _EPOCH_WAYS}
    for number, way in _turns(list(samples), rounds):
        size, variant = _EPOCH_WAYS[way]
        dist.barrier()
        begin = time.perf_counter()
        if rank < size:
            for _ in range(-(-num_images // (_BATCH * size))):
                trainers[variant].step()
        dist.barrier()  # a rank that does not train in this way sleeps here
        if number >= 0:
            samples[way].append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return samples


def measure_memory(rank: int, sharded: bool) -> float:
    """Return this rank's memory for parameters and Adam's state, in MiB; a shared page is divided among the ranks."""
    dist.init_process_group("phalanx")
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # imports all modules that Adam needs before memory is measured
    before = proportional_mib()
    module = _large_mlp()
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if sharded:
        optimizer: torch.optim.Optimizer = phalanx.ZeroRedundancyOptimizer(
            parameters, torch.optim.Adam, lr=1e-3, share_parameters=True
        )
    else:
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    used = proportional_mib() - before
    dist.barrier()
    dist.destroy_process_group()
    return used


def proportional_mib() -> float:
    """Return this process's memory in MiB; each shared page is divided among the processes that map it."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _mean_of_ranks(results: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {
        name: [statistics.mean(times) for times in zip(*(r[name] for r in results), strict=True)] for name in results[0]
    }


def _ratio(samples: dict[str, list[float]], name: str, to: str) -> float:
    return median_ratio(samples[name], samples[to])


def _print_case(console: Console, name: str, samples: dict[str, list[float]]) -> list[str]:
    """Print a table, and return the verdicts on the case's targets."""
    table = Table("", "median", "ratio", title=name, title_justify="left")
    for variant, times in samples.items():
        table.add_row(variant, f"{statistics.median(times) * 1e3:.2f} ms", f"{_ratio(samples, variant, _NONE):.2f}")
    console.print(table)
    ratios = {variant: _ratio(samples, variant, _NONE) for variant in CASES[name].most}
    return [
        verdict_line(
            ratios[variant] <= most,
            f"{name}, {variant}: {ratios[variant]:.3f} of the step without communication (at most {most})",
        )
        for variant, most in CASES[name].most.items()
    ]


def _plot(path: Path, steps: dict[str, dict[str, list[float]]]) -> None:
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (name, samples) in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps.items(), strict=True):
        variants = [variant for variant in samples if variant != _NONE][::-1]
        axes.barh(variants, [_ratio(samples, variant, _NONE) for variant in variants], color="#d62728")
        for at, variant in enumerate(variants):
            if variant in CASES[name].most:
                axes.plot([CASES[name].most[variant]] * 2, [at - 0.4, at + 0.4], color="black")
        axes.axvline(1, color="gray", linestyle=":")
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7, labelleft=axes.get_subplotspec().is_first_col())
    figure.supxlabel("time of a step, in steps without communication (black: target)", fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ddp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each variant (default 15)")
    parser.add_argument("--only", default=",".join(CASES), help="cases to measure, separated by commas")
    parser.add_argument("--images", type=int, help="images of an epoch (default: those of MNIST's test set, or digits)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for ddp.json and ddp.png")
    record.add_arguments(parser, "ddp.json")
    given = parser.parse_args()
    console = Console(width=100, highlight=False)
    steps, parts, verdicts = {}, {}, []
    names = parse_names(given.only, CASES, parser)
    for name in names:
        steps[name] = _mean_of_ranks(phalanx.spawn(measure_steps, (name, given.rounds), nprocs=2))
        parts[name] = {part: steps[name].pop(part) for part in _PARTS}
        verdicts += _print_case(console, name, steps[name])
        averaging_ms, waiting_ms = (statistics.median(times) * 1e3 for times in parts[name].values())
        console.print(
            f"averaging takes {averaging_ms:.2f} ms of ours, {waiting_ms:.2f} ms of it until both ranks are there"
        )
    epochs = {}
    for name, (_, num_images) in EPOCHS.items():
        num_images = given.images or num_images
        arguments = (name, given.rounds, num_images)
        epochs[name] = _mean_of_ranks(phalanx.spawn(measure_epochs, arguments, nprocs=2))
        speedup = _ratio(epochs[name], "one rank", "two ranks")
        apart = _ratio(epochs[name], "one rank", "two ranks apart")
        text = (
            f"an epoch of {num_images:,} images of the {name} on two ranks: {speedup:.2f} times as fast as on one, "
            f"{apart:.2f} times without communication"
        )
        verdicts.append(verdict_line(speedup >= _LEAST_SPEEDUP, f"{text} (at least {_LEAST_SPEEDUP})"))
    os.environ["PHALANX_MEMORY"] = "default"  # otherwise memory of freed gradients would be kept and would count
    memory = {how: sum(phalanx.spawn(measure_memory, (how == "sharded",), nprocs=2)) for how in ("plain", "sharded")}
    model_mib = sum(p.numel() for p in _large_mlp().parameters()) * 4 / 2**20
    for line in verdicts:
        console.print(line)
    console.print(
        f"parameters and Adam's state of two ranks: {memory['plain'] / model_mib:.1f} times the model's "
        f"{model_mib:.0f} MiB as they are, {memory['sharded'] / model_mib:.1f} with ZeroRedundancyOptimizer "
        "in shared memory"
    )
    given.out.mkdir(parents=True, exist_ok=True)
    raw = {
        "steps": steps,
        "parts": parts,
        "epochs": epochs,
        "memory_mib": memory,
        "verdicts": verdicts,
    }
    columns = [("model", "text"), *((variant, "fraction") for variant in _VARIANTS if variant != _NONE)]
    rows = [
        [name, *(_ratio(steps[name], variant, _NONE) if variant in steps[name] else None for variant, _ in columns[1:])]
        for name in names
    ]
    table = record.Table("ddp", columns, rows)
    shared = "ZeroRedundancyOptimizer, shared parameters"
    memory_rows = [["Adam", memory["plain"] / model_mib], [shared, memory["sharded"] / model_mib]]
    tables = [table, record.Table("memory", [("optimizer", "text"), ("times the model", "fraction")], memory_rows)]
    record.write(given.json or given.out / "ddp.json", given.note, machine_facts(""), tables, raw)
    _plot(given.out / "ddp.png", steps)


if __name__ == "__main__":
    main()
