"""Losses and weights that are not finite: noticed where ranks meet anyway, explained, and never saved."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx._errors import NonFinite
from phalanx._nested import tensors_in
from phalanx._rank_group import RankGroup
from phalanx._text import counted, named
from phalanx.data.random_state import random_state_kept
from phalanx.train.objective import Objective
from phalanx.train.run_log import RunLog
from phalanx.train.wrapper import is_sharded

_LOSS, _GRADIENT, _STATE = range(3)
_SMALLEST_SCALE = 2.0**-20  # no finite gradient overflows at that
_MAX_SKIPPED = 36  # in a row; as many as bring a scaler from its first scale to the smallest
_SUMMABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rank has seen that was not finite.

    Attributes:
        step: Number of the step.
        order: Rank of the cause within the step: a loss spoils the gradients of all ranks, and these the parameters.
        epoch: Number of the epoch.
        what: Words for what is not finite.
        origin: Sentence that tells where it began.
    """

    step: int
    order: int
    epoch: int
    what: str
    origin: str


class FiniteGuard:
    """Notices what is not finite without waiting for a device, and lets all ranks act on it at their next meeting.

    A loss on the CPU is looked at in each pass; one on another device, when it is logged. Parameters under training and
    the buffers of the state are looked at before they are kept: a state with one that is not finite is neither saved
    nor kept as a snapshot, whatever `on_nan` says. Those that are not finite when the guard is made are meant to be so:
    they are not looked at again, nor are buffers that come later.

    Args:
        on_nan: Reaction to a loss or gradient: "raise" an error on all ranks, "warn" once, or "ignore" it.
        module: Model without its wrapper.
        objective: Objective that computes the loss, and again to find its origin.
        ranks: All ranks of the job.
        run_log: Run log that shows and records a warning.
        autocast: Context in which the loss is computed.
        skips_steps: Whether a gradient that is not finite skips the step, as with a gradient scaler.
        clips: Whether gradients are clipped already.
        step: Number of the step after which the guard is made.
    """

    def __init__(
        self,
        on_nan: Literal["raise", "warn", "ignore"],
        module: nn.Module,
        objective: Objective,
        ranks: RankGroup,
        run_log: RunLog,
        *,
        autocast: contextlib.AbstractContextManager[Any],
        skips_steps: bool,
        clips: bool,
        step: int,
    ) -> None:
        self._on_nan = on_nan
        self._module = module
        self._objective = objective
        self._ranks = ranks
        self._run_log = run_log
        self._autocast = autocast
        self._skips_steps = skips_steps
        self._clips = clips
        self._num_skipped = 0  # losses in a row
        self._state = _State(module)
        self._finite_step = step  # the last after which the state was finite
        self._finding: Finding | None = None  # the first since all ranks were told
        self._has_warned = False
        self._has_said_skipped = False

    @property
    def has_finding(self) -> bool:
        """Whether this rank has seen something that it has not told the others yet."""
        return self._finding is not None

    def what_is_meant(self) -> str:
        """Return which parameters are not finite from the beginning; empty if none is. Every rank calls it."""
        names = dict.fromkeys(name for of_rank in self._ranks.gather(self._state.not_finite) for name in of_rank)
        listed = ", ".join(map(repr, names))
        return listed and f"not finite from the beginning, so not looked at for NaN: parameter {listed}"

    def look_at_loss(self, loss: Tensor, batch: Any, step: int, epoch: int) -> None:
        """Look at the loss of a pass whose backward is done; free on the CPU, nothing on other devices.

        Where a gradient scaler skips the step, only a loss that stays so is an error.
        """
        if not loss.is_cpu:
            return
        if math.isfinite(value := loss.item()):
            self._num_skipped = 0
            return
        self._num_skipped += 1
        if not self._skips_steps:
            self.note(f"the loss is {value}", step, epoch, batch)
        elif self._num_skipped >= _MAX_SKIPPED:
            what = f"the loss is {value}, as {self._num_skipped - 1} times before: the gradient scaler skips every step"
            self.note(what, step, epoch, batch)

    def look_at_log(self, losses: Sequence[float], rank: int, step: int, epoch: int) -> None:
        """Look at each rank's mean loss since the last log; every rank calls it.

        Raises:
            NonFinite: As `settle` does.
        """
        if all(map(math.isfinite, losses)):
            return
        if self._skips_steps:
            if not self._has_said_skipped:
                self._run_log.say(
                    f"step {step}: a loss since the last log is not finite; the gradient scaler skips that"
                )
            self._has_said_skipped = True
            return
        if not math.isfinite(losses[rank]):
            self.note(f"the mean loss since it was logged last is {losses[rank]}", step, epoch, is_past=True)
        self.settle()

    def look_at_norm(self, norm: Tensor, step: int, epoch: int) -> None:
        """Look at the norm of the averaged gradient, where it is known."""
        if norm.device.type == "cpu" and not self._skips_steps and not math.isfinite(value := norm.item()):
            self.note(f"the gradient's norm is {value}, although the loss is finite", step, epoch, order=_GRADIENT)

    def look_at_scale(self, scaler: torch.amp.GradScaler, step: int, epoch: int) -> None:
        """Look at the gradient scaler's scale, which halves with each step that is skipped."""
        if scaler.is_enabled() and (scale := scaler.get_scale()) < _SMALLEST_SCALE:
            what = f"the gradient scaler's scale has come down to {scale:g}: it skips every step"
            self.note(what, step, epoch, order=_GRADIENT, is_past=True)

    def note(
        self, what: str, step: int, epoch: int, batch: Any = None, order: int = _LOSS, *, is_past: bool = False
    ) -> None:
        """Remember what was not finite, until the ranks meet, and where it began.

        If the step `is_past`, an earlier one since the last look may be the cause.
        """
        if self._finding is None and self._on_nan != "ignore":
            origin = "Where it began is not known"
            with contextlib.suppress(Exception):  # whatever a model does when it is called alone
                origin = self._origin(batch, step, is_past)
            self._finding = Finding(step, order, epoch, what, origin)

    def may_keep(self, step: int, epoch: int) -> bool:
        """Return whether the state may be saved, the same on every rank; every rank calls it.

        Raises:
            NonFinite: As `settle` does.
        """
        bad = self._state.first_bad()
        if not bad:
            self._finite_step = step
        elif self._finding is None:
            self._finding = Finding(step, _STATE, epoch, f"{bad} is not finite", f"It became so {self._until(step)}")
        worst = self._ranks.largest(2 if bad else int(self.has_finding))
        if worst:
            self.settle()
        return worst < 2

    def settle(self) -> None:
        """Raise or warn of what any rank has found; every rank calls it.

        Raises:
            NonFinite: On every rank the same, if `on_nan` is "raise".
        """
        findings = self._ranks.gather(self._finding)
        self._finding = None
        found = {rank: finding for rank, finding in enumerate(findings) if finding is not None}
        if not found:
            return
        first = min(found.values(), key=lambda finding: (finding.step, finding.order))
        step = first.step
        ranks = [rank for rank, other in found.items() if (other.step, other.order) == (step, first.order)]
        advice = "fix the data or lower the learning rate"
        if not self._clips:
            advice = "fix the data, lower the learning rate or set clip_norm"
        message = (
            f"Trainer.fit: step {step}, epoch {first.epoch + 1}, {named('rank', ranks)}: {first.what}. {first.origin}. "
            f"No state with weights that are not finite is saved. If it isn't meant, {advice}"
            + ('; on_nan="warn" goes on' if self._on_nan == "raise" else "")
        )
        facts: dict[str, Any] = {"step": step, "epoch": first.epoch}
        if self._on_nan == "raise" or not self._has_warned:
            self._run_log.record("not_finite", ranks=ranks, message=message, **facts)
        if self._on_nan == "raise":
            raise NonFinite(message, op="Trainer.fit", ranks=tuple(ranks), **facts)
        if not self._has_warned:
            self._run_log.say(f"warning: {message}. This is said once")
        self._has_warned = True

    def _until(self, step: int) -> str:
        """Return in which steps up to `step` a state became bad that was finite when it was last looked at."""
        first = self._finite_step + 1
        return f"in step {step}" if first >= step else f"in one of the steps {first} to {step}"

    def _origin(self, batch: Any, step: int, is_past: bool) -> str:
        """Return a sentence about where what is not finite began: in the batch, before, in a gradient, in a module."""
        if (path := _first_bad_tensor(batch, "batch", allows_minus_inf=True)) is not None:
            return f"It began in the data: {path}"
        if bad := self._state.first_bad():
            if is_past:
                return f"Where it began is not known; {bad} is not finite either"
            return f"It began before, {self._until(step - 1)}: {bad} was not finite any more when step {step} began"
        for name, parameter in self._module.named_parameters():
            if batch is None and parameter.grad is not None and not _is_finite(parameter.grad):
                return f"The first gradient that is not finite is that of parameter {name!r}"
        return self._first_bad_module(batch)

    def _first_bad_module(self, batch: Any) -> str:
        """Compute the loss of the batch once more, and return which module's output is the first not to be finite."""
        found: list[str] = []

        def look(module: nn.Module, _: Any, output: Any) -> None:
            path = None if found else _first_bad_tensor(output, "its output")
            if path is not None:
                found.append(f"It began in module {names[module] or 'model'!r} ({type(module).__name__}): {path}")

        names = {module: name for name, module in self._module.named_modules()}
        if batch is None or is_sharded(self._module) or any("SyncBatchNorm" in type(m).__name__ for m in names):
            return "The batch and the parameters are finite"  # what meets other ranks can't be computed by one alone
        hooks = [module.register_forward_hook(look) for module in names]
        try:
            with _as_before(self._module), torch.no_grad(), self._autocast, contextlib.suppress(Exception):
                self._objective.loss_of(self._module, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else "The batch, the parameters and all modules' outputs are finite: the loss is not"


class _State:
    """The parameters under training and the floating buffers of a module's state, apart from those that began bad.

    Attributes:
        not_finite: Names of the parameters under training that were not finite at the beginning.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parameters = dict(module.named_parameters())
        bad = {
            name for name in parameters if not is_lazy(p := parameters[name]) and _is_summable(p) and not _is_finite(p)
        }
        self._left_out = bad
        self.not_finite = [name for name in parameters if name in bad and parameters[name].requires_grad]
        saved = module.state_dict().keys()
        self._sizes = {
            name: buffer.shape
            for name, buffer in module.named_buffers()
            if name in saved and not is_lazy(buffer) and _is_summable(buffer) and _is_finite(buffer)
        }

    def first_bad(self) -> str:
        """Return what the first is that is not finite, such as ``parameter '0.weight'``; empty if all are."""
        parameters = [
            (name, _local(p))
            for name, p in self._module.named_parameters()
            if p.requires_grad and name not in self._left_out
        ]
        buffers = [
            (name, _local(buffer))
            for name, buffer in self._module.named_buffers()
            if buffer.shape == self._sizes.get(name)  # one that has grown may hold anything by design
        ]
        looked_at = parameters + buffers
        if not looked_at:
            return ""
        device = looked_at[0][1].device
        sums = torch.stack([tensor.sum().abs().to(device, torch.float64) for _, tensor in looked_at])
        if sums.isfinite().all():  # a sum can overflow by itself, but not hide anything
            return ""
        found = (f"parameter {name!r}" for name, tensor in parameters if not _is_finite(tensor))
        in_buffers = (f"buffer {name!r}" for name, b in buffers if _first_bad_tensor(b, "", allows_minus_inf=True))
        return next(itertools.chain(found, in_buffers), "")


def _is_summable(tensor: Tensor) -> bool:
    return tensor.dtype in _SUMMABLE and not tensor.is_meta and tensor.layout == torch.strided


def _first_bad_tensor(value: Any, path: str, *, allows_minus_inf: bool = False) -> str | None:
    """Return what is wrong with the first tensor of nested values that is not finite; None if all are.

    Masks of attention hold -inf by design.
    """
    for where, tensor in tensors_in(value, path):
        is_bad = ~torch.isfinite(tensor) & (tensor != -math.inf if allows_minus_inf else True)
        if num_bad := int(is_bad.sum()):
            return f"{where}, of shape {tuple(tensor.shape)}, has {counted(num_bad, 'element')} not finite"
    return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(_local(tensor)).all())


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Leave buffers and random numbers as they are."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with random_state_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
