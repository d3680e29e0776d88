"""``python -m bench.checkpoint``: how much time saving costs the training, and how long a save takes in the background.

All measurements run on one rank and on two, with one thread each, in turns in the same processes. The time for which
`save` blocks a rank is compared with a memcpy of the state. The time until the checkpoint is published (copied, hashed,
written, synced) is compared with torch.save, with and without fsync. The time of a snapshot in memory is compared with
a training step of a model.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import phalanx
import phalanx.checkpoint as ckpt
from bench import record
from bench.ddp import _large_mlp
from bench.report import machine_facts, median_ratio, verdict_line

_BATCH = 64
_MOST_BLOCKED = 1.5  # limit for `save`, as a multiple of the time of a memcpy of the state
_LEAST_SPEED = 0.8  # least speed, as a fraction of the speed of torch.save with fsync
_OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
Samples = dict[str, list[float]]


def _start(rank: int, world_size: int) -> None:
    """Start as under `phalanx run`: with one thread, and pinned with its background threads to a share of the CPUs."""
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cpus[rank::world_size]))
    dist.init_process_group("phalanx")


def _seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _torch_save(state: dict[str, torch.Tensor], path: str, sync: bool) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def measure_saves(rank: int, world_size: int, folder: str, size_mib: int, rounds: int) -> Samples:
    """Return this rank's seconds for each measurement, by name; the first save is a measurement of its own."""
    _start(rank, world_size)
    num_tensors = 16
    state = {f"t{i}": torch.randn(size_mib * 2**18 // num_tensors) for i in range(num_tensors)}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            target[name].copy_(tensor)

    def save_with_torch(sync: bool) -> float:
        """Save the whole state from rank 0 to one file, as most scripts do; return the seconds."""
        path = f"{folder}/torch.pt"
        took = _seconds(lambda: _torch_save(state, path, sync) if rank == 0 else None)
        dist.barrier()
        if rank == 0:
            os.unlink(path)
        return took

    samples: Samples = {
        name: [] for name in ("memcpy", "save", "in the background", "torch.save + fsync", "torch.save")
    }
    first: Samples = {"first memcpy": [_seconds(copy)]}
    for number in range(-1, rounds):
        round_ = {"memcpy": _seconds(copy)}
        round_["save"] = _seconds(functools.partial(ckpt.save, f"{folder}/c", state, number + 1))
        begin = time.perf_counter()
        ckpt.wait()
        round_["in the background"] = time.perf_counter() - begin
        if rank == 0:
            ckpt.prune(f"{folder}/c", keep_last=1)
        round_["torch.save + fsync"] = save_with_torch(True)
        round_["torch.save"] = save_with_torch(False)
        if number < 0:
            first["first save"] = [round_["save"]]
        else:
            for name, took in round_.items():
                samples[name].append(took)
    dist.destroy_process_group()
    return {**samples, **first}


def _take(state: dict[str, object], number: int) -> None:
    problem = ckpt.snapshot("c", state, number)
    assert not problem, problem


def measure_snapshots(rank: int, world_size: int, optimizer_name: str, rounds: int) -> Samples:
    """Return this rank's seconds for a step of the MLP with 17 M parameters, and for a snapshot of its state."""
    _start(rank, world_size)
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(_large_mlp())
    optimizer = _OPTIMIZERS[optimizer_name](model.parameters(), lr=1e-3)
    images, labels = torch.randn(_BATCH, 1, 28, 28), torch.randint(10, (_BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    samples: Samples = {"step": [], "snapshot": []}
    for number in range(-3, rounds):
        took = _seconds(step)
        state = {"model": model, "optimizer": optimizer, "random": phalanx.RandomState()}
        also = _seconds(functools.partial(_take, state, number + 3))
        if number >= 0:
            samples["step"].append(took)
            samples["snapshot"].append(also)
    dist.destroy_process_group()
    return samples


def _slowest_rank(results: list[Samples]) -> Samples:
    """Return the times of the slowest rank, because a save has finished only when every rank has finished it."""
    return {name: [max(times) for times in zip(*(r[name] for r in results), strict=True)] for name in results[0]}


def _ratio(samples: Samples, name: str, to: str) -> float:
    return median_ratio(samples[name], samples[to])


def _judge(name: str, samples: Samples) -> list[str]:
    blocked, speed = _ratio(samples, "save", "memcpy"), _ratio(samples, "torch.save + fsync", "in the background")
    return [
        verdict_line(blocked <= _MOST_BLOCKED, f"{name}: save blocks {blocked:.2f} memcpys (at most {_MOST_BLOCKED})"),
        verdict_line(
            speed >= _LEAST_SPEED,
            f"{name}: the background is {speed:.2f} times as fast as torch.save + fsync (at least {_LEAST_SPEED})",
        ),
    ]


def _print_saves(console: Console, name: str, size_mib: int, samples: Samples) -> None:
    table = Table("", "median", "MiB/s", "memcpys", title=f"{size_mib} MiB, {name}", title_justify="left")
    for what, times in samples.items():
        median = statistics.median(times)
        memcpys = median / statistics.median(samples["memcpy"])
        table.add_row(what, f"{median * 1e3:.1f} ms", f"{size_mib / median:,.0f}", f"{memcpys:.2f}")
    console.print(table)


def _tables(saves: dict[str, Samples], snapshots: dict[str, Samples]) -> list[record.Table]:
    columns = [("ranks", "text"), ("what", "text"), ("median", "seconds"), ("memcpys", "fraction")]
    rows = [
        [ranks, what, statistics.median(times), statistics.median(times) / statistics.median(samples["memcpy"])]
        for ranks, samples in saves.items()
        for what, times in samples.items()
    ]
    names = ("step", "snapshot")
    of_snapshots = [("ranks, optimizer", "text"), *((name, "seconds") for name in names), ("of a step", "fraction")]
    snapshot_rows = [
        [name, *(statistics.median(samples[what]) for what in names), _ratio(samples, "snapshot", "step")]
        for name, samples in snapshots.items()
    ]
    return [record.Table("saves", columns, rows), record.Table("snapshots", of_snapshots, snapshot_rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--size-mib", type=int, default=256, help="size of the state (default 256)")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, separated by commas")
    parser.add_argument("--optimizers", default=",".join(_OPTIMIZERS), help="of the model, separated by commas")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="folder for checkpoint.json; files go there"
    )
    record.add_arguments(parser, "checkpoint.json")
    given = parser.parse_args()
    console = Console(width=100, highlight=False)
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ["PHALANX_SNAPSHOTS"] = f"/proc/{os.getpid()}/fd/{os.memfd_create('snapshots')}"  # as phalanx run does
    saves, snapshots, verdicts = {}, {}, []
    for world_size in map(int, given.ranks.split(",")):
        name = "one rank" if world_size == 1 else f"{world_size} ranks"
        folder = tempfile.mkdtemp(dir=given.out)
        try:
            args = (world_size, folder, given.size_mib, given.rounds)
            saves[name] = _slowest_rank(phalanx.spawn(measure_saves, args, nprocs=world_size))
        finally:
            shutil.rmtree(folder)
        _print_saves(console, name, given.size_mib, saves[name])
        verdicts += _judge(name, saves[name])
        for optimizer in given.optimizers.split(","):
            args = (world_size, optimizer, given.rounds)
            snapshots[f"{name}, {optimizer}"] = _slowest_rank(phalanx.spawn(measure_snapshots, args, nprocs=world_size))
    table = Table("", "step", "snapshot", "ratio", title="MLP of 17 M", title_justify="left")
    for name, samples in snapshots.items():
        step, snapshot = (statistics.median(samples[what]) for what in ("step", "snapshot"))
        ratio = f"{_ratio(samples, 'snapshot', 'step'):.3f}"
        table.add_row(name, f"{step * 1e3:.1f} ms", f"{snapshot * 1e3:.1f} ms", ratio)
    console.print(table)
    for line in verdicts:
        console.print(line)
    raw = {"saves": saves, "snapshots": snapshots, "verdicts": verdicts}
    path = given.json or given.out / "checkpoint.json"
    record.write(path, given.note, machine_facts(""), _tables(saves, snapshots), raw)


if __name__ == "__main__":
    main()
