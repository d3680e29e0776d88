"""`shard_iterable`: a stream that every rank and every worker reads a part of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.data.replica import rank_and_size


def shard_iterable(
    iterable: Iterable[Any], num_replicas: int | None = None, rank: int | None = None
) -> IterableDataset[Any]:
    """Return a dataset that yields this rank's part of `iterable`, each item once over all ranks and their workers.

    Every worker reads the whole stream and keeps its share, so it must come out the same each time it is read. While it
    is read, ``get_worker_info()`` returns None, so a stream that divides itself among workers is not divided twice.

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
    return Shard(iterable, *rank_and_size(rank, num_replicas))


class Shard(IterableDataset[Any]):
    """This rank's part of a stream, and of it this worker's.

    Args:
        over_workers: False: the stream divides itself among the workers of a rank, as torch asks of it.
    """

    def __init__(self, iterable: Iterable[Any], rank: int, num_replicas: int, *, over_workers: bool = True) -> None:
        # Taken here: a worker is in no process group.
        self._iterable, self._rank, self._num_replicas = iterable, rank, num_replicas
        self._over_workers = over_workers

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None or not self._over_workers:
            return islice(iter(self._iterable), self._rank, None, self._num_replicas)
        # Ranks take turns first, so that they differ by one item at most however many workers they have.
        first = worker.id * self._num_replicas + self._rank
        return islice(_read_whole(self._iterable), first, None, self._num_replicas * worker.num_workers)


def _read_whole(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yield all items, whatever the iterable would do for this worker alone."""
    with _outside_of_workers():
        items = iter(iterable)
    end = object()
    while True:
        with _outside_of_workers():
            item = next(items, end)
        if item is end:
            return
        yield item


@contextlib.contextmanager
def _outside_of_workers() -> Iterator[None]:
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info
