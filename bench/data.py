"""``python -m bench.data``: how fast a loader's workers hand over records, beside torch's own loader.

The loaders take turns within one process, on the same dataset, so that other load on the machine affects all equally.
torchdata's StatefulDataLoader and SPDL, which loads in threads, take part if they are installed. WebDataset and
MosaicML's Streaming read shards, but hand batches over through torch's loader, so torch's column applies to them, too.
Each record is one tensor that a worker has in its memory; a batch is one record, which torch's collate function copies.
The rank reads one byte of each page. The first batches of a turn are not timed: workers start, and blocks are new.

The last table gives the time that a batch of 100 MiB takes from worker to rank, in multiples of the time for one copy.
One worker hands over a batch while the rank waits for it, and the rank then reads every byte. One copy is a `copy_`
between tensors whose pages exist. The time for reading the same bytes from the rank's own memory is subtracted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import phalanx
from bench import record
from bench.plan import parse_size, size_text
from bench.report import machine_facts

LOADERS: dict[str, Callable[..., Any]] = {"phalanx": phalanx.DataLoader, "torch": DataLoader}
_WARM_UP = 16  # first batches of a turn, which are not timed
_PAGE_BYTES = 4096


class Records(Dataset[torch.Tensor]):
    """The same record, `num_records` times."""

    def __init__(self, num_bytes: int, num_records: int) -> None:
        self._record = torch.ones(num_bytes, dtype=torch.uint8)
        self._num_records = num_records

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._record


def loader_of_torchdata(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **options)


def loader_of_spdl(dataset: Any, batch_size: int, num_workers: int) -> Iterator[Any]:
    """Yield batches that SPDL loads in `num_workers` threads of this process."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(range(len(dataset))).pipe(dataset.__getitem__, concurrency=num_workers)
    builder = builder.aggregate(batch_size).pipe(default_collate, concurrency=num_workers).add_sink(2 * num_workers)
    pipeline = builder.build(num_threads=num_workers)
    with pipeline.auto_stop():
        yield from pipeline


LOADERS |= {
    name: make
    for name, make in {"torchdata": loader_of_torchdata, "spdl": loader_of_spdl}.items()
    if importlib.util.find_spec(name)
}


def records_per_s(make: Callable[..., Any], num_bytes: int, num_records: int, num_workers: int) -> float:
    """Return the rate at which a new loader's records arrive once it has started."""
    loader = make(Records(num_bytes, _WARM_UP + num_records), batch_size=1, num_workers=num_workers)
    began_s = 0.0
    for number, batch in enumerate(loader):
        if number == _WARM_UP:
            began_s = time.perf_counter()
        batch.view(-1)[::_PAGE_BYTES].sum()
    return (num_records - 1) / (time.perf_counter() - began_s)


def turns_of(measure: Callable[[str], float], num_turns: int, names: list[str]) -> dict[str, list[float]]:
    """Let the loaders take turns; every second turn is in reverse order."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_turns):
        for name in reversed(names) if number % 2 else names:
            found[name].append(measure(name))
    return found


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


class OnDemand(Records):
    """Records that a worker loads only on demand: once the rank has written a byte into a pipe."""

    def __init__(self, num_bytes: int, num_records: int) -> None:
        super().__init__(num_bytes, num_records)
        self._asked, self._ask = os.pipe()

    def ask(self) -> None:
        os.write(self._ask, b"x")

    def close(self) -> None:
        os.close(self._ask)
        os.close(self._asked)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._ask >= 0:  # the worker's copy of this end would keep the pipe open after the rank's death
            os.close(self._ask)
            self._ask = -1
        if not os.read(self._asked, 1):
            raise EOFError("the rank has ended")
        return self._record


def copies_of_a_batch(make: Callable[..., DataLoader[Any]], num_bytes: int, num_batches: int) -> float:
    """Return the time that a batch takes from a worker's memory to the rank, in multiples of the time for one copy."""
    own, other = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    dataset = OnDemand(num_bytes, _WARM_UP + num_batches)
    spent = []

    def hand_over(batches: Iterator[torch.Tensor]) -> None:
        dataset.ask()
        next(batches).view(-1).view(torch.int64).max()

    arriving = iter(make(dataset, batch_size=1, num_workers=1, multiprocessing_context="fork"))
    for _ in range(_WARM_UP + num_batches):
        copy_s, read_s = _timed(lambda: other.copy_(own)), _timed(lambda: own.view(torch.int64).max())
        spent.append((_timed(lambda: hand_over(arriving)) - read_s) / copy_s)
    dataset.close()
    return statistics.median(spent[_WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1K,100K,10M", help="sizes of a record, default 1K,100K,10M")
    parser.add_argument("--mib", type=int, default=100, help="size of the batch that is handed over, default 100 MiB")
    parser.add_argument("--workers", type=int, default=2, help="workers of each loader, default 2")
    parser.add_argument("--turns", type=int, default=5, help="turns of each loader, default 5")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn, about; default 2")
    record.add_arguments(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[record.Value]] = []
    for size in map(parse_size, given.sizes.split(",")):
        how = size, max(8, int(given.seconds * min(1000.0, 1e9 / size))), given.workers
        found = turns_of(lambda name, how=how: records_per_s(LOADERS[name], *how), given.turns, [*LOADERS])
        rates = {name: statistics.median(found[name]) for name in LOADERS}
        ratio = statistics.median(one / other for one, other in zip(found["phalanx"], found["torch"], strict=True))
        rows.append([size, *(1 / rate for rate in rates.values()), ratio])
        told = "   ".join(f"{name} {rate:10.1f}" for name, rate in rates.items())
        print(f"{size_text(size):>8}  records/s: {told}   phalanx/torch {ratio:6.2f}")
    found = turns_of(
        lambda name: copies_of_a_batch(LOADERS[name], given.mib << 20, 8), given.turns, ["phalanx", "torch"]
    )
    ours, torchs = (statistics.median(rates) for rates in found.values())
    print(f"{given.mib} MiB from worker to rank: phalanx {ours:.2f} copies   torch {torchs:.2f} copies")
    columns = [("record", "bytes"), *((f"{name}, each", "seconds") for name in LOADERS), ("ratio", "ratio")]
    tables = [
        record.Table("records", columns, rows),
        record.Table("copies", [("phalanx", "fraction"), ("torch", "fraction")], [[ours, torchs]]),
    ]
    record.write(given.json, given.note, machine_facts(""), tables, {})


if __name__ == "__main__":
    main()
