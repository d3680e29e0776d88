"""`shard_iterable`: a stream divided among ranks and their workers.

An ``IterableDataset`` does not say whether it divides itself among workers or ranks. For workers, torch's rule holds:
each worker yields the whole stream, unless the stream divides itself. Ranks take turns at the items of a stream. Taking
turns loses items if the stream already divides itself among ranks, so the loader warns and names ``is_own_part``. A
`Partition` may be meant for all ranks, such as the training set, or be one rank's own part, so the loader requires
``is_own_part`` for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from phalanx._torch import outside_of_workers
from phalanx.data.replica import rank_and_size


def shard_iterable(
    iterable: Iterable[Any], num_replicas: int | None = None, rank: int | None = None
) -> IterableDataset[Any]:
    """Return a dataset with this rank's part of `iterable`. All ranks and their workers together yield each item once.

    Every worker reads the whole stream and keeps its share, so the stream must yield the same items each time. While
    the stream is read, ``get_worker_info()`` returns None. Otherwise, a stream that divides itself among workers would
    be divided twice.

    Args:
        iterable: Stream that every worker can iterate anew: an ``IterableDataset`` or a list, but not a generator.
        num_replicas: Number of ranks that share the stream; default: the size of the default group.
        rank: Rank of this process among these ranks; default: its rank in the default group.

    Raises:
        TypeError: `iterable` is an iterator, which can be read only once.
        RuntimeError: There are several ranks and no process group yet.
        ValueError: `rank` is outside the group.

    Example:
        >>> list(phalanx.shard_iterable("abcde", num_replicas=2, rank=0))
        ['a', 'c', 'e']
    """
    if isinstance(iterable, Iterator):
        raise TypeError(f"an iterator can be read only once, got {iterable!r}: pass the iterable that it came from")
    return Shard(iterable, *rank_and_size(rank, num_replicas))


class Shard(IterableDataset[Any]):
    """This rank's part of a stream, divided among the rank's workers.

    Args:
        over_workers: Whether this class divides the part among the rank's workers; False leaves that to the stream, as
            torch does.
    """

    def __init__(self, iterable: Iterable[Any], rank: int, num_replicas: int, *, over_workers: bool = True) -> None:
        # Stored now, because a worker has no process group, so it could not find out its rank.
        self._iterable, self._rank, self._num_replicas = iterable, rank, num_replicas
        self._over_workers = over_workers

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None or not self._over_workers:
            return islice(iter(self._iterable), self._rank, None, self._num_replicas)
        # Worker 0 of each rank takes an item in turn, then worker 1 of each rank, and so on. So the ranks' numbers of
        # items differ by at most one, however many workers they have.
        first = worker.id * self._num_replicas + self._rank
        return islice(_read_whole(self._iterable), first, None, self._num_replicas * worker.num_workers)


def _read_whole(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yield all items of an iterable, even if it divides itself among workers."""
    with outside_of_workers():
        items = iter(iterable)
    end = object()
    while True:
        with outside_of_workers():
            item = next(items, end)
        if item is end:
            return
        yield item
