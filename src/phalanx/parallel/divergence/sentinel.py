"""`Sentinel`: compares the ranks' copies of a model during training, slice by slice, in messages that are sent anyway.

A Trainer's ranks exchange a few numbers after a step anyway, and every rank gets the maximum of each. The sentinel adds
two numbers: a fingerprint of the next slice of parameters and optimizer state, and its negative. The two maxima add up
to 0 if and only if all fingerprints are equal, so every rank knows the result at once. If they differ, the ranks
compare everything (see `check`). Averaged gradients have the same bits on all ranks, so a difference does not spread to
other tensors: the tensor that is named is the one that was corrupted.

- A cycle, in which every tensor is compared once, takes at most ``compare_every`` steps, even if the number of steps
  between two messages (the gap) changes. The length of a slice is proportional to the last gap, and a slice may
  continue into the next cycle. A cycle is planned to be shorter than ``compare_every`` by one gap or by a quarter of
  ``compare_every``, whichever is more. The message also carries the time that the slice took, and every rank gets the
  time of the slowest rank. So all ranks choose slices of the same length, and they choose the length such that
  comparing takes 0.5 % of the time.
- Two kinds of state are left out: the optimizer's state of a divided step, because the ranks share one copy of this
  state; and buffers, because each forward pass sets them to those of rank 0. Nothing is compared if ranks have
  different instruction sets or numbers of threads, because their elementwise kernels round differently.
- A difference is not found if it vanishes before its slice is compared, as when a moving average rounds it away. Such a
  difference has become harmless.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._errors import ReplicaMismatch
from phalanx._text import counted
from phalanx._torch.tensors import is_one_range
from phalanx.checkpoint.state.digest import bytes_of, digests
from phalanx.parallel.divergence.check import first_difference
from phalanx.parallel.divergence.replicated import Entry, Owner, is_plain, optimizer_state, parameters
from phalanx.parallel.layout import flat

_SHARE = 0.005  # fraction of the training time that comparing may take
_FIRST_EVERY = 100  # steps in a cycle until the time of a step and of a comparison is known
_LEAST_LOOKS = 4  # comparisons ("looks") needed to measure their time
_MOST_EVERY = 10_000
_MOST_CHANGE = 4.0  # limit for the factor by which `every` changes: an interruption may have slowed a look
_NOTHING = (0, 0, 0)
LEAST_OF_A_CYCLE = 4  # with fewer looks in a cycle, two looks at a tensor may be more than `every` steps apart


def kind_of_processor(device: torch.device) -> str:
    """Return the facts that determine how an optimizer's step rounds on a rank; ranks with different facts drift apart.

    Elementwise kernels are compiled for several instruction sets. These variants differ in how they round the last
    elements of each thread's range.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} with {counted(torch.get_num_threads(), 'thread')}"


class Sentinel:
    """Compares the parameters and optimizer state of all ranks, each element at least once in `every` steps.

    The sentinel goes through all tensors in the model's order, over and over; each pass is a cycle. In each look, a
    rank computes one number from the digests of the next slice, whose length is proportional to the number of steps
    since the last look. In a message that is sent anyway, the ranks find the maximum of these numbers and of their
    negatives. From the two maxima, every rank knows at once whether all numbers are equal. Only if the numbers differ
    do the ranks compare everything, and then raise an error that names the tensors that differ.

    Every rank must have a sentinel, and must call the same methods after the same steps.

    Args:
        model: Model in its wrapper.
        optimizer: Optimizer of the model's parameters.
        group: Group of the ranks that each hold a copy; None: there is nothing to compare.
        every: Number of steps in which everything is compared once, provided that looks are at most ``every /
            LEAST_OF_A_CYCLE`` steps apart; "auto": the smallest number for which comparing takes at most about 0.5 % of
            the time.
        leaves_out: Function that returns whether the ranks share one copy of the optimizer's state of a parameter.
        step: Number of steps done so far; at that point, the copies count as equal.

    Attributes:
        every: Number of steps in which everything is compared once; 0: never.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        every: int | Literal["auto"],
        leaves_out: Owner,
        step: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._group, self._leaves_out = group, leaves_out
        self._is_on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
        self._adapts = every == "auto"
        self.every: int = 0 if group is None else _FIRST_EVERY if every == "auto" else every
        self._step = self._begun = step  # step of the last look, and step at the beginning
        self._since: dict[str, int] = {}  # step after which a tensor was last compared, by name
        self._cycle: list[Entry] = []
        self._at, self._offset = 0, 0  # start of the next slice: index of the entry, and byte in its tensor
        self._cycle_bytes = 0
        self._tensor_begun = step  # step after which the first piece of the tensor at `_at` was compared
        # Tensors whose last piece was compared in the last `look`, with the step after which their first piece was.
        self._compared: dict[str, int] = {}
        self._in_memory_order = True
        self._num_steps = 1  # number of steps between the last two looks
        self._adapted = step
        # Time of looks on the slowest rank, and of steps on the fastest.
        self._num_looks, self._looked_s, self._trained_s = 0, 0.0, 0.0

    def look(self, step: int) -> Sequence[int]:
        """Return the numbers of the next slice; all 0 if no step was taken since the last look."""
        num_steps, self._step = step - self._step, step
        if not self.every or not num_steps:
            return _NOTHING
        if self._is_on_device:
            torch.accelerator.synchronize()  # earlier work on the device must not count as the time of this look
        begin_s, self._num_steps = time.perf_counter(), num_steps
        number = self._fingerprint(self._share())
        return number, -number, int(1e9 * (time.perf_counter() - begin_s))

    def hear(self, largest: Sequence[int]) -> None:
        """Receive the maxima, over all ranks, of the numbers that `look` has returned.

        Raises:
            ReplicaMismatch: The ranks' copies differ; every rank raises the error.
        """
        high, minus_low, ns = largest
        self._num_looks += ns > 0
        self._looked_s += ns / 1e9
        if high == -minus_low:
            self._since.update(self._compared)
            return
        assert self._group is not None
        difference = first_difference(self._entries(), self._group)
        if difference is None:  # only the order in memory differs, or a difference has vanished again
            self._in_memory_order = False
            self._at = len(self._cycle)
            return
        since = min(self._since.get(name, self._begun) for name in difference.tensors)
        ranks = tuple(dist.get_global_rank(self._group, rank) for rank in difference.ranks)
        when = (
            f"in step {self._step}" if since + 1 >= self._step else f"in one of the steps {since + 1} to {self._step}"
        )
        raise ReplicaMismatch(
            f"Trainer.fit: step {self._step}: the ranks' copies differ: {difference.words}. They diverged {when}: "
            "a rank changed its own copy, or memory is faulty; compare_every=0 turns the check off",
            op="Trainer.fit", ranks=ranks, tensors=difference.tensors, how=difference.how,
            step=self._step, since_step=since,
        )  # fmt: skip

    def adapt(self, step: int, step_s: float) -> None:
        """Adapt `every`, in the same way on every rank, if it was given as "auto".

        Part of a look's cost does not depend on the size of its slice, so the right number of steps can't be computed.
        Instead, `every` changes until looks take `_SHARE` of the time.

        Args:
            step: Number of steps done.
            step_s: Mean time of a step since the last call, on the fastest rank; the same on every rank.
        """
        self._trained_s += (step - self._adapted) * step_s
        self._adapted = step
        if self._adapts and self._num_looks >= _LEAST_LOOKS:
            change = self._looked_s / (_SHARE * self._trained_s)
            every = math.ceil(self.every * min(max(change, 1 / _MOST_CHANGE), _MOST_CHANGE))
            self.every = min(max(every, self._num_steps), _MOST_EVERY)  # a slice can't be larger than a cycle
            self._num_looks, self._looked_s, self._trained_s = 0, 0.0, 0.0

    def _entries(self) -> Iterator[Entry]:
        for entry in [*parameters(self._model), *optimizer_state(self._model, self._optimizer, self._leaves_out)]:
            tensor = entry.fetch()
            if tensor is not None and is_plain(tensor):
                yield entry

    def _share(self) -> Fraction:
        """Return the share of all bytes to compare in this look.

        More than a cycle may pass between two comparisons of a byte: a look may end just before the byte, so that the
        byte waits one more gap. So a cycle must be shorter than `every` by the longest gap: the present gap, or the
        longest gap that may follow, ``every / LEAST_OF_A_CYCLE``.
        """
        most_between = max(self._num_steps, self.every // LEAST_OF_A_CYCLE)
        return Fraction(self._num_steps, max(self.every - most_between, self._num_steps))

    def _begin_cycle(self) -> None:
        self._cycle = list(self._entries())
        self._cycle_bytes = sum(t.numel() * t.element_size() for e in self._cycle if (t := e.fetch()) is not None)
        self._at = self._offset = 0

    def _fingerprint(self, share: Fraction) -> int:
        """Return a digest of 62 bits of the next slice, which may continue into the next cycle."""
        if self._at >= len(self._cycle):
            self._begin_cycle()
        forms, pieces = [], []
        left = math.ceil(self._cycle_bytes * share)
        self._compared = {}
        while left > 0:
            if self._at >= len(self._cycle):
                self._begin_cycle()
                left = min(left, self._cycle_bytes)  # the new cycle may be shorter, because a tensor is gone
                continue
            form, piece = self._take(self._cycle[self._at], left)
            left -= len(piece)
            forms.append(form)
            pieces.append(piece)
        bits = hashlib.blake2b(repr(forms).encode(), digest_size=8)
        bits.update(digests(pieces))
        return int.from_bytes(bits.digest(), "little") >> 2

    def _take(self, entry: Entry, most_bytes: int) -> tuple[object, Tensor]:
        """Return the next piece of a tensor: a description, which must also be the same on all ranks, and the bits."""
        tensor = entry.fetch()
        if tensor is None:
            form, bits = None, torch.empty(0, dtype=torch.uint8)
        else:
            in_memory_order = self._in_memory_order and is_one_range(tensor)
            form = tensor.dtype, tensor.shape, tensor.stride() if in_memory_order else None
            bits = bytes_of(flat(tensor) if in_memory_order else tensor)
        begin, end = self._offset, min(self._offset + most_bytes, len(bits))
        if begin == 0:
            self._tensor_begun = self._step
        self._offset = end
        if end == len(bits):
            self._compared[entry.name] = self._tensor_begun
            self._at, self._offset = self._at + 1, 0
        return (entry.name, form, begin), bits[begin:end].cpu()
