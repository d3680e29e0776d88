"""`Trainer`: the loop that trains one model on all ranks, and resumes where it was stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import checkpoint, session
from phalanx._env import PREEMPTED_CODE
from phalanx._errors import NonFinite, RankFailed
from phalanx._loop import synchronizing
from phalanx._nested import to_device
from phalanx._rank_group import RankGroup
from phalanx._text import counted
from phalanx._torch import foreach_mul_
from phalanx.checkpoint.memory import memory
from phalanx.data import RandomState
from phalanx.launch.notes import note_modules, note_room_made
from phalanx.parallel import DistributedDataParallel
from phalanx.train import determinism, restarts
from phalanx.train.arguments import check_arguments, check_data
from phalanx.train.evaluation import Evaluator
from phalanx.train.feed import Part
from phalanx.train.finite import FiniteGuard
from phalanx.train.folder_lock import FolderLock
from phalanx.train.foresight import check_schedule, num_schedule_steps, refuse_unwritable
from phalanx.train.identity import Identity, facts_of, facts_of_data
from phalanx.train.judge import Judge
from phalanx.train.loggers import IDS, Logger, Loggers
from phalanx.train.metrics import write_csv
from phalanx.train.objective import NamedParts, Objective
from phalanx.train.open_feed import open_feed
from phalanx.train.origin import describe_origin
from phalanx.train.preemption import Preemption, exit_code, requeue
from phalanx.train.report import write_report
from phalanx.train.resumption import ForcedFeed, Hyperparameters, Progress, Unforced, catch_up
from phalanx.train.run_log import RunLog
from phalanx.train.settings import Settings, is_minimized
from phalanx.train.snapshots import Snapshots
from phalanx.train.wrapper import wrap

_NOTHING: Any = contextlib.nullcontext()
_AGREE_S = 0.1  # ranks ask each other whether a signal has come; in each step, if steps are longer
_NOT_FINITE = 1 << 10  # above every signal's number, in what ranks agree on
_MAX_PIDS = 16  # in a line
_trained: dict[str, weakref.ref[Trainer]] = {}  # who trained last in a folder, in this process


class Trainer:
    """Trains a model on all ranks of the job, which it joins if the script has not.

    Every rank makes the same Trainer and calls the same methods. Under ``phalanx run --max-restarts N`` the ranks keep
    snapshots, as often as `Settings.snapshot_every` allows, and resume from the last one after a rank was killed.

    Args:
        model: Module to train. It is wrapped in `DistributedDataParallel`, unless it is wrapped already: in ours, in
            torch's, or by FSDP2's ``fully_shard``.
        optimizer: Optimizer of the model's parameters.
        loss: Function of outputs and targets. For a batch ``(inputs, targets)``, ``loss(model(inputs), targets)`` is
            the mean over its samples. In a batch that is a dictionary, "targets", "target", "labels" or "label" names
            the targets, and the other entries are keyword arguments of the model; an entry "inputs" that is the only
            one is its positional argument.
        training_step: Function to use instead of `loss`: ``training_step(model, batch)`` returns the loss, a mean over
            the samples, or a dictionary that has the loss as "loss" and other numbers to log.
        evaluation_step: Function that evaluates a batch: ``evaluation_step(model, batch)`` returns the loss, or values
            by name, each with one number for each sample or their mean. None: the training step, or the loss and the
            metrics.
        scheduler: Learning rate scheduler.
        metrics: Functions by name to evaluate beside the loss: ``metric(outputs, targets)`` returns one number for each
            sample, or their mean. Objects with ``update``, ``compute`` and ``reset``, such as those of torchmetrics,
            combine the states of all ranks in ``compute``; an `evaluation_step` updates them itself.
        collate_fn: Function that makes a batch of a dataset's samples; None: torch's. If it drops samples, an
            evaluation counts those that are in the batch, if its tensors tell how many; in a training step each rank's
            part still weighs as much as the samples that were requested.
        callbacks: Objects with any of ``on_fit_start``, ``on_step``, ``on_epoch``, ``on_evaluation``, ``on_save`` and
            ``on_fit_end``, each called with the trainer on every rank. Those with ``state_dict`` and
            ``load_state_dict`` are part of the checkpoints.
        loggers: Loggers that get the numbers of metrics.jsonl on rank 0: "tensorboard", "wandb" (offline, unless a key
            or WANDB_MODE is set), "mlflow", "csv", or objects with ``log(metrics, step)`` and ``close()``. A logger
            that fails is named once, and training goes on without it.
        settings: Fields of `Settings`, such as ``max_epochs=10``.

    Attributes:
        model: Model in its wrapper.
        module: Model without the wrapper.
        optimizer: Optimizer that was passed.
        scheduler: Scheduler that was passed, or None.
        callbacks: Callbacks that were passed.
        settings: Settings of this trainer.
        session: Session of this rank.
        device: Device of the model.
        folder: Folder of the run.
        checkpoints: Folder of the run's checkpoints.
        step: Number of optimizer steps done.
        epoch: Number of the current epoch, from 0.
        evaluation: Values of the last evaluation in `fit`, by name.

    Raises:
        ValueError: Arguments contradict each other.
        TypeError: An argument does not exist, or is of the wrong kind.
        ImportError: A logger's package is missing on rank 0.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    callbacks: Sequence[Any]
    settings: Settings
    session: session.Session
    device: torch.device
    folder: str
    checkpoints: str
    step: int
    epoch: int
    evaluation: dict[str, float]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        training_step: Callable[[nn.Module, Any], Tensor | Mapping[str, Any]] | None = None,
        evaluation_step: Callable[[nn.Module, Any], Tensor | Mapping[str, Any]] | None = None,
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        callbacks: Sequence[Any] = (),
        loggers: str | Logger | Sequence[str | Logger] = (),
        **settings: Any,
    ) -> None:
        self.settings = s = Settings.of(settings)
        self._given = frozenset(settings)
        check_arguments(
            model, optimizer, scheduler, callbacks,
            loss=loss, training_step=training_step, evaluation_step=evaluation_step, collate_fn=collate_fn,
        )  # fmt: skip
        self._objective = Objective(loss, training_step, evaluation_step, metrics)
        self.session = session.init()
        self._ranks = RankGroup()
        self._loggers = Loggers(loggers, self._ranks)
        self.device = self.session.device
        self.module = checkpoint.unwrap(model)
        self.optimizer, self.scheduler, self.callbacks = optimizer, scheduler, callbacks
        self._is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._is_plateau and s.scheduler_interval == "step":
            raise ValueError('Trainer: ReduceLROnPlateau needs scheduler_interval="epoch"')
        if not self._objective.may_give(s.monitor):
            raise ValueError(
                f"Trainer: monitor={s.monitor!r} is no value of the evaluation, which has "
                f"{', '.join(['loss', *(metrics or {})])}: name one of these, or add the metric to metrics"
            )
        if s.deterministic:
            determinism.check_model(model)
            torch.set_num_threads(1)  # more of them add in another order
        self.model = wrap(model, self.device, self.session.world_size)
        self._autocast = self.session.autocast(s.precision)
        self._scaler = self.session.grad_scaler(s.precision)
        self.folder = restarts.run_folder(s.folder)
        self.checkpoints = os.path.join(self.folder, "checkpoints")
        self._facts = facts_of(self.module, optimizer, scheduler, training_step or loss, s, is_step=loss is None)
        self._hyperparameters = Hyperparameters(optimizer)
        self.step = self.epoch = 0
        self.evaluation: dict[str, float] = {}
        self._judge = Judge(s.monitor)
        self._first_world_size = self.session.world_size
        self._grad_norm: Tensor | None = None
        self._saved_step: int | None = None
        self._num_unsaved = 0  # checkpoints since the last epoch's end, for their weights
        self._agreed_signal = 0
        self._agree_every = 1
        size = s.micro_batch_size or -(-s.global_batch_size // self.session.world_size)
        self._collate_fn = collate_fn
        self._parts = NamedParts()
        self._evaluator = Evaluator(
            self.model, self._objective, self._ranks, self.device, size, s.num_workers, collate_fn
        )

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(
        self, data: Any, validation_data: Any = None, *, batch_sampler: Iterable[Iterable[int]] | None = None
    ) -> dict[str, float]:
        """Train to the end, from where the last run in the folder stopped, and return the last evaluation.

        Args:
            data: Map-style dataset, which the ranks divide; or a loader of this rank's own batches, each of which is a
                step of this rank. `Settings.global_batch_size` must then be the size of the loaders' batches, over all
                ranks.
            validation_data: Data for `evaluate` after each epoch. One batch of a dataset is also evaluated before the
                first step, to learn which values an evaluation has.
            batch_sampler: Iterable of lists of a dataset's indices to use instead of `Settings.global_batch_size`: each
                list is a batch over all ranks, and every rank must get the same lists. Its ``set_epoch`` is called.

        Raises:
            CheckpointError: The folder holds a run of another model, optimizer, schedule, data or settings; or no
                checkpoint can be saved there.
            NonFinite: A loss, gradient or parameter is not finite; on every rank. See `Settings.on_nan`.
            PhalanxError: Another job trains in the folder, or the folder can't be made.
            ValueError: The data does not fit the settings, an evaluation lacks the value that `monitor` names, or the
                schedule is shorter than the run.
            SystemExit: Any rank got SIGTERM, SIGUSR1 or Ctrl-C, and everything is saved. The code is 75, or 130 after a
                Ctrl-C without a launcher.
        """
        try:
            with FolderLock(self.folder, self._ranks) as self._lock:
                return self._fit(data, validation_data, batch_sampler)
        except NonFinite:
            self._report()
            raise
        except RankFailed:
            if restarts.will_restart():  # at once: an orderly end of the interpreter takes longer than the restart
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            raise

    def _fit(self, data: Any, validation_data: Any, batch_sampler: Iterable[Iterable[int]] | None) -> dict[str, float]:
        self._check_data(data, validation_data)
        self._feed = open_feed(
            data, self.settings, self._batch_size(), self._ranks, given=self._given,
            collate_fn=self._collate_fn, batch_sampler=batch_sampler,
        )  # fmt: skip
        if self.settings.resume == "never" and self._lock.is_first:
            self._begin_anew()
        loaded = self._load(data)
        if not self._is_over():
            refuse_unwritable(self.checkpoints, self._ranks)
        with self._begin(loaded) as self._run_log, Preemption(speaks=self.session.is_main) as self._preemption:
            if validation_data is not None and not self._is_over():
                self._evaluator.rehearse(validation_data, self.settings.monitor)
            self._call("on_fit_start")
            while not self._is_over():
                self.model.train()
                self._feed.begin_epoch(self.epoch)
                has_ended, is_empty = True, self._feed.is_at_start
                self._run_log.begin_epoch(self.step + 1, is_whole=is_empty)
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
                    raise ValueError(
                        "Trainer: the data makes no step: fewer samples than a batch, an empty loader, or a generator "
                        "that an earlier epoch has used up"
                    )
                if self._run_log.has_news:
                    self._log()
                if has_ended:
                    self.epoch += 1
                    self._feed.begin_epoch(self.epoch)
                self._after_epoch(validation_data, has_ended=has_ended)
            self._end()
        return self.evaluation

    def _check_data(self, data: Any, validation_data: Any) -> None:
        """Refuse what can't be trained on, or not be judged by, before anything is begun."""
        check_data("data", data)
        if validation_data is not None:
            check_data("validation_data", validation_data)
        if self.settings.patience is not None and validation_data is None:
            raise ValueError("Trainer: patience needs validation_data to judge by: fit(data, validation_data)")
        if self._is_plateau and validation_data is None:
            raise ValueError("Trainer: ReduceLROnPlateau needs validation_data to judge by: fit(data, validation_data)")
        has_epochs = (self.settings.max_epochs or 1) > 1
        for name, given, is_again in (
            ("data", data, has_epochs and self.settings.max_steps is None),
            ("validation_data", validation_data, has_epochs),
        ):
            if isinstance(given, types.GeneratorType) and is_again:
                raise ValueError(
                    f"Trainer: {name} is needed in each epoch, and a generator is used up after one: pass a dataset, a "
                    "loader or a list of batches, such as [*generator]"
                )

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
                with synchronizing(self.model, number == len(parts)) if len(parts) > 1 else _NOTHING:
                    losses.append(self._forward_backward(batch, weight))
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        if self.step % self._agree_every == 0:  # here, where ranks have just met
            self._agree()
        self._run_log.clock.lap("exchange")
        self._optimize()
        return loss

    def _agree(self) -> None:
        agreed = self._ranks.largest(_NOT_FINITE if self._guard.has_finding else self._preemption.signal)
        if agreed == _NOT_FINITE:
            self._guard.settle()
        else:
            self._agreed_signal = agreed

    def _forward_backward(self, batch: Any, weight: float) -> Tensor:
        clock = self._run_log.clock
        if self.device.type != "cpu":
            batch = to_device(batch, self.device)
        with self._autocast:
            loss, parts = self._objective.loss_of(self.model, batch)
        if parts:
            self._parts.add(parts, weight)
        if weight != 1:
            loss = loss * weight
        clock.lap("forward")
        self._scaler.scale(loss).backward()
        loss = loss.detach()
        self._guard.look_at_loss(loss, batch, self.step + 1, self.epoch)
        clock.lap("backward")
        if isinstance(self.model, DistributedDataParallel):
            clock.move(self.model.take_averaging_s(), "backward", "exchange")
        return loss

    def _sum_over_shards(self, parts: list[Part], num_samples: int) -> Tensor:
        def backward(shard: int) -> Tensor:
            batch, size = parts[shard]
            if size == 0:
                return torch.zeros((), device=self.device)
            with synchronizing(self.model, False):
                return self._forward_backward(batch, size / num_samples)

        parameters = [p for p in self.module.parameters() if p.requires_grad]
        return determinism.sum_gradients(parameters, self._ranks, len(parts), backward, (self.settings.seed, self.step))

    def _optimize(self) -> None:
        if self.settings.clip_norm is not None:
            self._clip(self.settings.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None and self.settings.scheduler_interval == "step":
            self.scheduler.step()
        self._run_log.clock.lap("optimizer")

    def _clip(self, largest: float) -> None:
        self._scaler.unscale_(self.optimizer)
        model, does_average = self.model, not self.settings.deterministic and not self._scaler.is_enabled()
        if does_average and isinstance(model, DistributedDataParallel):
            self._grad_norm = model.grad_norm()  # added up while gradients were averaged
            if self._grad_norm > largest:
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                foreach_mul_(grads, float(largest / (self._grad_norm + 1e-6)))
        else:
            self._grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), largest)
        self._guard.look_at_norm(self._grad_norm, self.step + 1, self.epoch)

    # ---- around the steps ------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        numbered = ((f"{i} {type(c).__qualname__}", c) for i, c in enumerate(self.callbacks))
        stateful = {name: callback for name, callback in numbered if hasattr(callback, "load_state_dict")}
        state = {
            "trainer": Progress(self, self._identity),  # first: it refuses another run before anything is loaded
            "model": self.module, "optimizer": self.optimizer, "scaler": self._scaler, "random": RandomState(),
            "callbacks": stateful, "data": self._feed, "judge": self._judge,
        }  # fmt: skip
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def _batch_size(self) -> int:
        """Return the global batch size, which may depend on how many ranks the run began with."""
        return self.settings.batch_size_for(self.session.world_size, self._first_world_size)

    def _begin_anew(self) -> None:
        if self.session.rank == 0:
            restarts.set_aside(self.checkpoints, *(os.path.join(self.folder, name) for name in ("metrics.jsonl", IDS)))
        self._ranks.gather(None)

    def _load(self, data: Any) -> checkpoint.Loaded | None:
        """Restore the newest checkpoint of this run, or of another one by force."""
        s, ranks = self.settings, self._ranks
        facts = self._facts | facts_of_data(data, s, ranks)
        facts = ranks.gather(facts if ranks.rank == 0 else None)[0]
        may_force = s.resume == "force"
        self._identity = new = Identity(self.folder, facts, is_known=self._lock.was_ours, may_force=may_force)
        state = self._state()
        if may_force:
            state |= {name: Unforced(state[name], new) for name in ("scaler", "scheduler") if name in state}
            state["data"] = ForcedFeed(self._feed, new)
        loaded = checkpoint.load(self.checkpoints, state, strict=not may_force, missing="ignore")
        if new.is_forced:
            self._hyperparameters.give_again(self.optimizer, keep_state="optimizer" not in new.changed)
            if self.scheduler is not None and not self._is_plateau:
                catch_up(self.scheduler, self.step if s.scheduler_interval == "step" else self.epoch)
            if "monitor" in new.changed:
                self._judge = Judge(s.monitor)
        self._lock.settle()
        return loaded

    def _begin(self, loaded: checkpoint.Loaded | None) -> RunLog:
        s = self.settings
        self._feed.resize(self._batch_size())  # now that it is known
        of_epochs = (s.max_epochs or 0) * (self._feed.num_steps or 0) or sys.maxsize
        num_steps = min(s.max_steps or sys.maxsize, of_epochs)
        left = num_schedule_steps(s, self.step, self.epoch, num_steps, self._feed.num_steps)
        if self._feed.may_differ:
            left = -self._ranks.largest(-left)  # an epoch ends with the shortest loader
        of_schedule = check_schedule(self.scheduler, left, s.scheduler_interval)
        run_log = RunLog(self.folder, num_steps, self._ranks, self._loggers)
        if s.clip_norm is not None and isinstance(self.model, DistributedDataParallel):
            self.model.grad_norm()  # from now on it comes with the averaging: the same bits in the first step as later
        self._guard = FiniteGuard(
            s.on_nan, self.module, self._objective, self._ranks, run_log,
            autocast=self._autocast, skips_steps=self._scaler.is_enabled(),
            clips=s.clip_norm is not None, step=self.step,
        )  # fmt: skip
        self._snapshots = Snapshots(self.checkpoints, s.snapshot_every, self._state, self._may_keep)
        self._saved_step = None if loaded is None else loaded.step
        self._began_s, self._first_step = time.monotonic(), self.step + 1
        resumed = None if loaded is None else dataclasses.asdict(loaded)
        origin = describe_origin(self.model, self.optimizer, self._ranks, self.folder)
        run_log.record(
            "start", pid=os.getpid(), world_size=self.session.world_size, backend=self.session.backend,
            settings=dataclasses.asdict(s), resumed_from=resumed, origin=origin,
        )  # fmt: skip
        run_log.begin_logging(dataclasses.asdict(s), loaded.step if loaded else 0)
        run_log.say(f"{self._feed.describe(num_steps)}; run folder {self.folder}")
        pids = " ".join(str(pid) for pid in self._ranks.gather(os.getpid())[:_MAX_PIDS])
        run_log.say(f"processes of the ranks: {pids}")
        for line in filter(None, (self._lock.problem, self._identity.news, of_schedule)):
            run_log.say(line)
        self._guard.say_what_is_meant()
        last = _trained.get(self.checkpoints)
        if loaded is not None and last is not None and last() is not self:
            run_log.say(
                f"another Trainer of this process has trained in {self.folder}: this one takes up its run. For a run "
                "of its own, such as a fold or another seed, give folder="
            )
        _trained[self.checkpoints] = weakref.ref(self)
        if loaded is not None and self._is_over():
            run_log.say(
                f"already finished at step {self.step}; nothing to train. To go on, raise max_epochs, max_steps or "
                'patience; to begin anew, set resume="never" or another folder'
            )
        elif loaded is not None:
            run_log.say(
                f"going on after step {self.step}, from {loaded.source}: epoch {self.epoch + 1}, in {self.folder}"
            )
        return run_log

    def _is_over(self) -> bool:
        s = self.settings
        is_over = self.epoch >= (s.max_epochs or math.inf) or self.step >= (s.max_steps or math.inf)
        return is_over or (s.patience is not None and self._judge.num_worse >= s.patience)

    def _in_step(self, steps: Iterator[tuple[list[Part], int]]) -> Iterator[tuple[list[Part], int]]:
        """Yield steps while every rank has one; let all obey a signal that any has got."""
        clock = self._run_log.clock
        while True:
            if self._agreed_signal:
                self._make_room(self._agreed_signal)
            clock.restart()
            step = next(steps, None)
            clock.lap("data")
            if self._ranks.largest(step is None) if self._feed.may_differ else step is None:
                return
            assert step is not None
            yield step

    def _after_step(self, loss: Tensor, num_samples: int) -> None:
        s, run_log = self.settings, self._run_log
        run_log.count(loss, num_samples)
        self._call("on_step")  # before its state is kept
        run_log.clock.lap("callbacks")
        self._snapshots.after_step(self.step)
        run_log.clock.lap("snapshot")
        if self.step == self._first_step:
            note_modules()
        if self.step % s.log_every == 0:
            self._log()
        if s.save_every and self.step % s.save_every == 0:
            self._save()

    def _log(self) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        by_rank = self._run_log.log(self.step, self.epoch, lr, self._grad_norm, self._parts)
        slowest_s = max(sum(phases) for phases in by_rank)
        self._agree_every = max(1, int(_AGREE_S / slowest_s))  # the same on every rank
        if news := self._snapshots.adapt(by_rank):
            self._run_log.say(news)
        if self._scaler.is_enabled():
            self._guard.look_at_scale(self._scaler.get_scale(), self.step, self.epoch)
        self._guard.look_at_log(self._run_log.last_losses, self.session.rank, self.step, self.epoch)

    def _may_keep(self) -> bool:
        return self._guard.may_keep(self.step, max(0, self.epoch - self._feed.is_at_start))  # the last step's epoch

    def _after_epoch(self, validation_data: Any, *, has_ended: bool) -> None:
        """Evaluate, say and save; also where `max_steps` came in the middle of the epoch."""
        is_best = False
        epoch = self.epoch - has_ended
        if validation_data is not None:
            self.evaluation = self.evaluate(validation_data)
            is_best = has_ended and self._judge.judge(self.evaluation, self.step)
            self._run_log.record("evaluation", step=self.step, epoch=epoch, **self.evaluation)
            self._call("on_evaluation")
            if bad := [f"{name} {value}" for name, value in self.evaluation.items() if not math.isfinite(value)]:
                self._run_log.say(f"evaluation after step {self.step}: {', '.join(bad)}; not finite, so never the best")
        if self.scheduler is not None and self.settings.scheduler_interval == "epoch" and has_ended:
            self.scheduler.step(*([self.evaluation[self.settings.monitor]] if self._is_plateau else []))
        self._run_log.end_epoch(self.step, epoch, self.evaluation, has_ended=has_ended)
        if has_ended:
            self._call("on_epoch")
        if self.settings.save_every is None or is_best or self._is_over():
            self._save()
        if num := self._num_unsaved:
            newest = "there is none" if self._saved_step is None else f"the newest is that of step {self._saved_step}"
            self._run_log.say(
                f"{counted(num, 'checkpoint')} left out: weights or buffers are not finite after step {self.step}; "
                f"{newest}"
            )
            self._num_unsaved = 0
        self._agree()  # the steps of an epoch may be few, and all this has taken time

    def _save(self, *, wait: bool = False) -> bool:
        """Save the state and return True, unless its weights are not finite."""
        if not self._may_keep():
            self._num_unsaved += 1
            return False
        begin = time.perf_counter()
        value, is_least = self._judge.value_of(self.step), is_minimized(self.settings.monitor)
        best = {} if self._judge.best is None else {"keep_best": 1, "best_is_least": is_least}
        keep = {"keep_last": self.settings.keep_last, **best}
        checkpoint.save(self.checkpoints, self._state(), self.step, metric=value, keep=keep, wait=wait)
        self._saved_step = self.step
        self._run_log.record("save", step=self.step, blocked_s=time.perf_counter() - begin)
        self._call("on_save")
        return True

    def _make_room(self, number: int) -> None:
        if memory.restart_is_planned:  # to have more ranks: this run goes on at once
            if self._may_keep():
                checkpoint.snapshot(self.checkpoints, self._state(), self.step)
            raise SystemExit(PREEMPTED_CODE)
        if self._run_log.has_news:
            self._log()
        saved = "saved" if self._save(wait=True) else "weights that are not finite were not saved"
        self._run_log.record("preempted", step=self.step, signal=number)
        note = requeue() if self.session.is_main and number != signal.SIGINT else ""
        who = signal.Signals(number).name
        self._run_log.say(f"asked to make room by {who}: {saved} after step {self.step}{note and f'; {note}'}")
        self._report()
        note_room_made()
        raise SystemExit(exit_code(number))

    def _end(self) -> None:
        self._call("on_fit_end")
        checkpoint.wait()
        self._run_log.record("end", step=self.step, epoch=self.epoch, seconds=time.monotonic() - self._began_s)
        self._report()

    def _report(self) -> None:
        if self.session.rank == 0:
            with self._run_log.sparing_the_training("metrics.csv"):
                write_csv(self.folder)
            with self._run_log.sparing_the_training("report.html"):
                self._run_log.say(f"report: {write_report(self.folder)}")

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self)

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the means over all samples of `data`, and the metrics with a state; the same on every rank.

        Args:
            data: Map-style dataset, of which each sample counts once, whatever the number of ranks; or a loader. If all
                ranks have the same loader, its batches are divided among them. Of a loader that divides its data, a
                loader of a ``Subset`` that is this rank's own, a stream or a list of batches, each rank counts what it
                gets, so a sample that a sampler repeats counts twice. The mean of a dataset's batch counts for the
                samples that were requested, or for those that a `collate_fn` left in it, if its tensors tell how many.

        Raises:
            ValueError: A value is not one number for each sample, or a metric does not combine the ranks' states.
        """
        return self._evaluator.evaluate(data)

    def predict(self, data: Any) -> Tensor:
        """Return the model's outputs for all samples of a map-style dataset, in order, on the CPU of every rank.

        Args:
            data: Dataset whose samples are inputs of the model, tuples that begin with one, or dictionaries, whose
                targets are left out.
        """
        return self._evaluator.predict(data)
