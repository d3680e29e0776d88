"""Evaluates a model on data that is divided among the ranks; each sample counts once.

Metrics with a state combine the states of all ranks themselves, as the metrics of torchmetrics do in ``compute``. If a
metric's values differ between ranks, the metric does not combine the states, which is an error. If ``stop`` or
``max_steps`` ends training in the middle of an epoch, the random state is restored after the evaluation, because an
uninterrupted run would not have evaluated there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx import checkpoint
from phalanx._text import counted
from phalanx._torch.nested import to_device
from phalanx.data.random_state import random_state_kept
from phalanx.record import writer
from phalanx.train.arguments import refuse_reserved
from phalanx.train.evaluate.evaluation_data import Counted, Own, Planned, plan
from phalanx.train.feed.feed import Collate, is_dataset
from phalanx.train.settings import Settings
from phalanx.train.step.memory_format import lay_out_batch
from phalanx.train.step.objective import Objective, outputs_of
from phalanx.train.wrapper import is_sharded
from phalanx.wire.rank_group import RankGroup

_NO_SAMPLES = "Trainer.{}: the data has no samples"


class Evaluator:
    """Evaluates a model in evaluation mode, without gradients."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        ranks: RankGroup,
        device: torch.device,
        settings: Settings,
        collate_fn: Collate | None = None,
    ) -> None:
        self._model = model
        # The model is called without its wrapper, since ranks may have different numbers of batches. In a sharded model
        # each forward pass is a collective, so ranks with fewer batches get padding.
        self._is_padded = is_sharded(model)
        self._evaluated = model if self._is_padded else checkpoint.unwrap(model)
        if self._is_padded and objective.stateful and not objective.is_split:
            raise ValueError(
                "Trainer: ranks of a model of fully_shard evaluate some batches only to keep together, which an "
                "evaluation_step can't tell from the others: pass a loss, and let the Trainer update the metrics"
            )
        self._objective = objective
        self._ranks = ranks
        self._device = device
        self._channels_last = settings.channels_last
        batch_size = settings.micro_batch_size or -(-settings.global_batch_size // ranks.world_size)
        self._batch_size, self._collate_fn = batch_size, collate_fn
        self._num_workers = settings.num_workers
        self._data: Any = None
        self._plan: Planned | Own | None = None
        self._keeps_loader = False

    @contextlib.contextmanager
    def keeping_loader(self) -> Iterator[None]:
        """Within this context, keep the loader of the last data, with its worker processes, for the next evaluation.

        At the end of the context, the worker processes end in the right order. The garbage collector would first break
        the workers' queues, and then wait for the workers for seconds.
        """
        self._keeps_loader = True
        try:
            yield
        finally:
            self._keeps_loader = False
            self._data = self._plan = None

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the objective's means over all samples, and the metrics' values; the same on every rank."""
        tally = _Tally()
        metrics = self._objective.stateful
        self._reset_metrics()
        with writer.phase("evaluate"), self._loading(), _evaluating(self._model):
            for batch, size in self._batches(data):
                values = self._objective.values_of(self._evaluated, batch, counts=size > 0)
                if size:
                    tally.add(values, size)
        means = tally.means(self._ranks, needs_every_rank=bool(metrics))
        return means | {name: value for n, metric in metrics.items() for name, value in self._computed(n, metric)}

    def rehearse(self, data: Any, monitor: str) -> None:
        """Evaluate one batch of a dataset before training, to find mistakes that would otherwise show after an epoch.

        An exception in the script's code is ignored: some models can't be evaluated before they have trained, and any
        other problem will show in the evaluation itself. Random state is restored, and metrics are reset.

        Raises:
            ValueError: On every rank: a value is neither one number for each sample nor their mean, or the monitored
                value is missing.
        """
        if self._is_padded or any(map(is_lazy, self._evaluated.parameters())):
            return
        if not isinstance(self._plan_for(data), Planned):
            return  # a stream would lose the batch
        tally, values = _Tally(), {}
        with random_state_kept(), _evaluating(self._model), contextlib.suppress(Exception):
            self._reset_metrics()
            batch, size = next(self._batches(data))
            values = self._objective.values_of(self._evaluated, batch)
            tally.add(values, size)
        problem = tally.problem
        if values and not problem and monitor not in values and not self._objective.stateful:
            problem = f"Trainer: monitor={monitor!r} is not a value of the evaluation, which has {', '.join(values)}"
        for told in filter(None, self._ranks.gather(problem)):
            raise ValueError(told)

    def _reset_metrics(self) -> None:
        for metric in self._objective.stateful.values():
            metric.reset()
            if hasattr(metric, "to"):
                metric.to(self._device)

    def _computed(self, name: str, metric: Any) -> Iterator[tuple[str, float]]:
        """Yield the values of a metric that has seen this rank's batches and combines the ranks' states itself.

        Raises:
            ValueError: The metric does not combine the states, or has not computed single numbers.
        """
        computed = metric.compute()
        try:
            named = (
                {f"{name}_{key}": float(value) for key, value in computed.items()}
                if isinstance(computed, Mapping)
                else {name: float(computed)}
            )
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {tuple(computed.shape)}" if isinstance(computed, Tensor) else ""
            named = {}
            problem = f"computed a {type(computed).__name__}{shape}; it must be a number, or numbers by name"
        else:
            refuse_reserved(named)
            problem = ""
        of_ranks = self._ranks.gather(named)
        if not problem and any(repr(other) != repr(named) for other in of_ranks):
            problem = (
                f"computed different values on the ranks ({', '.join(map(str, of_ranks))}): each has seen its own part "
                "of the data, so compute() must combine the states of all ranks, as torchmetrics does"
            )
        if problem:
            raise ValueError(f"Trainer: metric {name!r} {problem}")
        yield from named.items()

    def predict(self, data: Any) -> Tensor:
        """Return the outputs for all samples of a dataset, in order, on the CPU of every rank.

        Raises:
            ValueError: `data` is no dataset or has no samples, or a `collate_fn` has left samples out.
            TypeError: The model does not return a tensor.
        """
        if not is_dataset(data):
            raise ValueError(
                "Trainer.predict: outputs come in the order of a dataset's samples, and this is a "
                f"{type(data).__name__}: pass the dataset, trainer.predict(loader.dataset)"
            )
        if not len(data):
            raise ValueError(_NO_SAMPLES.format("predict"))
        outputs = []
        with self._loading(), _evaluating(self._model):
            for batch, size in self._batches(data):
                output = outputs_of(self._evaluated, batch)
                if not isinstance(output, Tensor):
                    name = type(output).__name__
                    raise TypeError(f"Trainer.predict: the model must return a tensor, and it returned a {name}")
                outputs.append(output[:size].cpu())
        predicted = torch.cat([output for of_rank in self._ranks.gather(outputs) for output in of_rank])
        if len(predicted) < len(data):
            raise ValueError(
                f"Trainer.predict: {counted(len(predicted), 'output')} for {counted(len(data), 'sample')}: if "
                "collate_fn leaves samples out, leave them out of the dataset: Subset(dataset, indices)"
            )
        return predicted

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._keeps_loader else self.keeping_loader()

    def _batches(self, data: Any) -> Iterator[Counted]:
        """Yield this rank's batches on the device, padded with batches of size 0 if all ranks need equally many."""
        for batch, size in self._plan_for(data).batches(self._is_padded):
            batch = to_device(batch, self._device)
            yield lay_out_batch(batch) if self._channels_last else batch, size

    def _plan_for(self, data: Any) -> Planned | Own:
        if self._data is not data or self._plan is None:
            planned = plan(data, self._ranks, self._batch_size, self._num_workers, self._collate_fn)
            self._data, self._plan = data, planned
        return self._plan


class _Tally:
    """Sums over samples, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self.problem = ""  # the first problem on this rank, which all ranks raise in `means`

    def add(self, values: Mapping[str, Any], size: int) -> None:
        """Add the values of a batch: one number for each of its samples, or their mean."""
        for name, value in values.items():
            try:
                tensor = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                self.problem = self.problem or (
                    f"Trainer: {name!r} is a {type(value).__name__}; it must be one number for each sample, or their "
                    "mean. Several values: give each a name of its own"
                )
                return
            if tensor.dim() and tensor.numel() != size:
                hint = "; if collate_fn leaves samples out, leave them out of the dataset: Subset(dataset, indices)"
                self.problem = self.problem or (
                    f"Trainer: {name!r} has {tensor.numel()} values (shape {tuple(tensor.shape)}) for a batch of "
                    f"{size} samples: it must be one number for each sample, or their mean, such as "
                    "(outputs.argmax(1) == targets).float()" + hint * (tensor.numel() < size)
                )
                return
            total, num = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(tensor.double().mean()) * size, num + size

    def means(self, ranks: RankGroup, *, needs_every_rank: bool) -> dict[str, float]:
        """Return the means over the samples of all ranks.

        Raises:
            ValueError: On every rank: there are no samples, a rank has a value that is neither one number for each
                sample nor their mean, or a rank has no samples although every rank needs some.
        """
        every = ranks.gather((self._sums, self.problem))
        for _, problem in every:
            if problem:
                raise ValueError(problem)
        sums = [of_rank for of_rank, _ in every]
        names = dict.fromkeys(name for of_rank in sums for name in of_rank)
        if not names:
            raise ValueError(f"{_NO_SAMPLES.format('evaluate')}, or is an iterator that is used up")
        refuse_reserved(names)
        if needs_every_rank and (without := [rank for rank, of_rank in enumerate(sums) if not of_rank]):
            raise ValueError(
                f"Trainer.evaluate: rank {without[0]} has no sample, so metrics with a state can't be combined: "
                f"evaluate at least {ranks.world_size} samples, or on fewer ranks"
            )
        found = {name: [of_rank[name] for of_rank in sums if name in of_rank] for name in names}
        return {name: sum(total for total, _ in of) / sum(num for _, num in of) for name, of in found.items()}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
