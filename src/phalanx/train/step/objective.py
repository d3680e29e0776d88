"""The objective that a trainer minimizes, and the metrics that it also evaluates.

A batch may also be a dictionary. Then the entry named targets, target, labels or label holds the targets, and the other
entries are keyword arguments of the model. Passing every entry to the model would suit models that compute their own
loss, but it would leave no targets for a loss function and metrics. Such models use a ``training_step``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import checkpoint
from phalanx.train.arguments import check_metrics, has_state, refuse_reserved
from phalanx.wire.rank_group import RankGroup

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[nn.Module, Any], Any]

_TARGETS = ("targets", "target", "labels", "label")
_EXAMPLE = "training_step=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])"
_EXAMPLE_OF_MAPPING = (
    'training_step=lambda model, batch: nn.functional.cross_entropy(model(batch["image"]), batch["label"])'
)


class Objective:
    """A loss of outputs and targets, or the script's training step; and the values of an evaluation.

    Args:
        loss: Function ``loss(outputs, targets)``.
        training_step: Function ``training_step(model, batch)`` that returns the loss, or values by name, including the
            loss.
        evaluation_step: Function ``evaluation_step(model, batch)`` that returns the loss, or values by name.
        metrics: Functions ``metric(outputs, targets)``, or objects with ``update``, ``compute`` and ``reset``.

    Attributes:
        stateful: Metrics that are objects, by name.
        is_split: Whether an evaluation divides batches into inputs and targets.

    Raises:
        ValueError: Both or neither of loss and training step are given; a metric needs outputs and targets that are not
            known; or a name is reserved.
        TypeError: `metrics` is not a mapping of metrics by name.
    """

    def __init__(
        self,
        loss: Loss | None,
        training_step: Step | None = None,
        evaluation_step: Step | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        if (loss is None) == (training_step is None):
            raise ValueError(
                "Trainer: give it either a loss or a training_step: Trainer(model, optimizer, "
                f"nn.functional.cross_entropy) or Trainer(model, optimizer, {_EXAMPLE})"
            )
        self._loss, self._training_step, self._evaluation_step = loss, training_step, evaluation_step
        metrics = check_metrics(metrics)
        self.stateful: dict[str, Any] = {name: metric for name, metric in metrics.items() if has_state(metric)}
        self._names = "loss", *metrics
        self._functions = {name: metric for name, metric in metrics.items() if name not in self.stateful}
        self.is_split: bool = loss is not None and evaluation_step is None
        if self._functions and not self.is_split:
            raise ValueError(
                f"Trainer: metrics need a loss: with a training_step or evaluation_step, outputs and targets are not "
                f"known. Return {', '.join(self._functions)} from evaluation_step instead: "
                'return {"loss": loss, "accuracy": (outputs.argmax(1) == targets).float()}'
            )

    def check_monitor(self, name: str) -> None:
        """Refuse the name of a value that no evaluation can have, as far as this is known in advance.

        Raises:
            ValueError: There is no such value.
        """
        may_be_of_several = name.startswith(tuple(f"{metric}_" for metric in self.stateful))
        if self.is_split and name not in self._names and not may_be_of_several:
            raise ValueError(
                f"Trainer: monitor={name!r} is not a value of the evaluation, which has {', '.join(self._names)}: name "
                "one of these, or add the metric to metrics"
            )

    def loss_of(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any] | None]:
        """Return the loss of a batch, and the other values that the training step has returned by name.

        Raises:
            TypeError: The loss is missing, or is no tensor.
            ValueError: The loss is not a single number, or has no gradient while training.
        """
        if self._training_step is None:
            assert self._loss is not None
            loss = self._loss(*_outputs_and_targets(model, batch))
            if not isinstance(loss, Tensor):
                raise TypeError(f"Trainer: loss must return a tensor, and it returned {_describe(loss)}")
            return _checked("loss", loss), None
        returned = self._training_step(model, batch)
        if isinstance(returned, Tensor):
            return _checked("training_step", returned), None
        if isinstance(returned, Mapping) and isinstance(returned.get("loss"), Tensor):
            return _checked("training_step", returned["loss"]), {
                name: value for name, value in returned.items() if name != "loss"
            }
        raise TypeError(
            "Trainer: training_step must return the loss, a tensor, or a dictionary with it: "
            f'return {{"loss": loss, "penalty": penalty}}; it returned {_describe(returned)}'
        )

    def values_of(self, model: nn.Module, batch: Any, *, counts: bool = True) -> dict[str, Any]:
        """Return the evaluated values of a batch; metrics with a state are updated unless the batch is padding."""
        if not self.is_split:
            return self._values_of_step(model, batch)
        outputs, targets = _outputs_and_targets(model, batch)
        for metric in self.stateful.values() if counts else ():
            metric.update(outputs, targets)
        assert self._loss is not None
        values = {name: metric(outputs, targets) for name, metric in self._functions.items()}
        return {"loss": self._loss(outputs, targets), **values}

    def _values_of_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        if self._evaluation_step is None:
            loss, parts = self.loss_of(model, batch)
            return {"loss": loss, **(parts or {})}
        returned = self._evaluation_step(model, batch)
        if isinstance(returned, Tensor):
            return {"loss": returned}
        if isinstance(returned, Mapping):
            return dict(returned)
        raise TypeError(
            "Trainer: evaluation_step must return the loss, a tensor, or a dictionary of values: "
            f'return {{"loss": loss, "accuracy": correct}}; it returned {_describe(returned)}'
        )


def _checked(name: str, loss: Tensor) -> Tensor:
    """Return the loss if it can be minimized.

    Raises:
        ValueError: The loss is not a single number, or has no gradient while gradients are on.
    """
    if loss.dim() and loss.numel() != 1:
        raise ValueError(
            f"Trainer: {name} returned a loss of {loss.numel()} values (shape {tuple(loss.shape)}); it must be one, "
            'their mean: loss.mean(), or a loss without reduction="none"'
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"Trainer: {name} returned a loss without a gradient, so nothing can be trained: compute it from the "
            "model's outputs without detach(), item() or no_grad(), and leave requires_grad of some parameter True"
        )
    return loss


def _outputs_and_targets(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the model's outputs and the targets of a batch.

    Raises:
        ValueError: The batch is neither a pair nor a mapping with exactly one entry for the targets.
    """
    if isinstance(batch, Mapping):
        found = [name for name in _TARGETS if name in batch]
        if len(found) == 1:
            return outputs_of(model, batch), batch[found[0]]
        problem = f"has the keys {', '.join(map(repr, batch))}, of which exactly one must be in {_TARGETS}"
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        return model(batch[0]), batch[1]
    else:
        problem = f"is {_describe(batch)}, not (inputs, targets) or a dictionary"
    hint = "Put them together: torch.utils.data.TensorDataset(X, Y). " if isinstance(batch, Tensor) else ""
    raise ValueError(f"Trainer: a loss needs inputs and targets, and the batch {problem}. {hint}Or pass {_EXAMPLE}")


def outputs_of(model: nn.Module, batch: Any) -> Any:
    """Return the model's outputs for a batch that may lack targets.

    If the batch is a mapping, its entries, except the targets, are the model's keyword arguments; a single entry
    "inputs" is the model's only positional argument.

    Raises:
        TypeError: The model does not accept arguments of these names.
    """
    if not isinstance(batch, Mapping):
        return model(batch[0] if isinstance(batch, tuple | list) else batch)
    inputs = {name: value for name, value in batch.items() if name not in _TARGETS}
    if [*inputs] == ["inputs"]:
        return model(inputs["inputs"])
    try:
        return model(**inputs)
    except TypeError as error:
        taken = inspect.signature(checkpoint.unwrap(model).forward)
        try:
            taken.bind(**inputs)
        except TypeError as other:
            raise TypeError(
                f"Trainer: the batch's entries {', '.join(map(repr, inputs))} are not what the model takes, "
                f"forward{taken}: {other}. Give the entries the names of its arguments, or pass {_EXAMPLE_OF_MAPPING}"
            ) from error
        raise


class NamedParts:
    """Sums of the values that a training step returns besides the loss, until they are logged."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._has_any = False

    def add(self, parts: Mapping[str, Any], weight: float) -> None:
        """Add the values of one pass, weighted by the pass's share of the batch.

        Raises:
            ValueError: A value is not one number.
        """
        if not self._sums:
            refuse_reserved(parts)
        self._has_any = True
        for name, value in parts.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"Trainer: training_step must return one number as {name!r}, its mean over the batch; it "
                        f"returned a tensor of shape {tuple(value.shape)}"
                    )
                value = value.detach().reshape(())
            self._sums[name] = self._sums.get(name, 0) + value * weight

    def take(self, ranks: RankGroup, num_steps: int) -> dict[str, float]:
        """Return the means over all ranks' samples in `num_steps` steps, and reset; every rank must call this."""
        if not self._has_any:
            return {}
        own = {name: float(value) / num_steps / ranks.world_size for name, value in self._sums.items()}
        self._sums = {}
        every = ranks.gather(own)
        return {name: sum(of.get(name, 0.0) for of in every) for name in dict.fromkeys(n for of in every for n in of)}


def _describe(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
