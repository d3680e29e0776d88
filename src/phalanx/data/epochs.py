"""`RepeatedOrders`: a warning about a loop that forgets `set_epoch`.

Without `set_epoch`, every epoch has the same order, which costs accuracy but raises no error. A loop with torch's
loader, torch's sampler and our model calls no code of ours when an epoch begins. The loop does call our forward pass,
but the forward pass can't find out whether a repeated order is intended. So the first phalanx DistributedDataParallel
wraps two methods of torch's `DistributedSampler`. The wrappers look at three attributes per epoch, on rank 0 alone. A
script without a phalanx DistributedDataParallel is not affected. An evaluation, or a look at the first batch, does not
count as an epoch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import distributed as torch_distributed

from phalanx._errors import warn_caller


class RepeatedOrders:
    """Warns once if a model trains on torch's `DistributedSampler` and nobody calls `set_epoch`.

    An epoch counts only if it begins while a watched model is in training mode with gradients on: an evaluation may
    repeat its order. A repeated order is a mistake only if the model has trained since the previous epoch began;
    otherwise, the script may just have looked at the first batch.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_passes = 0
        self._is_listening = self._has_said = False

    def watch(self, model: Any) -> None:
        """Watch the samplers while `model`, a DistributedDataParallel, is trained."""
        self._models.add(model)
        if not self._is_listening:
            self._is_listening = True
            self._listen()

    def count_pass(self) -> None:
        """Count a pass in which a watched model averaged its gradients."""
        self._num_passes += 1

    def _listen(self) -> None:
        """Wrap two methods of torch's class, because nothing else shows when an epoch begins."""
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
