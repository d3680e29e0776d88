"""Losses and weights that are not finite: noticed where ranks meet anyway, explained, and never saved."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx._errors import NonFinite
from phalanx.data import RandomState
from phalanx.train.objective import Objective
from phalanx.train.ranks import Ranks
from phalanx.train.watch import Watch
from phalanx.train.wrapper import is_sharded

_LOSS, _GRADIENT, _PARAMETER = range(3)
_SMALLEST_SCALE = 2.0**-20  # no finite gradient overflows at that


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rank saw: the step, its epoch, what was not finite there, and where that began.

    Attributes:
        order: Place of what was seen in the step: a loss spoils all ranks' gradients, and these the parameters.
    """

    step: int
    order: int
    epoch: int
    what: str
    origin: str


class FiniteGuard:
    """Notices what is not finite without waiting for a device, and lets all ranks act on it at their next meeting.

    A loss on the CPU is looked at in each pass; one on another device, when it is logged. Weights are looked at before
    they are kept: a state with one that is not finite is neither saved nor kept as a snapshot, whatever `on_nan` says.

    Args:
        on_nan: "raise" an error on all ranks, "warn" once, or "ignore" what is no weight.
        module: The model inside its wrapper.
        objective: What computes the loss, again if it has to be explained.
        ranks: All ranks of the job.
        watch: What a warning is shown and recorded by.
        autocast: Returns the context in which a loss is computed.
        skips_steps: A gradient that is not finite skips the step, as with a gradient scaler.
    """

    def __init__(
        self,
        on_nan: Literal["raise", "warn", "ignore"],
        module: nn.Module,
        objective: Objective,
        ranks: Ranks,
        watch: Watch,
        *,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        skips_steps: bool,
    ) -> None:
        self._on_nan = on_nan
        self._module = module
        self._objective = objective
        self._ranks = ranks
        self._watch = watch
        self._autocast = autocast
        self._skips_steps = skips_steps
        self._finding: Finding | None = None  # the first since all ranks were told
        self._has_warned = False

    @property
    def has_finding(self) -> bool:
        """Whether this rank has seen something that it has not told the others yet."""
        return self._finding is not None

    def look_at_loss(self, loss: Tensor, batch: Any, step: int, epoch: int) -> None:
        """Look at the loss of a pass whose backward is done; free on the CPU, nothing on other devices."""
        if loss.device.type == "cpu" and not math.isfinite(value := loss.item()):
            self.note(f"the loss is {value}", step, epoch, batch)

    def look_at_norm(self, norm: Tensor, step: int, epoch: int) -> None:
        """Look at the norm of the averaged gradient, where it is known."""
        if norm.device.type == "cpu" and not self._skips_steps and not math.isfinite(value := norm.item()):
            self.note(f"the gradient's norm is {value}, although the loss is finite", step, epoch, order=_GRADIENT)

    def look_at_scale(self, scale: float, step: int, epoch: int) -> None:
        """Look at the gradient scaler's scale, which halves with each step that is skipped."""
        if scale < _SMALLEST_SCALE:
            what = f"the gradient scaler's scale has come down to {scale:g}: it skips every step"
            self.note(what, step, epoch, order=_GRADIENT)

    def note(self, what: str, step: int, epoch: int, batch: Any = None, order: int = _LOSS) -> None:
        """Remember what was not finite, and look for its origin, until the ranks meet."""
        if self._finding is None and self._on_nan != "ignore":
            origin = "Where it began is not known"
            with contextlib.suppress(Exception):  # whatever a model does when it is called alone
                origin = self._origin(batch)
            self._finding = Finding(step, order, epoch, what, origin)

    def may_keep(self, step: int, epoch: int) -> bool:
        """Return whether the state may be saved, the same on every rank; every rank calls it.

        Raises:
            NonFinite: As `settle` does.
        """
        name = first_bad_parameter(self._module)
        if name and self._finding is None:
            text = f"parameter {name!r} is not finite"
            self._finding = Finding(step, _PARAMETER, epoch, text, "Its gradient was not, although the loss was finite")
        worst = self._ranks.largest(2 if name else int(self.has_finding))
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
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        message = (
            f"Trainer.fit: step {step}, epoch {first.epoch}, {named}: {first.what}. {first.origin}. No state with "
            "weights that are not finite was saved. Mend the data, lower the learning rate or set clip_norm; "
            'on_nan="warn" goes on'
        )
        facts: dict[str, Any] = {"step": step, "epoch": first.epoch}
        if self._on_nan == "raise" or not self._has_warned:
            self._watch.record("not_finite", ranks=ranks, message=message, **facts)
        if self._on_nan == "raise":
            raise NonFinite(message, op="Trainer.fit", ranks=tuple(ranks), **facts)
        if not self._has_warned:
            self._watch.say(f"warning: {message}. This is said once")
        self._has_warned = True

    def _origin(self, batch: Any) -> str:
        """Return a sentence about where what is not finite began: in the batch, a parameter, a gradient, a module."""
        if (path := _first_bad_tensor(batch, "batch", allows_minus_inf=True)) is not None:
            return f"It began in the data: {path}"
        if name := first_bad_parameter(self._module):
            return f"It began in parameter {name!r}, which was not finite when the step began"
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
            with _as_before(self._module), torch.no_grad(), self._autocast(), contextlib.suppress(Exception):
                self._objective.loss_of(self._module, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else "The batch, the parameters and all modules' outputs are finite: the loss is not"


def first_bad_parameter(module: nn.Module) -> str:
    """Return the name of the first parameter under training that is not finite; empty if all are."""
    trained = [(name, _local(p)) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        return ""
    device = trained[0][1].device
    sums = torch.stack([tensor.sum().abs().to(device, torch.float64) for _, tensor in trained])
    if sums.isfinite().all():  # a sum can overflow by itself, but not hide anything
        return ""
    return next((name for name, tensor in trained if not _is_finite(tensor)), "")


def _first_bad_tensor(value: Any, path: str, *, allows_minus_inf: bool = False) -> str | None:
    """Return what is wrong with the first tensor of nested values that is not finite; None if all are.

    Args:
        allows_minus_inf: Take -inf for what it is in the masks of attention: meant.
    """
    if isinstance(value, Tensor):
        is_bad = ~torch.isfinite(value) & (value != -math.inf if allows_minus_inf else True)
        if not (num_bad := int(is_bad.sum())):
            return None
        return f"{path}, of shape {tuple(value.shape)}, has {num_bad} elements that are not finite"
    items: Any = value.items() if isinstance(value, Mapping) else ()
    items = enumerate(value) if isinstance(value, tuple | list) else items
    found = (_first_bad_tensor(item, f"{path}[{key!r}]", allows_minus_inf=allows_minus_inf) for key, item in items)
    return next((text for text in found if text is not None), None)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(_local(tensor)).all())


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Leave buffers and random numbers as they are."""
    drawn = RandomState()
    numbers, buffers = drawn.state_dict(), [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        drawn.load_state_dict(numbers)
