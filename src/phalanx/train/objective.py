"""What a trainer minimizes, and what it evaluates beside that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
TrainingStep = Callable[[nn.Module, Any], Tensor]


class Objective:
    """A loss of outputs and targets, or a training step of the user's own, and the metrics.

    Attributes:
        names: Of what `values_of` returns.

    Raises:
        ValueError: Both are given, or none; or metrics where nobody knows outputs and targets.
    """

    def __init__(
        self, loss: Loss | None, training_step: TrainingStep | None, metrics: Mapping[str, Loss] | None
    ) -> None:
        if (loss is None) == (training_step is None):
            raise ValueError("Trainer: give it either a loss or a training_step")
        if training_step is not None and metrics:
            raise ValueError("Trainer: metrics need a loss: of a training_step nobody knows outputs and targets")
        self._loss, self._training_step, self._metrics = loss, training_step, dict(metrics or {})
        self.names = ("loss", *self._metrics)

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        if self._training_step is not None:
            return self._training_step(model, batch)
        assert self._loss is not None
        inputs, targets = batch
        return self._loss(model(inputs), targets)

    def values_of(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss, and the metrics if it is one of outputs and targets."""
        if self._loss is None:
            return {"loss": self.loss_of(model, batch)}
        inputs, targets = batch
        outputs = model(inputs)
        values = {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {"loss": self._loss(outputs, targets), **values}
