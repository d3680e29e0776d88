"""`Trainer`: the loop that trains one model on all ranks, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import data as torch_data

from phalanx import _env, checkpoint, session
from phalanx._errors import RankFailed
from phalanx.checkpoint.memory import memory
from phalanx.data import GlobalBatches, RandomState
from phalanx.launch.notes import note_modules, note_room_made
from phalanx.parallel import DistributedDataParallel
from phalanx.train import world
from phalanx.train.evaluation import EvaluationBatches, evaluating
from phalanx.train.feed import DatasetFeed, Feed, LoaderFeed, Part
from phalanx.train.metrics import write_csv
from phalanx.train.preemption import EXIT_CODE, Preemption, requeue
from phalanx.train.report import write_report
from phalanx.train.settings import Settings, is_minimized
from phalanx.train.snapshots import Snapshots
from phalanx.train.watch import Watch

_NOTHING: Any = contextlib.nullcontext()
_AGREE_S = 0.02  # ranks ask each other whether a signal has come; in each step, if steps are longer
_MAX_PIDS = 16  # in a line
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a model on all ranks of the job; joins it first, if the script has not.

    Every rank makes the same one and calls the same methods. Under ``phalanx run --max-restarts N`` the ranks keep
    snapshots, as many as `Settings.snapshot_every` allows, and go on from the last when one of them was killed.

    Args:
        model: A module, which is then wrapped in `DistributedDataParallel`, or one that is wrapped already: in that, in
            torch's, by FSDP2's ``fully_shard``.
        optimizer: Of the model's parameters.
        loss: ``loss(model(inputs), targets)`` of a batch ``(inputs, targets)``, a mean over its samples.
        training_step: Instead of `loss`: ``training_step(model, batch)`` returns the loss, a mean over the samples.
        scheduler: Of the learning rate.
        metrics: Values to evaluate beside the loss: ``metric(outputs, targets)`` returns one number for each sample.
        callbacks: Objects with any of ``on_fit_start``, ``on_step``, ``on_epoch``, ``on_evaluation``, ``on_save`` and
            ``on_fit_end``, each called with the trainer on every rank; with ``state_dict`` and ``load_state_dict`` they
            are part of the checkpoints.
        settings: See `Settings`.

    Attributes:
        model: As it trains; `module` is the one inside the wrapper.
        step: Optimizer steps done.
        epoch: That it is in, from 0.
        evaluation: What the last evaluation in `fit` came to.

    Raises:
        ValueError: Arguments that contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        training_step: Callable[[nn.Module, Any], Tensor] | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        callbacks: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        if (loss is None) == (training_step is None):
            raise ValueError("Trainer: give it either a loss or a training_step")
        self.settings = Settings(**settings)
        self.session = session.init()
        self.device = self.session.device
        self.module = checkpoint.unwrap(model)
        self.optimizer, self.scheduler, self.callbacks = optimizer, scheduler, callbacks
        self._loss, self._training_step, self._metrics = loss, training_step, dict(metrics or {})
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and self.settings.scheduler_interval == "step":
            raise ValueError('Trainer: ReduceLROnPlateau needs scheduler_interval="epoch"')
        if self.settings.deterministic:
            world.check_model(model)
            torch.set_num_threads(1)  # more of them add in another order
        self.model = self._wrap(model)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.folder = _env.environment().get(_env.FOLDER_VARIABLE) or self.settings.folder or _default_folder()
        self.checkpoints = os.path.join(self.folder, "checkpoints")
        self.step = self.epoch = 0
        self.evaluation: dict[str, float] = {}
        self._best: float | None = None
        self._score: float | None = None  # of the evaluation after `_scored_step`; more is better
        self._scored_step = -1
        self._num_worse = 0
        self._is_complete = False
        self._first_world_size = self.session.world_size
        self._grad_norm: Tensor | None = None
        self._flag = torch.zeros((), dtype=torch.int64, device=self._collective_device())
        self._agreed_signal = 0
        self._agree_every = 1
        per_rank = -(-self.settings.global_batch_size // self.session.world_size)
        size = self.settings.micro_batch_size or per_rank
        self._evaluation_batches = EvaluationBatches(size, self.settings.num_workers)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if model is self.module and not _is_sharded(model):
            model.to(self.device)
            if self.session.world_size > 1:
                return DistributedDataParallel(model)
        return model

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(self, data: Any, validation_data: torch_data.Dataset[Any] | None = None) -> dict[str, float]:
        """Train to the end, from wherever the last run in the folder was; return the last evaluation.

        Args:
            data: A map-style dataset, which is divided here; or a loader of this rank's own batches, each of which is
                then a step of its rank.
            validation_data: A map-style dataset, evaluated after each epoch.

        Raises:
            SystemExit: With code 75, when SIGTERM or SIGUSR1 came to any rank; everything is saved.
        """
        try:
            return self._fit(data, validation_data)
        except RankFailed:
            if self._will_restart():  # at once: an orderly end of the interpreter takes longer than the restart
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            raise

    def _fit(self, data: Any, validation_data: torch_data.Dataset[Any] | None) -> dict[str, float]:
        if self.settings.patience is not None and validation_data is None:
            raise ValueError("Trainer: patience needs validation_data to judge by")
        self._feed = self._open(data)
        if not self._may_resume():
            self._set_aside()
        loaded = checkpoint.load(self.checkpoints, self._state())
        with self._begin(loaded) as self._watch, Preemption() as self._preemption:
            self._call("on_fit_start")
            while not self._is_over():
                self.model.train()
                self._feed.begin_epoch(self.epoch)
                has_ended, is_empty = True, self._feed.is_at_start
                for parts, num_samples in self._in_step(self._feed.steps()):
                    loss = self._train_on(parts, num_samples)
                    self.step += 1
                    self._feed.advance()
                    self._after_step(loss, num_samples)
                    is_empty = False
                    if self.step == self.settings.max_steps:
                        has_ended = self._feed.is_at_end
                        break
                if is_empty:
                    raise ValueError("Trainer: the data makes no step: fewer samples than a batch, or an empty loader")
                if has_ended:
                    self.epoch += 1
                    self._feed.begin_epoch(self.epoch)
                self._after_epoch(validation_data, has_ended=has_ended)
            self._end()
        return self.evaluation

    def _train_on(self, parts: list[Part], num_samples: int) -> Tensor:
        """Take one optimizer step on this rank's parts of a global batch; return this rank's part of its mean loss.

        Ranks' parts add up to the mean times the number of ranks.
        """
        if self.settings.deterministic:
            loss = self._sum_over_shards(parts, num_samples)
        else:
            losses = []
            for number, (batch, size) in enumerate(parts, start=1):
                # The model averages over ranks, so what makes it a mean over all samples is this.
                weight = size * self.session.world_size / num_samples if num_samples else 1 / len(parts)
                with self._synchronizing(number == len(parts)) if len(parts) > 1 else _NOTHING:
                    losses.append(self._forward_backward(batch, weight))
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        if self.step % self._agree_every == 0:  # here, where ranks have just met
            self._agreed_signal = self._largest(self._preemption.signal)
        self._optimize()
        return loss

    def _forward_backward(self, batch: Any, weight: float) -> Tensor:
        clock = self._watch.clock
        if self.device.type != "cpu":
            batch = _to(batch, self.device)
        dtype = _DTYPES.get(self.settings.precision)
        with torch.autocast(self.device.type, dtype) if dtype else _NOTHING:
            loss = self._loss_of(batch)
        if weight != 1:
            loss = loss * weight
        clock.lap("forward")
        self._scaler.scale(loss).backward()
        clock.lap("backward")
        return loss.detach()

    def _loss_of(self, batch: Any) -> Tensor:
        if self._training_step is not None:
            return self._training_step(self.model, batch)
        assert self._loss is not None
        inputs, targets = batch
        return self._loss(self.model(inputs), targets)

    def _sum_over_shards(self, parts: list[Part], num_samples: int) -> Tensor:
        def backward(shard: int) -> Tensor:
            batch, size = parts[shard]
            if size == 0:
                return torch.zeros((), device=self.device)
            with self._synchronizing(False):
                return self._forward_backward(batch, size / num_samples)

        parameters = [p for p in self.module.parameters() if p.requires_grad]
        return world.sum_gradients(parameters, len(parts), backward, (self.settings.seed, self.step))

    @contextlib.contextmanager
    def _synchronizing(self, averages: bool) -> Iterator[None]:
        """Average gradients over the ranks in this backward pass, or let them add up."""
        model: Any = self.model
        if _is_sharded(model):
            model.set_requires_gradient_sync(averages)
        with contextlib.nullcontext() if averages or not hasattr(model, "no_sync") else model.no_sync():
            yield

    def _optimize(self) -> None:
        if self.settings.clip_norm is not None:
            self._clip(self.settings.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None and self.settings.scheduler_interval == "step":
            self.scheduler.step()
        self._watch.clock.lap("optimizer")

    def _clip(self, largest: float) -> None:
        self._scaler.unscale_(self.optimizer)
        model, does_average = self.model, not self.settings.deterministic and not self._scaler.is_enabled()
        if does_average and isinstance(model, DistributedDataParallel):
            self._grad_norm = model.grad_norm()  # added up while gradients were averaged
            if self._grad_norm > largest:
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                torch._foreach_mul_(grads, float(largest / (self._grad_norm + 1e-6)))
        else:
            self._grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), largest)

    # ---- around the steps ------------------------------------------------------------------------------------------

    def _open(self, data: Any) -> Feed:
        s, world_size = self.settings, self.session.world_size
        if not isinstance(data, torch_data.Dataset) or isinstance(data, torch_data.IterableDataset):
            if s.deterministic:
                raise ValueError('Trainer: deterministic="world" divides the data itself: pass fit() a dataset')
            if s.micro_batch_size is not None:
                raise ValueError("Trainer: micro_batch_size divides a dataset's batches; a loader has its own")
            return LoaderFeed(data, s.seed)
        length = len(data)  # type: ignore[arg-type]
        if length < world_size:
            raise ValueError(f"Trainer: {length} samples do not reach for {world_size} ranks")
        self._batches = GlobalBatches(
            length,
            s.batch_size_for(world_size, self._first_world_size),
            micro_batch_size=s.micro_batch_size,
            num_parts=s.virtual_shards if s.deterministic else None,
            seed=s.seed,
            drop_last=s.drop_last,
        )
        return DatasetFeed(data, self._batches, s.num_workers, s.seed, seeds_samples=s.deterministic is not None)

    def _state(self) -> dict[str, Any]:
        numbered = ((f"{i} {type(c).__qualname__}", c) for i, c in enumerate(self.callbacks))
        stateful = {name: callback for name, callback in numbered if hasattr(callback, "load_state_dict")}
        state = {
            "model": self.module, "optimizer": self.optimizer, "scaler": self._scaler, "random": RandomState(),
            "callbacks": stateful, "data": self._feed, "trainer": _Progress(self),
        }  # fmt: skip
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def _will_restart(self) -> bool:
        """Whether ``phalanx run`` will start the ranks again after a failure, from the last snapshot."""
        left = (int(_env.environment().get(f"TORCHELASTIC_{name}") or 0) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
        return not memory.problem and next(left) > next(left)

    def _may_resume(self) -> bool:
        is_restart = int(_env.environment().get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
        return is_restart or self.settings.resume == "auto"

    def _set_aside(self) -> None:
        """Begin anew in a folder that has a run: rename what is there."""
        if self.session.rank == 0:
            for path in (self.checkpoints, os.path.join(self.folder, "metrics.jsonl")):
                if os.path.exists(path):
                    os.rename(path, f"{path}.before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        _gather(None)

    def _begin(self, loaded: checkpoint.Loaded | None) -> Watch:
        s, world_size = self.settings, self.session.world_size
        if s.on_resize == "scale" and hasattr(self, "_batches"):
            self._batches.batch_size = s.batch_size_for(world_size, self._first_world_size)
        self._steps_per_epoch = self._feed.num_steps  # None: nobody knows
        of_epochs = s.max_epochs * self._steps_per_epoch if s.max_epochs and self._steps_per_epoch else sys.maxsize
        num_steps = min(s.max_steps or sys.maxsize, of_epochs)
        watch = Watch(self.folder, num_steps, self._collective_device())
        if s.clip_norm is not None and isinstance(self.model, DistributedDataParallel):
            self.model.grad_norm()  # from now on it comes with the averaging: the same bits in the first step as later
        self._snapshots = Snapshots(self.checkpoints, s.snapshot_every, self._state)
        self._began_s, self._first_step = time.monotonic(), self.step + 1
        resumed = None if loaded is None else dataclasses.asdict(loaded)
        watch.record(
            "start", pid=os.getpid(), world_size=world_size, backend=self.session.backend,
            settings=dataclasses.asdict(s), resumed_from=resumed,
        )  # fmt: skip
        watch.say(f"{self._describe_batches(num_steps)}; run folder {self.folder}")
        pids = " ".join(str(pid) for pid in _gather(os.getpid())[:_MAX_PIDS])
        watch.say(f"processes of the ranks: {pids}")
        if loaded is not None:
            watch.say(f"going on after step {loaded.step}, from {loaded.source}")
        return watch

    def _describe_batches(self, num_steps: int) -> str:
        if not hasattr(self, "_batches"):
            return f"batches as the loader gives them; {self._steps_per_epoch or 'unknown'} steps an epoch"
        world_size, size = self.session.world_size, self._batches.batch_size
        passes = self._batches.parts_of_a_batch
        return (
            f"global batch {size} = {world_size} ranks x {passes} passes x {size / world_size / passes:g}; "
            f"{self._batches.length:,} samples, {self._steps_per_epoch} steps an epoch, {num_steps} in all"
        )

    def _is_over(self) -> bool:
        s = self.settings
        is_over = self.epoch >= (s.max_epochs or math.inf) or self.step >= (s.max_steps or math.inf)
        return is_over or (s.patience is not None and self._num_worse >= s.patience)

    def _in_step(self, steps: Iterator[tuple[list[Part], int]]) -> Iterator[tuple[list[Part], int]]:
        """Yield steps while every rank has one; let all obey a signal that any has got."""
        clock = self._watch.clock
        while True:
            if self._agreed_signal:
                self._make_room(self._agreed_signal)
            clock.restart()
            step = next(steps, None)
            clock.lap("data")
            if self._largest(step is None) if self._feed.may_differ else step is None:
                return
            assert step is not None
            yield step

    def _largest(self, value: int) -> int:
        """Return the largest value of any rank."""
        if self.session.world_size == 1:
            return value
        self._flag.fill_(value)
        dist.all_reduce(self._flag, dist.ReduceOp.MAX)
        return int(self._flag)

    def _after_step(self, loss: Tensor, num_samples: int) -> None:
        s, watch = self.settings, self._watch
        watch.count(loss, num_samples)
        self._call("on_step")  # before its state is kept
        self._snapshots.after_step(self.step)
        watch.clock.lap("snapshot")
        if self.step == self._first_step:
            note_modules()
        if self.step % s.log_every == 0:
            self._log()
        if s.save_every and self.step % s.save_every == 0:
            self._save()

    def _log(self) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        by_rank = self._watch.log(self.step, self.epoch, lr, self._grad_norm)
        slowest_s = max(sum(phases) for phases in by_rank)
        self._agree_every = max(1, int(_AGREE_S / slowest_s))  # the same on every rank
        if news := self._snapshots.adapt(by_rank):
            self._watch.say(news)

    def _after_epoch(self, validation_data: torch_data.Dataset[Any] | None, *, has_ended: bool) -> None:
        """Evaluate, say and save; also where `max_steps` came in the middle of the epoch."""
        if self._watch.has_news:
            self._log()
        is_best = False
        if validation_data is not None:
            self.evaluation = self.evaluate(validation_data)
            is_best = has_ended and self._judge()
            self._watch.record("evaluation", step=self.step, epoch=self.epoch, **self.evaluation)
            self._call("on_evaluation")
        if self.scheduler is not None and self.settings.scheduler_interval == "epoch" and has_ended:
            needs_metric = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([self.evaluation[self.settings.monitor]] if needs_metric else []))
        values = "".join(f", {name} {value:.4f}" for name, value in self.evaluation.items())
        self._watch.say(f"epoch {self.epoch}, step {self.step}: training loss {self._watch.last_loss:.4f}{values}")
        if has_ended:
            self._call("on_epoch")
        self._is_complete = self._is_over()
        if self.settings.save_every is None or self._is_complete or is_best:
            self._save()

    def _judge(self) -> bool:
        """Return whether the evaluation is the best so far."""
        value = self.evaluation.get(self.settings.monitor)
        if value is None:
            known = ", ".join(self.evaluation)
            raise ValueError(f"Trainer: monitor={self.settings.monitor!r} is no value of the evaluation: {known}")
        score = -value if is_minimized(self.settings.monitor) else value
        self._score, self._scored_step = score, self.step
        is_best = not math.isnan(score) and (self._best is None or score > self._best)
        if is_best:
            self._best, self._num_worse = score, 0
        else:
            self._num_worse += 1
        return is_best

    def _save(self, *, wait: bool = False) -> None:
        begin = time.perf_counter()
        score = self._score if self._scored_step == self.step else None
        keep = {"keep_last": self.settings.keep_last, "keep_best": None if self._best is None else 1}
        checkpoint.save(self.checkpoints, self._state(), self.step, metric=score, keep=keep, wait=wait)
        self._watch.record("save", step=self.step, blocked_s=time.perf_counter() - begin)
        self._call("on_save")

    def _make_room(self, signal: int) -> None:
        if memory.restart_is_planned:  # to have more ranks: this run goes on at once
            checkpoint.snapshot(self.checkpoints, self._state(), self.step)
            raise SystemExit(EXIT_CODE)
        self._save(wait=True)
        self._watch.record("preempted", step=self.step, signal=signal)
        note = requeue() if self.session.rank == 0 else ""
        self._watch.say(f"asked to make room by signal {signal}: saved after step {self.step}{note and f'; {note}'}")
        self._report()
        note_room_made()
        raise SystemExit(EXIT_CODE)

    def _end(self) -> None:
        self._call("on_fit_end")
        checkpoint.wait()
        self._watch.record("end", step=self.step, epoch=self.epoch, seconds=time.monotonic() - self._began_s)
        self._report()

    def _report(self) -> None:
        if self.session.rank == 0:
            try:
                write_csv(self.folder)
                self._watch.say(f"report: {write_report(self.folder)}")
            except OSError as error:  # everything that matters is saved
                self._watch.say(f"no report: {error}")

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self)

    def _collective_device(self) -> torch.device:
        on_cpu = any(name in self.session.backend for name in ("phalanx", "gloo", "mpi"))
        return torch.device("cpu") if on_cpu else self.device

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, data: torch_data.Dataset[Any]) -> dict[str, float]:
        """Return the means over all samples of `data`, each counted once, the same on every rank."""
        sums: dict[str, float] = dict.fromkeys(("loss", *self._metrics), 0.0)
        with evaluating(self.model):
            for batch, size in self._evaluation_batches.of(data, are_padded=_is_sharded(self.model)):
                values = self._values_of(_to(batch, self.device))
                if size:
                    for name, value in values.items():
                        sums[name] += float(value.double().mean()) * size
        totals = torch.tensor([*sums.values()], dtype=torch.float64, device=self._collective_device())
        if self.session.world_size > 1:
            dist.all_reduce(totals)
        length = len(data)  # type: ignore[arg-type]
        return dict(zip(sums, (totals / length).tolist(), strict=True))

    def _values_of(self, batch: Any) -> dict[str, Tensor]:
        if self._training_step is not None:
            return {"loss": self._training_step(self._evaluated, batch)}
        assert self._loss is not None
        inputs, targets = batch
        outputs = self._evaluated(inputs)
        values = {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {"loss": self._loss(outputs, targets), **values}

    def predict(self, data: torch_data.Dataset[Any]) -> Tensor:
        """Return the model's outputs for all samples, in their order, on the CPU of every rank.

        A sample is what the model takes, or a tuple that begins with it.
        """
        outputs = []
        with evaluating(self.model):
            for batch, size in self._evaluation_batches.of(data, are_padded=_is_sharded(self.model)):
                inputs = _to(batch, self.device)
                inputs = inputs[0] if isinstance(inputs, tuple | list) else inputs
                outputs.append(self._evaluated(inputs)[:size].cpu())
        every = _gather(torch.cat(outputs) if outputs else None)
        return torch.cat([part for part in every if part is not None])

    @property
    def _evaluated(self) -> nn.Module:
        """The model without averaging: ranks may have different numbers of batches."""
        return self.model if _is_sharded(self.model) else self.module


class _Progress:
    """The trainer's own numbers, as part of its state."""

    _names = (
        "step",
        "epoch",
        "evaluation",
        "_best",
        "_score",
        "_scored_step",
        "_num_worse",
        "_is_complete",
        "_first_world_size",
    )

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): getattr(self._trainer, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            setattr(self._trainer, name, state[name.lstrip("_")])


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    values: list[Any] = [value]
    if dist.get_world_size() > 1:
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _is_sharded(model: nn.Module) -> bool:
    """Whether it is one of FSDP2's."""
    return hasattr(model, "set_requires_gradient_sync")


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _default_folder() -> str:
    return os.path.join("runs", os.path.splitext(os.path.basename(sys.argv[0]))[0] or "run")
