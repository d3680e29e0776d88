"""`DistributedSampler`: torch's, with epochs that advance, evaluation without padding, and exact resumption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import distributed as torch_distributed

from phalanx.data.epochs import warn_caller
from phalanx.data.replica import rank_and_size


class DistributedSampler(torch_distributed.DistributedSampler):
    """Divides a dataset among ranks, in torch's order.

    The order of an epoch is a pure function of seed, epoch and the dataset's length: rank r of W takes places r, r + W,
    r + 2 W, ... of it, whatever W is. An epoch that begins without `set_epoch` is the one after the last: a forgotten
    `set_epoch` repeats no order. It is said once, unless somebody else keeps the epoch: the loader that made this
    sampler, or a script that saves and loads its state.

    Args:
        dataset: Anything with a length.
        num_replicas: Ranks that share it; default: those of the default group.
        rank: This one.
        shuffle: Permute the dataset anew in each epoch.
        seed: The same on all ranks.
        drop_last: Leave out the last samples that do not make one for each rank.
        pad: Without `drop_last`, let every rank have equally many by repeating the first samples, as torch does. False
            for evaluation: each sample exactly once, so that ranks may differ by one.

    Raises:
        RuntimeError: Several ranks, and no process group yet.
        ValueError: `rank` is outside the group.

    Source: ``torch/utils/data/distributed.py``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        rank, num_replicas = rank_and_size(rank, num_replicas)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._start = 0  # place in the epoch's order where the next iteration begins
        self._num_taken = 0  # by this rank since then
        self._is_running = False  # an iteration has begun since the epoch was set
        self._is_over = False  # and has come to its end
        self.expects_set_epoch = True  # False: an epoch that begins without it is nobody's mistake

    def __len__(self) -> int:
        """Return how many samples a whole epoch gives this rank."""
        return self._num_of_rank(len(self.dataset))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        if self._is_running:
            self._begin_next_epoch()
        self._is_running, self._is_over = True, False
        self._num_taken = 0
        return self._walk(self._order()[self._start :])

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of `epoch`; one that `load_state_dict` has left half done goes on there."""
        if epoch != self.epoch or self._is_running:
            self._start = self._num_taken = 0
        self.epoch = epoch
        self._is_running = self._is_over = False

    def state_dict(self, num_taken: int | None = None, is_over: bool | None = None) -> dict[str, Any]:
        """Return where all ranks stand, for any world size; the same on each rank if all have taken equally many.

        Args:
            num_taken: Samples of this epoch that this rank has trained on; default: those that were taken from the
                sampler, which a loader with workers does ahead of time.
            is_over: Whether this rank has come to its end of the epoch; default: whether the sampler has.
        """
        self.expects_set_epoch = False
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self._is_running:  # what a loader has counted was of an epoch before
            num_taken, is_over = 0, False
        place = self._start + (self._num_taken if num_taken is None else num_taken) * self.num_replicas
        # A rank may have taken its last sample while another has one more: then only having asked for more tells.
        is_over = (self._is_over if is_over is None else is_over) or (self._is_running and place >= length)
        return {
            "epoch": self.epoch + is_over,
            "place": 0 if is_over else min(place, length),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with any number of ranks: what was not trained on comes, once.

        Raises:
            ValueError: `state` is of another dataset, seed or order.
        """
        ours = {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}  # type: ignore[arg-type]
        for name, value in ours.items():
            if state[name] != value:
                raise ValueError(f"this sampler's {name} is {value}, and the state was taken with {state[name]}")
        self.expects_set_epoch = False
        self.epoch = state["epoch"]
        self._start = state["place"]
        self._num_taken = 0
        self._is_running = self._is_over = False

    def _begin_next_epoch(self) -> None:
        self.epoch += 1
        self._start = 0
        if self.shuffle and self.expects_set_epoch and self.rank == 0:
            self.expects_set_epoch = False
            warn_caller(
                f"rank 0: DistributedSampler: set_epoch was not called before epoch {self.epoch}. The sampler has "
                "gone on to that epoch by itself, in a new order; a job that resumes would begin with epoch 0 again. "
                "Add before the loop over the batches: sampler.set_epoch(epoch)"
            )

    def _order(self) -> list[int]:
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(length, generator=generator).tolist()

    def _walk(self, rest: list[int]) -> Iterator[int]:
        if rest:
            for place in range(self._num_of_rank(len(rest))):
                self._num_taken += 1
                # Padding goes round, as often as a dataset smaller than the group asks for.
                yield rest[(place * self.num_replicas + self.rank) % len(rest)]
        self._is_over = True

    def _num_of_rank(self, length: int) -> int:
        """Return this rank's part of `length` samples that are left."""
        if self.drop_last:
            return length // self.num_replicas
        if self.pad:
            return -(-length // self.num_replicas)
        return max(0, -(-(length - self.rank) // self.num_replicas))
