"""`Stepper`: the averaged gradients of a global batch, and the optimizer's step.

The order of an epoch's samples depends only on (seed, epoch), and a global batch is a range of that order. Rank r of W
takes the r-th of W pieces of the batch, in parts that fit one forward pass. A part's loss is weighted by its fraction
of the batch, so averaging over the ranks gives the mean over the samples, even if ranks have different numbers of
samples. The position in the order is one number, from which any number of ranks can continue with the same batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import checkpoint
from phalanx._torch import foreach_mul_
from phalanx._torch.nested import to_device
from phalanx.parallel import DistributedDataParallel
from phalanx.parallel.divergence.sentinel import Sentinel, kind_of_processor
from phalanx.session.loop import synchronizing
from phalanx.session.session import Session
from phalanx.train.feed.feed import Part
from phalanx.train.report.run_log import RunLog
from phalanx.train.settings import Settings
from phalanx.train.step import determinism
from phalanx.train.step.divided_step import DividedStep
from phalanx.train.step.finite import FiniteGuard
from phalanx.train.step.memory_format import lay_out_batch
from phalanx.train.step.objective import NamedParts, Objective
from phalanx.wire.rank_group import RankGroup

_NOTHING: Any = contextlib.nullcontext()


class Stepper:
    """Takes the optimizer's steps of a trainer: every rank calls `backward`, then `optimize`.

    Attributes:
        autocast: Context in which the loss is computed.
        scaler: Gradient scaler; it is active only in "fp16".
        named: Values that the training step has returned in addition to the loss since the last log.
        grad_norm: Norm of the last averaged gradient before clipping; None without clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        objective: Objective,
        ranks: RankGroup,
        session: Session,
        settings: Settings,
        divides: str,
    ) -> None:
        self._model, self._module = model, checkpoint.unwrap(model)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._optimizer, self.scheduler = optimizer, scheduler
        self._objective = objective
        self._ranks = ranks
        self._session, self._device = session, session.device
        self._settings, self._clip_norm = settings, settings.clip_norm
        self._divides = divides
        self._is_deterministic = settings.deterministic is not None
        self.autocast = session.autocast(settings.precision)
        self.scaler: torch.amp.GradScaler = session.grad_scaler(settings.precision)
        self.named: NamedParts = NamedParts()
        self.grad_norm: Tensor | None = None
        self._averaging_s = 0.0  # time that averaging took in the last pass, without waiting for other ranks

    def begin(self, run_log: RunLog, step: int) -> FiniteGuard:
        """Begin to time the phases of the steps after `step`; return the guard that checks these steps for NaN."""
        self._clock = run_log.clock
        how = "never" if self.scaler.is_enabled() else self._divides
        clips = self._clip_norm is not None
        self._divided = DividedStep(self._optimizer, self._model, self._session, how, run_log.say, clips=clips)
        self._guard = FiniteGuard(
            self._settings.on_nan, self._module, self._objective, self._ranks, run_log,
            autocast=self.autocast, skips_steps=self.scaler.is_enabled(), clips=clips, step=step,
        )  # fmt: skip
        if self._clip_norm is not None and self._ddp is not None:
            self._ddp.grad_norm()  # averaging computes the norm from the first step on, so all steps round alike
        return self._guard

    def sentinel(self, step: int) -> tuple[Sentinel, str]:
        """Return the sentinel that compares the ranks' copies, and a line for the user if it can't compare them.

        Every rank must call this.
        """
        group, kinds = getattr(self._model, "process_group", None), []
        if self._ranks.world_size == 1 or group is None or group.size() < self._ranks.world_size:
            group = None  # one rank, FSDP2, or ranks that train independently
        elif self._settings.compare_every:
            kinds = list(dict.fromkeys(self._ranks.gather(kind_of_processor(self._device))))
        why = ""
        if len(kinds) > 1:
            why = f"the ranks' copies are not compared: their processors round differently ({', '.join(kinds)})"
        every = 0 if why else self._settings.compare_every
        divided = self._divided
        return Sentinel(self._model, self._optimizer, group, every, lambda p: divided.length(p) > 0, step), why

    def backward(self, parts: Sequence[Part], num_samples: int, step: int, epoch: int) -> Tensor:
        """Compute the averaged gradients of a global batch, and return this rank's part of the batch's mean loss.

        The ranks' parts add up to the mean times the number of ranks.

        Args:
            parts: This rank's parts of the batch.
            num_samples: Number of samples in the batch, over all ranks; 0: unknown.
            step: Number of the step, for messages.
            epoch: Number of the epoch, for messages.
        """
        if self._is_deterministic:
            return self._sum_over_shards(parts, num_samples, step, epoch)
        losses = []
        for number, (batch, size) in enumerate(parts, start=1):
            # The model averages gradients over the ranks; with this weight, the result is the mean over all samples.
            weight = size * self._ranks.world_size / num_samples if num_samples else 1 / len(parts)
            with synchronizing(self._model, number == len(parts)) if len(parts) > 1 else _NOTHING:
                losses.append(self._forward_backward(batch, weight, step, epoch))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _sum_over_shards(self, parts: Sequence[Part], num_samples: int, step: int, epoch: int) -> Tensor:
        def backward(shard: int) -> Tensor:
            batch, size = parts[shard]
            if size == 0:
                return torch.zeros((), device=self._device)
            with synchronizing(self._model, False):
                return self._forward_backward(batch, size / num_samples, step, epoch)

        parameters = [p for p in self._module.parameters() if p.requires_grad]
        return determinism.sum_gradients(parameters, self._ranks, len(parts), backward, (self._settings.seed, step - 1))

    def _forward_backward(self, batch: Any, weight: float, step: int, epoch: int) -> Tensor:
        clock = self._clock
        clock.begin("forward")
        if self._device.type != "cpu":
            batch = to_device(batch, self._device)
        if self._settings.channels_last:
            batch = lay_out_batch(batch)
        with self.autocast:
            loss, named = self._objective.loss_of(self._model, batch)
        if named:
            self.named.add(named, weight)
        if weight != 1:
            loss = loss * weight
        clock.lap("forward")
        clock.begin("backward")
        self._divided.is_next = True
        self.scaler.scale(loss).backward()
        self._divided.is_next = False
        loss = loss.detach()
        self._guard.look_at_loss(loss, batch, step, epoch)
        clock.lap("backward")
        if self._ddp is not None:
            averaging_s, waiting_s = self._ddp.take_averaging_s(), self._ddp.take_waiting_s()
            clock.move(averaging_s, "backward", "exchange")
            clock.move(waiting_s, "exchange", "wait")
            self._averaging_s = averaging_s - waiting_s
        return loss

    def optimize(self, step: int, epoch: int) -> None:
        """Clip the averaged gradients, step the optimizer and the schedule, and clear the gradients."""
        self._clock.lap("exchange")
        self._clock.begin("optimizer")
        if self._clip_norm is not None:
            self.grad_norm = self._clip(self._clip_norm)
            self._guard.look_at_norm(self.grad_norm, step, epoch)
        else:
            self._guard.look_at_gradient(step, epoch)
        self._divided.step(self._step, self._averaging_s)
        self.scaler.update()
        self._optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self._clock.lap("optimizer")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._divided.end()  # so that, after `fit`, the script may use its optimizer on a single rank

    def _step(self) -> None:
        self.scaler.step(self._optimizer)

    def _clip(self, largest: float) -> Tensor:
        """Scale the gradients down if their norm exceeds `largest`; return the norm before scaling."""
        self.scaler.unscale_(self._optimizer)
        if self._ddp is None or self._is_deterministic or self.scaler.is_enabled():
            return nn.utils.clip_grad_norm_(self._module.parameters(), largest)
        norm = self._ddp.grad_norm()  # computed while the gradients were averaged
        if norm > largest:
            grads = [p.grad for p in self._module.parameters() if p.grad is not None]
            foreach_mul_(grads, float(largest / (norm + 1e-6)))
        return norm
