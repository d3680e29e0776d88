"""`FiniteGuard`: notices losses and weights that are not finite, explains them, and keeps them from being saved.

- **Losses.** On the CPU each pass checks its loss, which is free. On another device, a check would make the program
  wait for the device, so losses are checked when they are logged. The rank that finds a bad loss searches for its
  origin at once, on its own (see `nan_origin`). It tells the other ranks when the ranks next communicate: after a step,
  at the log, at a snapshot or a save. All ranks raise the same `NonFinite`. If several ranks have findings, the error
  reports the earliest, because a bad loss spoils the averaged gradient, and so the weights of all ranks in the same
  step.
- **States.** Before each snapshot and each save, the parameters under training and the saved buffers are added up,
  which reads them once. A state that is not finite is never kept, whatever ``on_nan`` says. At the end of each epoch, a
  line reports how many checkpoints were left out. Parameters and buffers that were not finite when `fit` began count as
  intended, and so does -inf in a buffer (masks).
- **Gradients.** Not all gradients are checked. A bad gradient shows in the next loss or save, so the message names the
  steps in which the gradient may have become bad. The gradient of the first small parameter is summed in each step:
  backward goes from the last module to the first, so a bad value that arises anywhere nearly always reaches the first
  module. If that gradient is not finite, each rank computes its batch again on a copy of the model, with hooks on the
  modules' gradients. The error then names the ranks that computed a bad gradient.
- **fp16.** A loss or gradient that makes the scaler skip a step is no error. 36 bad losses in a row are an error, and
  so is a scale below 2^-20.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx._errors import NonFinite
from phalanx._text import named
from phalanx.train.report.run_log import RunLog
from phalanx.train.step.nan_origin import FINITE_BEFORE, UNKNOWN, Origin, Replay, first_bad_tensor, is_finite, local
from phalanx.train.step.objective import Objective
from phalanx.wire.rank_group import RankGroup

_LOSS, _GRADIENT, _AVERAGED, _STATE = range(4)
_FEW_ELEMS = 1 << 14  # adding up this few elements takes hardly any time
_SMALLEST_SCALE = 2.0**-20  # at this scale no finite gradient overflows
_MAX_SKIPPED = 36  # limit for skipped steps in a row, each of which halves the scale: from 2^16 to the smallest
_SUMMABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A value that is not finite, as one rank has found it.

    Attributes:
        step: Number of the step.
        order: Position in the chain of causes within a step: a bad loss spoils the gradients of all ranks, and the
            gradients spoil the parameters.
        epoch: Number of the epoch.
        what: Description of what is not finite.
        origin: Tensor and module in which the value arose.
    """

    step: int
    order: int
    epoch: int
    what: str
    origin: Origin


class FiniteGuard:
    """Notices non-finite values, without waiting for a device; all ranks act on them when they next communicate.

    The guard checks a loss on the CPU in each pass, one small gradient in each step, and a loss on another device when
    it is logged. It checks the parameters under training and the saved buffers before each save and snapshot: a state
    that is not finite is never kept, whatever `on_nan` says. Parameters and buffers that are not finite when the guard
    is made count as intended: the guard does not check them again. Nor does it check buffers that are added later.

    Args:
        on_nan: Reaction to a loss or gradient that is not finite: "raise" an error on all ranks, "warn" once, or
            "ignore" it.
        module: Model without its wrapper.
        objective: Objective that computes the loss, and computes it again to find the origin of a bad loss.
        ranks: All ranks of the job.
        run_log: Log that shows and records a warning.
        autocast: Context in which the loss is computed.
        skips_steps: Whether a step is skipped if its gradient is not finite, as with a gradient scaler.
        clips: Whether gradients are clipped; if not, errors advise clipping.
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
        self._replay = Replay(module, objective, autocast)
        self._batches: list[Any] = []  # batches of a step's passes, until its gradient has been checked
        small = (p for p in module.parameters() if p.requires_grad and not is_lazy(p) and p.numel() <= _FEW_ELEMS)
        self._first_small = next(small, None)
        self._ranks = ranks
        self._run_log = run_log
        self._skips_steps = skips_steps
        self._clips = clips
        self._num_skipped = 0  # bad losses in a row for which the scaler skips steps
        self._state = _State(module)
        self._finite_step = step  # the last step after which the state was known to be finite
        self._finding: Finding | None = None  # the first finding that the other ranks do not know of
        self._has_warned = False
        self._has_said_skipped = False

    @property
    def has_finding(self) -> bool:
        """Whether this rank has a finding that the other ranks do not know of yet."""
        return self._finding is not None

    def what_is_meant(self) -> str:
        """Return a line on parameters that were not finite at first, empty if there are none; every rank must call."""
        names = dict.fromkeys(name for of_rank in self._ranks.gather(self._state.not_finite) for name in of_rank)
        listed = ", ".join(map(repr, names))
        return listed and f"not finite from the beginning, so not looked at for NaN: parameter {listed}"

    def look_at_loss(self, loss: Tensor, batch: Any, step: int, epoch: int) -> None:
        """Check that the loss of a pass is finite, after the backward pass; do nothing on devices other than the CPU.

        The check costs nothing on the CPU. If a gradient scaler skips steps that are not finite, a loss that is not
        finite is an error only after many such losses in a row.
        """
        if not loss.is_cpu:
            return
        if math.isfinite(value := loss.item()):
            self._num_skipped = 0
            if self._on_nan != "ignore":
                self._batches.append(batch)
            return
        self._num_skipped += 1
        if not self._skips_steps:
            self.note(f"the loss is {value}", step, epoch, batch)
        elif self._num_skipped >= _MAX_SKIPPED:
            what = f"the loss is {value}, as {self._num_skipped - 1} times before: the gradient scaler skips every step"
            self.note(what, step, epoch, batch)

    def look_at_log(self, losses: Sequence[float], rank: int, step: int, epoch: int) -> None:
        """Check each rank's mean loss since the last log; every rank must call this.

        Raises:
            NonFinite: Under the same conditions as `settle`.
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
        """Check the norm of the averaged gradient, which is computed only if gradients are clipped."""
        batches, self._batches = self._batches, []
        if norm.device.type == "cpu" and not self._skips_steps and not math.isfinite(value := norm.item()):
            self._note_gradient(f"the gradient's norm is {value}, although the loss is finite", step, epoch, batches)

    def look_at_gradient(self, step: int, epoch: int) -> None:
        """Check one small averaged gradient on the CPU: the gradient of the model's first small parameter.

        A bad value that arises anywhere in a backward pass nearly always reaches the first module.
        """
        batches, self._batches = self._batches, []
        grad = None if self._first_small is None or self._skips_steps else self._first_small.grad
        if not batches or grad is None or grad.layout is not torch.strided or not grad.is_cpu:
            return
        if not math.isfinite(grad.sum().item()) and not is_finite(grad):
            self._note_gradient("a gradient is not finite, although the loss is", step, epoch, batches)

    def look_at_scale(self, scaler: torch.amp.GradScaler, step: int, epoch: int) -> None:
        """Check the gradient scaler's scale, which halves with each skipped step."""
        if scaler.is_enabled() and (scale := scaler.get_scale()) < _SMALLEST_SCALE:
            what = f"the gradient scaler's scale has dropped to {scale:g}: it skips every step"
            self.note(what, step, epoch, is_past=True)

    def note(self, what: str, step: int, epoch: int, batch: Any = None, *, is_past: bool = False) -> None:
        """Keep a finding about a loss, with its origin, until the ranks next communicate.

        With `is_past`, the step is over, and any earlier step since the last check may be the cause.
        """
        if self._finding is None and self._on_nan != "ignore":
            origin = UNKNOWN
            with contextlib.suppress(Exception):  # a model may fail if only this rank calls it
                origin = self._origin(batch, step, is_past)
            self._finding = Finding(step, _LOSS, epoch, what, origin)

    def may_keep(self, step: int, epoch: int) -> bool:
        """Return whether the state may be saved, the same on every rank; every rank must call this.

        Raises:
            NonFinite: Under the same conditions as `settle`.
        """
        bad = self._state.first_bad()
        if not bad:
            self._finite_step = step
        elif self._finding is None:
            origin = Origin(f"It became non-finite {self._until(step)}", bad)
            self._finding = Finding(step, _STATE, epoch, f"{bad} is not finite", origin)
        worst = self._ranks.largest(2 if bad else int(self.has_finding))
        if worst:
            self.settle()
        return worst < 2

    def settle(self) -> None:
        """Raise or warn about what any rank has found; every rank must call this.

        Raises:
            NonFinite: The same on every rank, if `on_nan` is "raise".
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
            f"Trainer.fit: step {step}, epoch {first.epoch + 1}, {named('rank', ranks)}: {first.what}. "
            f"{first.origin.words}. No state with weights that are not finite is saved. "
            f"If that is not intended, {advice}" + ('; on_nan="warn" goes on' if self._on_nan == "raise" else "")
        )
        facts: dict[str, Any] = {"step": step, "epoch": first.epoch}
        if self._on_nan == "raise" or not self._has_warned:
            self._run_log.record("not_finite", ranks=ranks, message=message, **facts)
        if self._on_nan == "raise":
            where = {"tensor": first.origin.tensor, "module": first.origin.module}
            raise NonFinite(message, op="Trainer.fit", ranks=tuple(ranks), **facts, **where)
        if not self._has_warned:
            self._run_log.say(f"warning: {message}. This warning is shown once")
        self._has_warned = True

    def _until(self, step: int) -> str:
        """Return a phrase for the steps since the last check, up to `step`; in one of them the state became bad."""
        first = self._finite_step + 1
        return f"in step {step}" if first >= step else f"in one of the steps {first} to {step}"

    def _origin(self, batch: Any, step: int, is_past: bool) -> Origin:
        """Return the origin of a bad loss: the batch, the weights, or a module's output."""
        if (path := first_bad_tensor(batch, "batch", allows_minus_inf=True)) is not None:
            return Origin(f"It began in the data: {path}", path.partition(",")[0])
        if bad := self._state.first_bad():
            if is_past:
                return Origin(f"Where it began is not known; {bad} is not finite either", bad)
            when = f"{self._until(step - 1)}: {bad} was not finite any more when step {step} began"
            return Origin(f"It began before, {when}", bad)
        return FINITE_BEFORE if batch is None else self._replay.origin_of_loss(batch)

    def _note_gradient(self, what: str, step: int, epoch: int, batches: Sequence[Any]) -> None:
        """Keep a finding about an averaged gradient; ranks whose own gradient was bad take precedence."""
        if self._finding is not None or self._on_nan == "ignore" or self._has_warned:
            return
        origin, order = None, _AVERAGED
        with contextlib.suppress(Exception):  # a model may fail when only this rank calls it
            origin = next(filter(None, map(self._replay.first_bad_gradient, batches)), None)
        if origin is not None:
            order = _GRADIENT
        else:
            bad = next(
                (n for n, p in self._module.named_parameters() if p.grad is not None and not is_finite(p.grad)), ""
            )
            words = f"The first gradient that is not finite is that of parameter {bad!r}"
            origin = Origin(words, f"gradient of parameter {bad!r}") if bad else UNKNOWN
        self._finding = Finding(step, order, epoch, what, origin)


class _State:
    """Trained parameters and saved floating-point buffers of a module, without those that were bad at the beginning.

    Attributes:
        not_finite: Names of the parameters under training that were not finite at the beginning.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parameters = dict(module.named_parameters())
        bad = {
            name for name in parameters if not is_lazy(p := parameters[name]) and _is_summable(p) and not is_finite(p)
        }
        self._left_out = bad
        self.not_finite = [name for name in parameters if name in bad and parameters[name].requires_grad]
        saved = module.state_dict().keys()
        self._sizes = {
            name: buffer.shape
            for name, buffer in module.named_buffers()
            if name in saved and not is_lazy(buffer) and _is_summable(buffer) and is_finite(buffer)
        }

    def first_bad(self) -> str:
        """Return the first tensor that is not finite, such as ``parameter '0.weight'``; empty if all are finite."""
        parameters = [
            (name, local(p))
            for name, p in self._module.named_parameters()
            if p.requires_grad and name not in self._left_out
        ]
        buffers = [
            (name, local(buffer))
            for name, buffer in self._module.named_buffers()
            if buffer.shape == self._sizes.get(name)  # a buffer that has grown may hold anything by design
        ]
        looked_at = parameters + buffers
        if not looked_at:
            return ""
        device = looked_at[0][1].device
        sums = torch.stack([tensor.sum().abs().to(device, torch.float64) for _, tensor in looked_at])
        if sums.isfinite().all():  # a bad element always makes a bad sum; an overflow makes one, too
            return ""
        found = (f"parameter {name!r}" for name, tensor in parameters if not is_finite(tensor))
        in_buffers = (f"buffer {name!r}" for name, b in buffers if first_bad_tensor(b, "", allows_minus_inf=True))
        return next(itertools.chain(found, in_buffers), "")


def _is_summable(tensor: Tensor) -> bool:
    return tensor.dtype in _SUMMABLE and not tensor.is_meta and tensor.layout == torch.strided
