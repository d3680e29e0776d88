"""Whether each epoch has an order of its own: what notices a forgotten `set_epoch`, and how it is said."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import distributed as torch_distributed


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside torch and phalanx: where the loop over the batches stands."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "phalanx"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class RepeatedOrders:
    """Says once that torch's `DistributedSampler` repeats its order, if a model is trained on it and nobody calls
    `set_epoch`.

    An epoch counts if it begins while a watched model is in training mode and gradients are on: evaluation may well
    have one order. It is repeated if the model was trained since the epoch before began: a look at the first batch is
    no epoch.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_passes = 0
        self._is_listening = self._has_said = False

    def watch(self, model: Any) -> None:
        """Look at the samplers while `model`, a DistributedDataParallel, is trained."""
        self._models.add(model)
        if not self._is_listening:
            self._is_listening = True
            self._listen()

    def count_pass(self) -> None:
        """A watched model has averaged its gradients."""
        self._num_passes += 1

    def _listen(self) -> None:
        """Hear of each epoch that begins. The sampler tells nobody, so two methods of torch's class are wrapped."""
        kind = torch_distributed.DistributedSampler
        torchs_iter, torchs_set_epoch = kind.__iter__, kind.set_epoch

        @functools.wraps(torchs_iter)
        def begin(sampler: Any) -> Iterator[Any]:
            self._begin_epoch(sampler)
            return torchs_iter(sampler)

        @functools.wraps(torchs_set_epoch)
        def set_epoch(sampler: Any, epoch: int) -> None:
            sampler._phalanx_epoch = None
            torchs_set_epoch(sampler, epoch)

        kind.__iter__, kind.set_epoch = begin, set_epoch  # type: ignore[assignment, method-assign]

    def _begin_epoch(self, sampler: Any) -> None:
        is_training = any(model.training and model.module.training for model in self._models)
        if self._has_said or not sampler.shuffle or not is_training or not torch.is_grad_enabled():
            return
        last = getattr(sampler, "_phalanx_epoch", None)
        sampler._phalanx_epoch = sampler.epoch, self._num_passes
        if last and last[0] == sampler.epoch and last[1] < self._num_passes:
            self._has_said = True
            warn_caller(
                "rank 0: DistributedSampler: every epoch has the same order, because nobody calls set_epoch. "
                "Add before the loop over the batches: sampler.set_epoch(epoch)"
            )


repeated_orders: RepeatedOrders = RepeatedOrders()
