"""`shard_iterable`: a stream that every rank and every worker reads a part of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from phalanx.data.place import rank_and_size


def shard_iterable(
    iterable: Iterable[Any], num_replicas: int | None = None, rank: int | None = None
) -> IterableDataset[Any]:
    """Return a dataset that yields this rank's part of `iterable`, each item once over all ranks and their workers.

    Every worker reads the whole stream and keeps its share, so it must come out the same each time it is read.

    Args:
        iterable: Can be iterated anew by every worker: an ``IterableDataset``, a list, but no generator.
        num_replicas: Ranks that share it; default: those of the default group.
        rank: This one.

    Raises:
        TypeError: `iterable` is an iterator: it could be read once only.
        RuntimeError: Several ranks, and no process group yet.
        ValueError: `rank` is outside the group.
    """
    if isinstance(iterable, Iterator):
        raise TypeError(f"an iterator can be read once only, got {iterable!r}: pass what it came from")
    return _Shard(iterable, *rank_and_size(rank, num_replicas))


class _Shard(IterableDataset[Any]):
    def __init__(self, iterable: Iterable[Any], rank: int, num_replicas: int) -> None:
        # Taken here: a worker is in no process group.
        self._iterable, self._rank, self._num_replicas = iterable, rank, num_replicas

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        num_workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        # Ranks take turns first, so that they differ by one item at most however many workers they have.
        first = number * self._num_replicas + self._rank
        return islice(iter(self._iterable), first, None, self._num_replicas * num_workers)
