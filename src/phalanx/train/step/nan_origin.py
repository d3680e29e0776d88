"""Finds the origin of a value that is not finite: the tensor, and the module that computed it, forward or backward.

The search checks the batch, then the parameters, and then the modules' outputs, by computing the batch again. This
second pass starts from the buffers and counters that the first pass has left, because a copy before each pass would
cost time. So if the second pass is finite, the message says only that; it does not say that the modules are right.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx._text import counted
from phalanx._torch.nested import tensors_in
from phalanx.data.random_state import random_state_kept
from phalanx.train.step.objective import Objective
from phalanx.train.wrapper import is_sharded


class Origin(NamedTuple):
    """Origin of a value that is not finite.

    Attributes:
        words: Sentence about the origin.
        tensor: Name of the first tensor that was not finite; empty if unknown.
        module: Name of the module that computed this tensor; empty if unknown.
    """

    words: str
    tensor: str = ""
    module: str = ""


UNKNOWN = Origin("Where it began is not known")
FINITE_BEFORE = Origin("The batch and the parameters are finite")
_ONLY_LOSS = Origin("The batch, the parameters and all modules' outputs are finite: the loss is not")
_REPEATED_FINITE = Origin(
    "The batch and the parameters are finite, and so was a second forward pass of the same batch: the pass does not "
    "repeat itself; look at its counters, buffers and random numbers"
)


class Replay:
    """Computes the loss of a batch again on this rank only, to find the module that made the loss bad.

    Args:
        module: Model without its wrapper.
        objective: Objective that computes the loss.
        autocast: Context in which the loss is computed.
    """

    def __init__(
        self, module: nn.Module, objective: Objective, autocast: contextlib.AbstractContextManager[Any]
    ) -> None:
        self._module, self._objective, self._autocast = module, objective, autocast

    @property
    def is_possible(self) -> bool:
        """Whether a single rank can compute the loss: no module calls a collective."""
        meets = is_sharded(self._module) or any("SyncBatchNorm" in type(m).__name__ for m in self._module.modules())
        return not meets

    def origin_of_loss(self, batch: Any) -> Origin:
        """Return the first module whose output is not finite; if all outputs are finite, say so.

        The second pass starts from the state that the first pass left: a counter, a buffer or the random numbers may
        have changed. So if the second loss is finite, any module may still be the cause.
        """
        if not self.is_possible:
            return FINITE_BEFORE
        found: list[Origin] = []
        loss: Tensor | None = None

        def look(module: nn.Module, _: Any, output: Any) -> None:
            path = None if found else first_bad_tensor(output, "its output")
            if path is not None:
                name = names[module] or "model"
                words = f"It began in module {name!r} ({type(module).__name__}): {path}"
                found.append(Origin(words, f"output of module {name!r}", name))

        names = {module: name for name, module in self._module.named_modules()}
        hooks = [module.register_forward_hook(look) for module in names]
        try:
            with _as_before(self._module), torch.no_grad(), self._autocast, contextlib.suppress(Exception):
                loss, _ = self._objective.loss_of(self._module, batch)
        finally:
            for hook in hooks:
                hook.remove()
        if found:
            return found[0]
        if loss is None:  # a single rank can't call the model
            return FINITE_BEFORE
        return _REPEATED_FINITE if is_finite(loss) else _ONLY_LOSS

    def first_bad_gradient(self, batch: Any) -> Origin | None:
        """Return the module that first computed a bad gradient; None if this rank's gradients are finite.

        The passes run on a copy of the model, so that no gradient is averaged. If a module calls a collective, the
        result is None, too.
        """
        if not self.is_possible:
            return None
        found: list[Origin] = []
        with _as_before(self._module):
            model = copy.deepcopy(self._module)
            for name, module in model.named_modules():
                module.register_full_backward_hook(_gradient_hook(name or "model", found))
            model.zero_grad()
            with warnings.catch_warnings(), self._autocast:
                warnings.simplefilter("ignore")  # torch warns that the first module's inputs have no gradient
                loss, _ = self._objective.loss_of(model, batch)
                loss.backward()
        for name, parameter in model.named_parameters() if not found else ():
            if parameter.grad is not None and not is_finite(parameter.grad):
                words = f"It began in the backward pass: this rank's gradient of parameter {name!r}"
                return Origin(words, f"gradient of parameter {name!r}", name.rpartition(".")[0] or "model")
        return found[0] if found else None


def _gradient_hook(name: str, found: list[Origin]) -> Callable[[nn.Module, Any, Any], None]:
    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not found and first_bad_tensor(outputs, "") is None:
            path = first_bad_tensor(inputs, "the gradient of its inputs")
            if path is not None:
                words = f"It began in the backward pass of module {name!r} ({type(module).__name__}): {path}"
                found.append(Origin(words, f"gradient of the inputs of module {name!r}", name))

    return look


def first_bad_tensor(value: Any, path: str, *, allows_minus_inf: bool = False) -> str | None:
    """Return a description of the first tensor in nested values that is not finite; None if all are finite.

    Attention masks hold -inf by design, which `allows_minus_inf` accepts.
    """
    for where, tensor in tensors_in(value, path):
        is_bad = ~torch.isfinite(tensor) & (tensor != -math.inf if allows_minus_inf else True)
        if num_bad := int(is_bad.sum()):
            return f"{where}, of shape {tuple(tensor.shape)}, has {counted(num_bad, 'element')} not finite"
    return None


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor on this rank are finite."""
    return bool(torch.isfinite(local(tensor)).all())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers after the body."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with random_state_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
