"""`DataLoader`: torch's loader, for this rank's part of the data.

torch's loader draws a seed for its workers when an epoch begins, even if there are no workers. In a resumed epoch, the
earlier run has already made that draw. So when an epoch is resumed, the loader restores the generators after the draw.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._errors import warn_caller
from phalanx._torch import shield
from phalanx.data.handover.handing_over import handed_over
from phalanx.data.partition import Partition
from phalanx.data.positions import OF_ONE_PROCESS, position_of, samplers_of
from phalanx.data.random_state import random_state_kept
from phalanx.data.replica import rank_and_size
from phalanx.data.sampler import DistributedSampler, epoch_number
from phalanx.data.seeds import derive_seed, seed_process
from phalanx.data.shards import Shard
from phalanx.data.workers.results import Results, WorkersContext
from phalanx.record.loop import loading
from phalanx.wire.sockets import keep_paths_short

DIVIDING_LOADER = "a phalanx.DataLoader without a sampler, or one with sampler=phalanx.DistributedSampler(dataset)"
_END = object()
_TIMED_OUT = "DataLoader timed out"  # torch's error of a batch that may still come
_starting = threading.RLock()
"""Held while workers are started, because a loader's attributes are other ones meanwhile."""


def _renew_lock() -> None:
    global _starting
    _starting = threading.RLock()


@functools.cache
def _watch_forks() -> None:
    """Renew the lock in processes that are forked from now on: another thread may hold it meanwhile."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_renew_lock)


class DataLoader(torch_data.DataLoader[Any]):
    """torch's DataLoader, which loads this rank's part of the data. Arguments and defaults are torch's.

    Where torch's loader does nothing by default, this one does what a job of several ranks needs:

    - Without `sampler` and `batch_sampler`, a `DistributedSampler` divides the dataset among the ranks of the default
      group; `shuffle` and `drop_last` are passed to it. Without `drop_last`, this sampler pads if it shuffles, as
      torch's sampler does; if it does not shuffle, it yields each sample exactly once. It advances to the next epoch
      automatically; `set_epoch` chooses another epoch.
    - torch's samplers for a single process, such as ``RandomSampler``, do not divide the data, and neither does a list
      of indices. If such a sampler is as long as the dataset, rank 0 warns when training first iterates the loader,
      unless `is_own_part` is given.
    - Without `worker_init_fn`, each worker of each rank draws its own random numbers from Python, NumPy and torch.
    - Ranks take turns at the items of an ``IterableDataset``, so the dataset must yield the same items on each rank. As
      in torch, the dataset itself must divide its items among workers: a stream that does not look at
      ``get_worker_info()`` yields every item in every worker. `shard_iterable` divides any stream. `set_epoch` passes
      the epoch to a stream that has a ``set_epoch``; persistent workers then start anew.
    - Workers hand over batches in memory without a name, so the size of ``/dev/shm`` does not matter. Large tensors lie
      in blocks that a worker fills again when no tensor of this process lies in them any more; a batch may be kept for
      as long as it is needed. Where memfd_create is forbidden, or if torch's sharing strategy is ``file_system``, torch
      hands over batches in its own way.
    - If a worker dies, as it does when memory runs out, an error names the signal and the batch that the worker was
      loading; if native code has crashed, it names the line, too. With `worker_retries`, a new worker takes its place
      instead: each batch still comes once, in the same order, and the other workers go on. The error is raised where
      the rank waits for a batch, never in the middle of a step. If the dataset raises an exception in a worker, the
      message names the sample.
    - `state_dict` and `load_state_dict` resume in the middle of an epoch, on any number of ranks. With the same number
      of ranks, each rank gets the batches that it would have got without the interruption, and, if a `RandomState` is
      restored too, the same random numbers. Random numbers in workers are not resumed, so augmentation that runs in
      workers differs in the rest of that epoch.
    - So does a loader of `shard_iterable`, with any number of workers, and of any stream with at most one worker. A
      stream that divides itself needs the same numbers of ranks and workers, and torch's samplers need the same number
      of ranks. A sampler with ``state_dict`` and ``load_state_dict`` keeps its own position.

    Args:
        is_own_part: Whether the dataset is already this rank's own part, so that the loader does not divide it again.
            With several ranks, a `Partition` needs True or False. With a sampler, False confirms that every rank is
            meant to take all samples.
        worker_retries: Number of workers, in each epoch, that may die and are replaced. An exception of the dataset is
            not a death. The new worker has the number and the seed of the dead one but begins its random numbers anew:
            samples come out the same only if the dataset derives its random numbers from the sample's index. A batch
            that was being loaded is loaded again, so what `__getitem__` writes elsewhere, it may write twice.

    Raises:
        RuntimeError: There are several ranks and no process group yet.
        ValueError: The dataset is a `Partition`, and `is_own_part` does not say whether it is this rank's part; or the
            dataset is a stream, whose workers can't be replaced, and `worker_retries` is not 0.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(6))
        >>> loader = phalanx.DataLoader(data, batch_size=2, shuffle=False)
        >>> loader.set_epoch(0)
        >>> for (batch,) in loader:
        ...     print(batch.tolist())
        ...     position = loader.state_dict()
        ...     break
        [0, 1]
        >>> loader.load_state_dict(position)
        >>> [batch.tolist() for (batch,) in loader]
        [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        is_own_part: bool | None = None,
        worker_retries: int = 0,
    ) -> None:
        _check_retries(worker_retries, dataset)
        rank, num_replicas = rank_and_size()
        is_told = rank == 0 and num_replicas > 1 and is_own_part is None
        self._remark: str = _undivided(dataset, sampler, batch_sampler, num_replicas) if is_told else ""
        if isinstance(dataset, torch_data.IterableDataset):
            dataset = _part_of_stream(dataset, rank, num_replicas, is_own_part)
        elif sampler is None and batch_sampler is None and not is_own_part:
            sampler = _dividing_sampler(dataset, rank, num_replicas, bool(shuffle), drop_last, is_own_part)
            shuffle = None
        if num_workers:
            keep_paths_short()
            shield.watch()
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn or _SeedWorker(rank), multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self.is_own_part: bool = bool(is_own_part)
        self.worker_retries: int = worker_retries
        self._rank = rank
        self._results: Results | None = None  # of persistent workers
        self._position = position_of(self, rank, num_replicas)
        self._iteration = 0  # number of the newest one, which alone counts batches
        self._num_batches = 0  # number of batches yielded in this epoch
        self._is_over = False
        self._has_begun = False  # whether an epoch has begun in this run or before
        self._has_drawn = False  # whether the epoch that continues has drawn its random numbers

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._remark and torch.is_grad_enabled():  # an evaluation may well use all samples on each rank
            remark, self._remark = self._remark, ""
            warn_caller(remark)
        # torch draws the workers' seed here, even without workers. In a resumed epoch, the earlier run has already
        # drawn this seed, so the draw is undone.
        if self._results is not None and (self._results.failure or self._position.is_behind):
            self._iterator = self._results = None  # of the persistent workers, one has died or all are elsewhere
        with random_state_kept() if self._has_drawn else contextlib.nullcontext(), self._watched_workers():
            batches = self._position.begin(self, super().__iter__)
        self._has_begun, self._has_drawn = True, False
        self._num_batches, self._is_over = 0, False
        self._iteration += 1
        return _Batches.of_iterator(self, batches)

    @contextlib.contextmanager
    def _watched_workers(self) -> Iterator[None]:
        """Let workers that are started in a context hand over batches without ``/dev/shm``, and be replaced."""
        if not self.num_workers or self._iterator is not None:
            yield
            return
        _watch_forks()
        with _starting, handed_over(self) as forget:
            context, generator = self.multiprocessing_context, self.generator
            self.multiprocessing_context = watched = WorkersContext(self, self._rank, self.worker_retries, forget)
            if self.persistent_workers and self._has_begun:  # undisturbed, they would have drawn their seed long ago
                self.generator = torch.Generator().manual_seed(torch.initial_seed())
            try:
                yield
            finally:
                self.multiprocessing_context, self.generator = context, generator
                self._results = watched.results if self.persistent_workers else None

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the sampler or the stream, if it has a ``set_epoch``."""
        epoch = epoch_number(epoch)
        self._position.set_epoch(epoch)
        is_stream = isinstance(self.dataset, torch_data.IterableDataset)
        for holder in (self.dataset,) if is_stream else samplers_of(self):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
                self._position.is_behind |= is_stream  # persistent workers have copies of it

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last batch yielded; batches that workers loaded ahead do not count.

        Raises:
            TypeError: Nobody knows the order: the sampler is not one of torch's and has no ``state_dict``, or several
                workers hand over batches as they come (``in_order=False``).
        """
        return self._position.state(self, self._num_batches, self._is_over)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Args:
            state: State that `state_dict` returned.

        Raises:
            TypeError: Nobody knows the order, as for `state_dict`.
            ValueError: `state` belongs to another kind of loader, dataset, seed or order; or it needs the number of
                ranks or workers with which it was saved.
        """
        self._position.load(self, state)
        self._num_batches, self._is_over = 0, False
        self._has_begun, self._has_drawn = state["epoch"] > 0, state["place"] > 0


class _Batches:
    """The batches of an epoch, which count; after an error, the next one may be asked for, as of torch's iterator."""

    def __init__(self, loader: DataLoader, batches: Any) -> None:
        self._loader, self._batches = loader, batches
        self._iteration = 0
        batches.counted = weakref.ref(self)

    @classmethod
    def of_iterator(cls, loader: DataLoader, batches: Any) -> _Batches:
        """Return the object that counts torch's iterator: of persistent workers, the same one in each epoch."""
        counted = getattr(batches, "counted", None)
        known = counted() if counted is not None else None
        found = known if known is not None else cls(loader, batches)
        found._iteration = loader._iteration
        return found

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            with loading():
                batch = next(self._batches, _END)
        except Exception as error:
            if not str(error).startswith(_TIMED_OUT):  # torch goes on behind a batch that could not be loaded
                self._count()
            raise
        if batch is _END:
            if self._is_newest:
                self._loader._is_over = True
            raise StopIteration
        self._count()
        return batch

    def _count(self) -> None:
        if self._is_newest:
            self._loader._num_batches += 1
            self._loader._position.count_batch()

    @property
    def _is_newest(self) -> bool:
        return self._iteration == self._loader._iteration


def _check_retries(worker_retries: int, dataset: Any) -> None:
    if worker_retries < 0:
        raise ValueError(f"worker_retries must be at least 0, got {worker_retries}")
    if worker_retries and isinstance(dataset, torch_data.IterableDataset):
        raise ValueError(
            f"worker_retries={worker_retries}: the dataset is a stream, here a {type(dataset).__name__}, and a worker "
            "that dies can't be replaced in the middle of a stream: leave it out, or pass a map-style dataset"
        )


def _dividing_sampler(
    dataset: Any, rank: int, num_replicas: int, shuffle: bool, drop_last: bool, is_own_part: bool | None
) -> DistributedSampler:
    if isinstance(dataset, Partition) and num_replicas > 1 and is_own_part is None:
        raise ValueError(
            "phalanx.DataLoader: a Partition may be this rank's own part, or be meant for all "
            f"{num_replicas} ranks: pass is_own_part=True or is_own_part=False"
        )
    pad = shuffle and not drop_last
    sampler = DistributedSampler(dataset, num_replicas, rank, shuffle, drop_last=drop_last, pad=pad)
    sampler.expects_set_epoch = False  # the script does not hold this sampler, so it need not call set_epoch
    return sampler


def _undivided(dataset: Any, sampler: Any, batch_sampler: Any, num_replicas: int) -> str:
    """Return a warning about a sampler that gives each rank all samples; empty if the sampler may divide them.

    A sampler of a class that is not torch's gets no warning, because it may divide the data. Nor does a sampler that is
    shorter than the dataset, because it may hold only this rank's indices.
    """
    if type(batch_sampler) is torch_data.BatchSampler:
        sampler = batch_sampler.sampler
    if type(sampler) not in OF_ONE_PROCESS or not hasattr(dataset, "__len__") or len(sampler) < len(dataset):
        return ""
    return (
        f"phalanx.DataLoader: a {type(sampler).__name__} does not divide the data, so each of the {num_replicas} ranks "
        f"takes {len(sampler):,} samples an epoch. Make it {DIVIDING_LOADER}; or pass is_own_part=True if the dataset "
        "is this rank's own, False if every rank is to take all"
    )


def _part_of_stream(
    stream: torch_data.IterableDataset[Any], rank: int, num_replicas: int, is_own_part: bool | None
) -> torch_data.IterableDataset[Any]:
    """Return this rank's part of a stream, or the stream itself if the stream needs no division."""
    if is_own_part or num_replicas == 1 or isinstance(stream, Shard):
        return stream
    if is_own_part is None and rank == 0:
        warn_caller(
            f"phalanx.DataLoader: {num_replicas} ranks take turns at this {type(stream).__name__}. Pass is_own_part="
            "True if it divides itself among them, or False to keep it so"
        )
    return Shard(stream, rank, num_replicas, over_workers=False)


class _SeedWorker:
    """Seeds a worker. A class rather than a closure, because spawned workers need to pickle it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, worker_id: int) -> None:
        # torch draws the worker's seed from the loader's generator. If all ranks were seeded alike, the seed is the
        # same on all of them, so the rank is mixed in.
        seed_process(derive_seed(torch.initial_seed(), "rank", self._rank))
