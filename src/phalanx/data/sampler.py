"""`DistributedSampler`: torch's sampler, with epochs that advance, evaluation without padding and exact resumption.

The order is torch's: a permutation drawn from seed + epoch and dealt to the ranks in turns. So a script that changes
one import trains on the same samples. One number, the place in that order, shows how many samples all ranks together
have taken, so any number of ranks can continue from that place. A rank may have taken its last sample while another
rank still has one to take. So a rank knows that the epoch is over only once it has asked for another sample and got
none. Padding repeats samples from the beginning of the epoch's order, even in a resumed run, because an interruption
must not change the samples.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import torch
from torch.utils.data import Dataset
from torch.utils.data import distributed as torch_distributed

from phalanx._errors import warn_caller
from phalanx.data.replica import rank_and_size


def epoch_number(epoch: SupportsIndex) -> int:
    """Return the number of an epoch as Python's integer, such as that of NumPy's."""
    number = operator.index(epoch)
    if number < 0:
        raise ValueError(f"set_epoch: epoch must be at least 0, got {number}: count epochs from 0")
    return number


class DistributedSampler(torch_distributed.DistributedSampler[Any]):
    """Divides a dataset among ranks, in the same order as torch's DistributedSampler.

    The order of an epoch is a pure function of seed, epoch and the dataset's length. Rank r of W takes the samples at
    positions r, r + W, r + 2 W, ... of that order, whatever W is. If `set_epoch` is not called between two iterations,
    the second one moves on to the next epoch, so a forgotten `set_epoch` does not repeat an order. If the sampler
    shuffles, rank 0 then warns once, unless something else keeps track of the epoch: the loader that made this sampler,
    or a script that saves and loads the sampler's state.

    Args:
        dataset: Dataset with a length.
        num_replicas: Number of ranks that share the dataset; default: the size of the default group.
        rank: Rank of this process among these ranks; default: its rank in the default group.
        shuffle: Whether each epoch has a new order.
        seed: Seed of the order, the same on all ranks.
        drop_last: Whether the last samples of an epoch are dropped if there are too few for one per rank.
        pad: Whether, without `drop_last`, the first samples are repeated until all ranks have the same number, as in
            torch. False yields each sample exactly once, for evaluation; the ranks' numbers of samples then differ by
            at most one.

    Raises:
        RuntimeError: There are several ranks and no process group yet.
        ValueError: `rank` is outside the group.

    Example:
        >>> sampler = phalanx.DistributedSampler(range(5), num_replicas=2, rank=0, shuffle=False)
        >>> sampler.set_epoch(0)
        >>> list(sampler)
        [0, 2, 4]
        >>> sampler.load_state_dict(sampler.state_dict())

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
        self.epoch: int
        self.pad = pad
        self._start = 0  # place in the epoch's order where the next iteration begins
        self._num_taken = 0  # number of samples that this rank has taken since it began at `_start`
        self._is_running = False  # whether an iteration has begun since the epoch was set
        self._is_over = False  # whether that iteration has ended
        self.expects_set_epoch: bool = True  # False: an epoch may begin without a call of set_epoch

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in an epoch."""
        return self.num_after(0)

    def num_after(self, place: int) -> int:
        """Return the number of samples that this rank gets after the first `place` samples of an epoch's order.

        Example:
            >>> phalanx.DistributedSampler(range(7), 2, 0).num_after(2)
            3
        """
        left = len(self.dataset) - place  # type: ignore[arg-type]
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        return max(0, -(-(left - self.rank) // self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        # A generator: torch may ask a loader's sampler for two iterators and use one of them, so nothing happens before
        # the first sample is taken.
        if self._is_running:
            self._begin_next_epoch()
        self._is_running, self._is_over = True, False
        self._num_taken = 0
        yield from self._walk(self._order(), self._start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; an epoch that `load_state_dict` restored continues at its place."""
        epoch = epoch_number(epoch)
        if epoch != self.epoch or self._is_running:
            self._start = self._num_taken = 0
        self.epoch = epoch
        self._is_running = self._is_over = False

    def state_dict(self, num_taken: int | None = None, is_over: bool | None = None) -> dict[str, Any]:
        """Return the position in the data; any number of ranks can load it.

        The position is the same on all ranks if all have taken the same number of samples.

        Args:
            num_taken: Number of samples of this epoch that this rank has trained on; default: the number taken from the
                sampler, which is larger if workers load ahead.
            is_over: Whether this rank has finished the epoch; default: whether the sampler has run out of samples.
        """
        self.expects_set_epoch = False
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self._is_running:  # the loader's count belongs to an earlier epoch
            num_taken, is_over = 0, False
        place = self._start + (self._num_taken if num_taken is None else num_taken) * self.num_replicas
        # A rank may have taken its last sample while another rank still has one to take. So a rank knows that the epoch
        # is over only once it has asked for another sample and got none.
        is_over = (self._is_over if is_over is None else is_over) or (self._is_running and place >= length)
        return {
            "epoch": self.epoch + is_over,
            "place": 0 if is_over else min(place, length),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with any number of ranks: the epoch yields each remaining sample once.

        With the same number of ranks, each rank gets the samples that it would have got without the interruption,
        padding included.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: `state` belongs to another dataset, seed or order.
        """
        ours = {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}  # type: ignore[arg-type]
        for name, value in ours.items():
            if state[name] != value:
                raise ValueError(f"this sampler's {name} is {value}, but the state was saved with {state[name]}")
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
                "advanced to that epoch on its own, in a new order; a job that resumes would begin with epoch 0 again. "
                "Add before the loop over the batches: sampler.set_epoch(epoch)"
            )

    def _order(self) -> list[int]:
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(length, generator=generator).tolist()

    def _walk(self, order: list[int], start: int) -> Iterator[int]:
        for number in range(self.num_after(start)):
            self._num_taken += 1
            # Padding begins with the epoch's first sample, wherever this iteration began. If the dataset is smaller
            # than the group, padding goes through the order as often as needed.
            yield order[(start + number * self.num_replicas + self.rank) % len(order)]
        self._is_over = True
