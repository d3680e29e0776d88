"""`shard_iterable`: a stream divided among ranks and their workers.

An ``IterableDataset`` does not say whether it divides itself among workers or ranks. For workers, torch's rule holds:
each worker yields the whole stream, unless the stream divides itself. Ranks take turns at the items of a stream. Taking
turns loses items if the stream already divides itself among ranks, so the loader warns and names ``is_own_part``. A
`Partition` may be meant for all ranks, such as the training set, or be one rank's own part, so the loader requires
``is_own_part`` for it.
"""

from __future__ import annotations

import copy
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

    A `phalanx.DataLoader` of it resumes in mid-epoch, on any number of ranks and workers. It reads the stream again up
    to the position, unless the stream has ``skip(n)``, as in Hugging Face ``datasets``, which returns the rest of it.

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

    Item i of the stream goes to rank i % W of W ranks. A rank's items make its batches in order, and of its K workers
    number n % K makes batch n. torch takes batches from the workers in turn, so a rank's batches and their order do not
    depend on K. After batch n on every rank, the items taken are a prefix of the stream. So a position is one number,
    at which any number of ranks and workers can go on, with any batch size. Only the last batch may be short.

    Args:
        over_workers: Whether this class divides the part among the rank's workers; False leaves that to the stream, as
            torch does.
    """

    def __init__(self, iterable: Iterable[Any], rank: int, num_replicas: int, *, over_workers: bool = True) -> None:
        # Stored now, because a worker has no process group, so it could not find out its rank.
        self._iterable, self.rank, self.num_replicas = iterable, rank, num_replicas
        self.over_workers = over_workers
        self._start = self._num_last = 0
        self._batch_size = 1

    def placed(self, start: int, num_last: int, batch_size: int) -> Shard:
        """Return this part in the form that a loader needs.

        Args:
            start: Place in the stream where the first iteration begins.
            num_last: Most items, on all ranks, in the batch that ends at `start`. The last one of an epoch may have
                been short, and a stream shows its length only at its end.
            batch_size: Number of items in a batch of one rank.
        """
        placed = copy.copy(self)
        placed._start, placed._num_last, placed._batch_size = start, num_last, batch_size
        return placed

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the stream, if the stream has a ``set_epoch``."""
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of items in this part; a TypeError if the stream has no length."""
        return len(range(self.rank, len(self._iterable), self.num_replicas))  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # as without __len__

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info() if self.over_workers else None
        start, self._start = self._start, 0  # a persistent worker iterates again, from the beginning
        own = islice(self._items_from(start, is_whole=worker is not None), self.rank, None, self.num_replicas)
        if worker is None:
            return own
        number, num_workers, size = worker.id, worker.num_workers, self._batch_size
        return (item for place, item in enumerate(own) if place // size % num_workers == number)

    def _items_from(self, start: int, *, is_whole: bool) -> Iterator[Any]:
        read = _read_whole if is_whole else iter
        skip = getattr(self._iterable, "skip", None)
        if start and callable(skip):
            return read(skip(start))
        items = read(self._iterable)
        # Read now rather than with the first batch, so that what the stream draws meanwhile can be undone.
        num_read = sum(1 for _ in islice(items, start))
        if num_read <= start - self._num_last and start:
            raise ValueError(
                f"rank {self.rank}: DataLoader: the stream ended after {num_read:,} items, before the position "
                f"{start:,} at which to go on: pass the stream that the state was saved with"
            )
        return items


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
