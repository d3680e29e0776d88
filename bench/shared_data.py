"""``python -m bench.shared_data``: the memory that a dataset takes with several ranks and workers, and its restart.

Each rank reads the whole dataset through a loader with workers, once with ``phalanx.share`` and once as usual, in new
processes for each. The memory is the sum of the processes' proportional set sizes (PSS), less what the same processes
take with an empty dataset, in multiples of the size of one copy. "Usual" is what torch's users do: each rank builds the
dataset before its loader forks workers. The records are dicts, whose reference counts make forked workers copy their
pages.

Then a dataset of images that are decompressed on each access is read for three epochs, with a cache and without. The
first epoch, in which the cache is filled, does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.testing import run_ranks
from phalanx.wire.rank_group import RankGroup

_LIMIT_S = 600.0
_ROW = 1 << 18  # number of elements in a sample of 1 MiB
_IMAGE = 3, 224, 224
_EPOCHS = 3


def tensors(size: int) -> Any:
    """Return a tensor of samples of 1 MiB each; `size` in bytes."""
    return torch.ones(max(size, 4 * _ROW) // 4 // _ROW, _ROW)


def records(number: int) -> Any:
    """Return a list of small records."""
    return [{"id": one, "text": f"record number {one}", "label": one % 10} for one in range(max(number, 8))]


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))


def hold(_rank: int, _world_size: int, kind: str, size: int, is_shared: bool, num_workers: int) -> tuple[int, float]:
    """Return the memory of this rank and its workers after an epoch, and the seconds for building the dataset."""
    phalanx.init()
    build: Callable[[int], Any] = globals()[kind]
    began_s = time.perf_counter()
    data = phalanx.share(lambda: build(size)) if is_shared else build(size)
    built_s = time.perf_counter() - began_s
    loader = DataLoader(
        data, batch_size=None, num_workers=num_workers, persistent_workers=True, collate_fn=lambda item: 0
    )
    for _ in loader:
        pass
    return taken_bytes(), built_s


def taken_bytes() -> int:
    """Return the memory of this rank and its workers. All ranks call this, and measure at the same time."""
    RankGroup().barrier(_LIMIT_S)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    used = sum(pss_bytes(pid) for pid in (os.getpid(), *map(int, children)))
    RankGroup().barrier(_LIMIT_S)
    return used


def copy_bytes(kind: str, size: int) -> int:
    """Return the memory that one copy of the dataset takes in one process."""
    return size if kind == "tensors" else run_ranks(grown, 1, size, init=False)[0]


def grown(_rank: int, _world_size: int, number: int) -> int:
    """Return the growth of a process's memory, in bytes, when it makes the records."""
    before = pss_bytes(os.getpid())
    made = records(number)
    return pss_bytes(os.getpid()) - before if made else 0


class Images(Dataset[Any]):
    """Compressed images; each access decompresses one and makes a new tensor."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        image = torch.randint(0, 40, _IMAGE, dtype=torch.uint8, generator=generator)  # as noisy as a photograph
        self.compressed, self.length = zlib.compress(bytes(image.flatten().tolist())), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(self.compressed)), dtype=torch.uint8).view(_IMAGE)


def epochs(_rank: int, _world_size: int, length: int, has_cache: bool, num_workers: int) -> tuple[float, int]:
    """Return the seconds of the epochs after the first one, and the memory of this rank and its workers."""
    phalanx.init()
    images = phalanx.share(Images(length), cache=has_cache)
    loader = phalanx.DataLoader(
        images, batch_size=16, shuffle=True, num_workers=num_workers, persistent_workers=True, drop_last=True
    )
    began_s = 0.0
    for epoch in range(_EPOCHS):
        RankGroup().barrier(_LIMIT_S)
        if epoch < 2:
            began_s = time.perf_counter()
        loader.set_epoch(epoch)
        for _ in loader:
            pass
    return time.perf_counter() - began_s, taken_bytes()


def measure_cache(length: int, num_ranks: int, num_workers: int, num_rounds: int) -> None:
    """Print how fast images are read with a cache and without."""
    size_bytes = length * torch.Size(_IMAGE).numel()
    rates: dict[bool, list[float]] = {True: [], False: []}
    copies = []
    for _ in range(num_rounds):
        used = {}
        for has_cache in (True, False):
            results = run_ranks(epochs, num_ranks, length, has_cache, num_workers, init=False, timeout_s=_LIMIT_S)
            rates[has_cache].append(length * (_EPOCHS - 1) / max(took_s for took_s, _ in results))
            used[has_cache] = sum(memory for _, memory in results)
        copies.append((used[True] - used[False]) / size_bytes)
    print(
        f"images, {num_ranks} ranks x {num_workers} workers, one copy {size_bytes / 2**20:.0f} MiB: with a cache "
        f"{statistics.median(rates[True]):.0f} samples/s after the first epoch and {statistics.median(copies):.2f} "
        f"copies; without {statistics.median(rates[False]):.0f} samples/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each rank's loader (default %(default)s)")
    parser.add_argument("--mib", type=int, default=2048, help="size of the tensors, in MiB (default %(default)s)")
    parser.add_argument("--records", type=int, default=1_000_000, help="number of records (default %(default)s)")
    parser.add_argument("--images", type=int, default=2000, help="number of images (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default %(default)s)")
    args = parser.parse_args()
    for kind, size in (("tensors", args.mib << 20), ("records", args.records)):
        one = copy_bytes(kind, size)
        taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(args.rounds):
            for is_shared in (True, False):
                empty, full = (
                    run_ranks(hold, args.ranks, kind, some, is_shared, args.workers, init=False, timeout_s=_LIMIT_S)
                    for some in (0, size)
                )
                used = sum(rank[0] for rank in full) - sum(rank[0] for rank in empty)
                taken[is_shared].append((used / one, max(rank[1] for rank in full)))
        (ours, ours_s), (usual, usual_s) = (
            [statistics.median(column) for column in zip(*taken[is_shared], strict=True)] for is_shared in (True, False)
        )
        print(
            f"{kind}, {args.ranks} ranks x {args.workers} workers, one copy {one / 2**20:.0f} MiB: shared {ours:.2f} "
            f"copies, built in {ours_s:.2f} s; usual {usual:.2f} copies, built in {usual_s:.2f} s",
            flush=True,
        )
    measure_cache(args.images, args.ranks, args.workers, args.rounds)


if __name__ == "__main__":
    main()
