"""`DataLoader`: torch's, with the defaults that several ranks on one machine need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from phalanx._sockets import keep_paths_short
from phalanx.data.partition import Partition
from phalanx.data.replica import rank_and_size
from phalanx.data.sampler import DistributedSampler
from phalanx.data.seeds import derive_seed, seed_process
from phalanx.data.shards import Shard

_MAX_DEFAULT_WORKERS = 4


class DataLoader(torch_data.DataLoader[Any]):
    """Loads this rank's batches; any argument of torch's is torch's, and these have other defaults:

    - `sampler`: a `DistributedSampler` for the ranks of the default group, if there are several and neither a sampler
      nor a batch sampler is given; `shuffle` and `drop_last` are its too. Without `drop_last` it pads when it shuffles,
      as torch's does, and gives each sample exactly once when it does not. Its epochs advance by themselves;
      `set_epoch` chooses another.
    - `num_workers`: one less than the CPUs that this rank is pinned to, at most 4; 0 for an ``IterableDataset``, of
      which every worker would yield every item, unless it comes from `shard_iterable`.
    - `pin_memory`: with CUDA.
    - `persistent_workers`: with workers.
    - `worker_init_fn`: each worker of each rank draws numbers of its own, from Python, NumPy and torch.

    Several ranks take turns at the items of an ``IterableDataset``, so it must come out the same on each. Workers that
    you ask for are the stream's own matter, as with torch: one that does not look at ``get_worker_info()`` repeats
    itself; `shard_iterable` divides any.

    `state_dict` and `load_state_dict` resume in the middle of an epoch, on any number of ranks.

    Args:
        is_own_part: The dataset is this rank's own part already, and is taken as it is. Several ranks must say so, or
            say False, of a `Partition`.

    Raises:
        RuntimeError: Several ranks, and no process group yet.
        ValueError: Nobody can know whether a `Partition` is that of this rank or of all.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | None = None,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        is_own_part: bool | None = None,
        **options: Any,
    ) -> None:
        rank, num_replicas = rank_and_size()
        if num_workers is None:
            is_alike = isinstance(dataset, torch_data.IterableDataset) and not isinstance(dataset, Shard)
            num_workers = 0 if is_alike else min(_MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) - 1)
        if isinstance(dataset, torch_data.IterableDataset):
            dataset = _part_of_stream(dataset, rank, num_replicas, is_own_part)
        elif sampler is None and batch_sampler is None and not is_own_part:
            if isinstance(dataset, Partition) and num_replicas > 1 and is_own_part is None:
                raise ValueError(
                    "phalanx.DataLoader: is this Partition the part of this rank, or is it to be divided among all of "
                    f"{num_replicas} ranks? Say is_own_part=True or is_own_part=False"
                )
            is_shuffled = bool(shuffle)
            sampler = DistributedSampler(
                dataset, num_replicas, rank, is_shuffled, drop_last=drop_last, pad=is_shuffled and not drop_last
            )
            sampler.expects_set_epoch = False  # nobody else has it in hand
            shuffle = None
        if num_workers:
            keep_paths_short()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            drop_last=drop_last,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            worker_init_fn=worker_init_fn or _SeedWorker(rank),
            **options,
        )
        self.is_own_part = bool(is_own_part)
        self._num_batches = 0  # handed out in this epoch
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        self._num_batches, self._is_over = 0, False
        return self._count(batches)

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._num_batches += 1
            yield batch
        self._is_over = True

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, if it wants to know."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand: after the batch that was handed out last, whatever workers have loaded ahead.

        Raises:
            TypeError: The sampler is not a phalanx one, or batches are not made of its samples one by one.
        """
        return self._own_sampler().state_dict(self._num_batches * (self.batch_size or 1), self._is_over)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which `state` was taken, with any number of ranks."""
        self._own_sampler().load_state_dict(state)
        self._num_batches, self._is_over = 0, False

    def _own_sampler(self) -> DistributedSampler:
        if not isinstance(self.sampler, DistributedSampler):
            raise TypeError(
                f"a {type(self.sampler).__name__} can't be resumed: pass sampler=phalanx.DistributedSampler(dataset)"
            )
        return self.sampler


def _part_of_stream(
    stream: torch_data.IterableDataset[Any], rank: int, num_replicas: int, is_own_part: bool | None
) -> torch_data.IterableDataset[Any]:
    """Return what this rank reads of a stream: its turns, unless the stream is divided already."""
    if is_own_part or num_replicas == 1 or isinstance(stream, Shard):
        return stream
    if is_own_part is None and rank == 0:
        warnings.warn(
            f"phalanx.DataLoader: {num_replicas} ranks take turns at this {type(stream).__name__}. Say is_own_part="
            "True if it divides itself among them, or False if this is what you want",
            stacklevel=3,
        )
    return Shard(stream, rank, num_replicas, over_workers=False)


class _SeedWorker:
    """Seeds a worker; a class, since it must reach one that is spawned."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, worker_id: int) -> None:
        # torch has seeded it from the loader's generator: equal on ranks that were seeded alike.
        seed_process(derive_seed(torch.initial_seed(), "rank", self._rank))
