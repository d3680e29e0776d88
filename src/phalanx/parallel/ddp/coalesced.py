"""CoalescedBucket: gradients averaged in place, each whole or in the range that a rank needs.

One call of the core stages chunks, sums them in rank order, scales them and writes them back in one pass, and adds up
the sum of squares on the way if `grad_norm()` was ever asked for. One more small piece carries, for each parameter,
whether this rank had a gradient.

**Only the range that a rank steps.** Where the optimizer's step is divided, the large gradients are reduce-scattered:
each rank has the means of the range that it steps, and the rest keeps its own gradient. That happens only in the
trainer's own backward pass, and only if nothing on any rank looks at gradients (an optimizer's hook, a wrapper of its
step, `grad_norm()`) or steps a parameter whole. The small gradients come first and carry the question, so one rank's
hook gives all ranks all means.

**No buckets in shared memory, no overlap on the thread that computes.** The first plan was to let gradients go into
buckets in the segment, reduced as soon as all ranks have them. With the MLP 784-1024-10 on two cores and a step
without communication as 1, copying gradients into any buffer as they come costs 0.12 of a step before a byte is
exchanged (0.05 for 17 M parameters); averaging them in place costs 0.07 to 0.10 in all. The staging slots of a
pipelined all_reduce stay in the second-level cache; a bucket does not. Overlap gains nothing where the cores that
would reduce are those that compute: meeting once at the end costs 0.03 to 0.05, and meeting at every bucket costs that
again each time.

**What averaging costs** on two cores (``python -m bench.ddp --rounds 5``, which tells how much of it is waiting):

- The MLP has 3.3 MB of gradients and a step of 2.4 ms. Averaging takes 0.45 ms when nothing else runs, and 0.6 to 0.75
  ms at the end of a backward pass, where neither gradients nor code are in the first caches and the ranks wait 0.01 to
  0.14 ms for each other. Hooks and the wrapper add 0.1 to 0.2 ms. A local average of two such messages takes 0.24 ms.
  Nearly all of these gradients belong to the first layer, which comes last, so there is nothing to overlap with.
- 17 M parameters have 68 MB of gradients, which pass through memory. Averaging takes 12 to 13 ms, a local average of
  two such messages 9.7 ms, and ``t.add_(t)`` of one 6.1 ms. Averaging only what a rank steps takes 8.5 instead of 12.4
  ms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._torch import foreach_mul_
from phalanx._torch.tensors import is_one_range
from phalanx.parallel.ddp.bucket import BoundHook, Bucket, dense_gradient
from phalanx.parallel.layout import flat, shaped


class Division(Protocol):
    """Which ranks need which elements of averaged gradients, where nobody but a divided optimizer reads them."""

    def length(self, parameter: nn.Parameter) -> int:
        """Return how many elements of a gradient each rank needs, in rank order; 0: every rank needs all.

        The last rank also needs those that are left over. The length is the same on every rank.
        """
        ...

    def needs_whole(self) -> bool:
        """Return whether this rank needs all elements after this backward pass."""
        ...


class CoalescedBucket(Bucket):
    """Gradients on the CPU that a group averages where they lie, in one pass when backward has ended.

    For groups with ``average_coalesced(tensors, marks, with_squares)`` and ``average_waited_s``. On a CPU that beats a
    buffer, because the cores that compute would have to copy into it whatever autograd makes.

    Attributes:
        division: Which elements each rank needs; what the others need stays as autograd made it. None: all need all.
    """

    overlaps = False
    division: Division | None = None

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        super().__init__(parameters, group)
        self._averaging: Any = group
        self._tensors: list[Tensor] = []
        self._sizes_bytes = [p.numel() * p.element_size() for p in parameters]
        self._wants_squares = False
        self._squares: float | None = None
        self._marks = torch.ones(len(parameters) + 1, dtype=parameters[0].dtype)
        self._used_anywhere, self._needs_whole = self._marks[:-1], self._marks[-1:]

    def load(self) -> None:
        self._collect()
        places = sorted(zip([t.data_ptr() for t in self._tensors], self._sizes_bytes, strict=True))
        if any(begin + size_bytes > later for (begin, size_bytes), (later, _) in itertools.pairwise(places)):
            self._separate()
        self._mark(self._used_anywhere)

    def _collect(self) -> None:
        self._tensors = [
            self._zeros(p) if (grad := p.grad) is None else grad if grad.is_contiguous() else _in_memory_order(p, grad)
            for p in self.parameters
        ]

    def _separate(self) -> None:
        """Give gradients memory of their own.

        Autograd lets some share it: after ``y = a.view(6) + b.view(6)``, those of `a` and `b` are views of that of `y`.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._collect()

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        self.used.discard(parameter)  # dropped since it came
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)

    def load_nothing(self) -> None:
        self._tensors = [self._zeros(p) for p in self.parameters]
        self._used_anywhere.zero_()

    def start(self, hook: BoundHook | None = None) -> None:
        pass  # all in one pass, in wait()

    def wait(self) -> None:
        average = self._averaging.average_coalesced
        if self.division is not None:
            self._average_parts(self.division)
        else:
            squares = average(self._tensors, self._used_anywhere, with_squares=self._wants_squares)
            self.waited_s = self._averaging.average_waited_s
            self._squares = squares * self.scale**2 if self._wants_squares else None
        if self.scale != 1:
            foreach_mul_(self._tensors, self.scale)

    def _average_parts(self, division: Division) -> None:
        """Average of each gradient what this rank needs, or all gradients whole if any rank needs that.

        The first message, of the gradients that are not divided, tells which.
        """
        lengths = [division.length(p) for p in self.parameters]
        self._needs_whole.fill_(self._wants_squares or division.needs_whole())
        average, nothing = self._averaging.average_coalesced, self._marks[:0]
        average([*(t for t, n in zip(self._tensors, lengths, strict=True) if not n), self._marks], nothing)
        self.waited_s = self._averaging.average_waited_s
        self._squares = None
        divided = [(t, n) for t, n in zip(self._tensors, lengths, strict=True) if n]
        if self._needs_whole.item():
            average([tensor for tensor, _ in divided], nothing)
            return
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        for tensor, length in divided:
            elements = flat(tensor)
            cuts = [*range(0, size * length, length), len(elements)]
            blocks = [elements[begin:end] for begin, end in itertools.pairwise(cuts)]
            dist.reduce_scatter(blocks[rank], blocks, dist.ReduceOp.AVG, group=self._group)

    def store(self) -> None:
        self.wait()
        if len(self.used) < len(self.parameters):
            anywhere = self._used_anywhere.tolist()
            for parameter, mean, used in zip(self.parameters, self._tensors, anywhere, strict=True):
                if used and parameter.grad is None:
                    parameter.grad = shaped(mean, parameter)
        self._tensors = []  # autograd copies a gradient that anything else refers to, instead of handing it over

    def norm(self) -> Tensor:
        if self._squares is not None:
            return torch.tensor(self._squares**0.5)
        self._wants_squares = True  # from the next time on
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.zeros(()), *map(torch.linalg.vector_norm, grads)]))


def _in_memory_order(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the gradient, flat if its layout is the parameter's, which is the same on every rank."""
    grad = dense_gradient(parameter, grad)
    return flat(grad) if grad.stride() == parameter.stride() and is_one_range(grad) else grad
