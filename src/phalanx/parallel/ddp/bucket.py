"""Bucket: gradients that are averaged over the ranks together."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.ddp.grad_bucket import GradBucket, checked_future, tensor_of

BoundHook: TypeAlias = Callable[[Any], torch.futures.Future[Any]]
"""Communication hook with its state, called as ``hook(bucket)``."""


class Bucket(abc.ABC):
    """Gradients that are averaged together.

    ``load()`` collects them, ``start()`` begins to average, ``store()`` waits and hands the means to the parameters.

    Args:
        parameters: Parameters whose gradients the bucket averages.
        group: Ranks to average over.

    Attributes:
        used: Parameters that have a gradient on this rank.
        num_awaited: Number of gradients still to come in this backward pass; -1 if it is not known.
        scale: Factor of the means; not 1 where they are over the ranks that still have data.
        index: Position in the order of reduction.
        is_last: Whether this bucket is the last in that order.
        started: Whether the bucket was started and not stored yet.
        overlaps: Whether it may be started while backward runs.
        waited_s: Seconds of the last `wait` until every rank had come, if that is known.
    """

    overlaps = True

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters: list[nn.Parameter] = list(parameters)
        self.used: set[nn.Parameter] = set()
        self.num_awaited = -1
        self.scale: float = 1.0
        self.index = 0
        self.is_last = True
        self.started = False
        self.waited_s: float = 0.0
        self._group = group
        self._work: dist.Work | None = None
        self._hooked: tuple[torch.futures.Future[Any], Tensor] | None = None  # a communication hook's, and its buffer

    def _mark(self, marks: Tensor) -> None:
        """Fill `marks`, one element for each parameter: 1 if this rank has a gradient for it, else 0."""
        marks.fill_(1)
        if len(self.used) < len(self.parameters):
            for i, parameter in enumerate(self.parameters):
                if parameter not in self.used:
                    marks[i] = 0

    def _call(self, hook: BoundHook, buffer: Tensor, gradients: list[Tensor]) -> None:
        future = hook(GradBucket(self.index, buffer, gradients, self.parameters, self.is_last))
        self._hooked = checked_future(future), buffer

    def _finish(self) -> Tensor | None:
        """Wait for whatever `start` began, and return what a communication hook made of it; None without a hook."""
        work, hooked = self._work, self._hooked
        self._work, self._hooked, self.started = None, None, False
        if work is not None:
            work.wait()
        return None if hooked is None else tensor_of(*hooked)

    @abc.abstractmethod
    def load(self) -> None:
        """Collect the parameters' gradients, zeros for those that have none."""

    @abc.abstractmethod
    def load_nothing(self) -> None:
        """Collect zeros, as on a rank without data."""

    @abc.abstractmethod
    def start(self, hook: BoundHook | None = None) -> None:
        """Begin to average what was loaded, or have `hook` do it."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the means have arrived."""

    @abc.abstractmethod
    def store(self) -> None:
        """Wait, then hand the means to the parameters; a parameter without a gradient on any rank is left alone."""

    @abc.abstractmethod
    def norm(self) -> Tensor:
        """Return the 2-norm of the means, of shape ()."""


def dense_gradient(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Return the gradient of a parameter, which becomes dense if it is not."""
    if grad.is_sparse:  # of a module that make_buckets() was not told of
        parameter.grad = grad = grad.to_dense()
    return grad
