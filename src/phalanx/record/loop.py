"""`Loop`: records the steps and phases of a manual training loop, as its model and its loader see them.

A step begins with the first forward pass after a backward pass that averaged gradients. Optimizers are not hooked: a
global hook would break ``torch.compile(fullgraph=True)`` around a step.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

from phalanx.record import writer

LEAST_LOADING = 0.05
"""Share of a step spent on loading, above which workers, or more of them, are worth a try."""

_HEADROOM = 1.25  # workers share CPUs, and some batches load slowly


class Loop:
    """Records the steps of a model in a manual loop; a step lasts from its first forward pass to that of the next step.

    A model calls these methods in turn. While a Trainer records steps and phases, nothing is recorded here.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._step = self._phase = 0  # events of the current step and phase
        self._has_averaged = True

    def begin_forward(self) -> None:
        """Record that a forward pass with gradients begins; the first pass after an averaging begins a step."""
        if writer.is_told:
            return
        if self._has_averaged:
            self._has_averaged = False
            self._num_steps += 1
            writer.end(self._step)
            self._step = writer.begin_step(self._num_steps)
        self._begin("forward")

    def begin_backward(self) -> None:
        """Record the beginning of a backward pass that averages gradients."""
        if not writer.is_told:
            self._begin("backward")

    def end_phase(self) -> None:
        """Record that the forward or backward pass has ended."""
        writer.end(self._phase)
        self._phase = 0

    def end_averaging(self) -> None:
        """Record that the backward pass has ended and gradients are averaged: the optimizer follows."""
        self.end_phase()
        self._has_averaged = True

    def _begin(self, name: str) -> None:
        writer.end(self._phase)  # the phase is still open if an error ended its pass
        self._phase = writer.begin_phase(name, self._num_steps)


def loading() -> AbstractContextManager[None]:
    """Return a context that records how long a manual loop waits for its data."""
    return contextlib.nullcontext() if writer.is_told else writer.phase("load data")


def workers_needed(share: float, num_workers: int = 0) -> int:
    """Return how many loader workers each rank needs, so that the next batch is ready when a step has been computed.

    Args:
        share: Measured share of a step in which the rank waits for its data, below 1.
        num_workers: Number of workers during the measurement; 0: the rank itself loaded the data.
    """
    return math.ceil(_HEADROOM * (num_workers or share) / (1 - share))
