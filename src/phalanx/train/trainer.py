"""`Trainer`: the loop that trains one model on all ranks, and resumes where it was stopped.

The path of a step: `Trainer.fit` -> `Feed.steps` -> `Stepper.backward` (forward and backward of this rank's parts,
gradients averaged) -> `Consensus` (has any rank seen a signal, a request to stop, or differing copies?) ->
`Stepper.optimize` -> `Snapshots` -> log, `RunSaver`.

**Mistakes are found before the first step** as far as they can be: `arguments` and `Settings` check in the constructor,
so that a mistake, such as a class in place of an object, is an error on every rank; `resume/preflight` checks when
`fit` begins.

**If a rank dies,** its peers raise `RankFailed`. A peer whose process can be kept waits inside `fit` for the next
attempt (`phalanx.session.survival`). The others end, and the supervisor starts new processes from the standby process.
Then all ranks load the newest step of which every rank has a whole snapshot. An `_Attempt` holds what belongs to one
group. The constructor makes the first one, and `fit` makes one for each new group, with the same collectives in the
same order, so that the calls of kept and new processes match. `resume/relocation` says when that is impossible.

**Evaluation runs under** `no_grad`, not `inference_mode`: a model may keep a tensor that it made during an evaluation,
such as a table of positions, and a tensor made in inference mode can never take part in training.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from phalanx import checkpoint
from phalanx._errors import NonFinite, RankFailed, ReplicaMismatch
from phalanx.checkpoint.loading import why_not_loadable
from phalanx.checkpoint.memory.snapshots import memory
from phalanx.data import RandomState
from phalanx.data.random_state import random_state_kept
from phalanx.launch import rank_trial
from phalanx.launch.processes.modules import note_modules
from phalanx.record import writer
from phalanx.session import session
from phalanx.session.arguments import naming_arguments
from phalanx.session.survival import PlannedRestart, Survivor
from phalanx.train.arguments import check_arguments, check_attribute, check_fit, check_plateau, check_schedule
from phalanx.train.callbacks import call, check_callbacks, has_hook
from phalanx.train.evaluate.best_metric import BestMetric
from phalanx.train.evaluate.evaluation import Evaluator
from phalanx.train.feed.feed import Part
from phalanx.train.feed.open_feed import open_feed
from phalanx.train.other_names import attribute_meant, wrong_argument
from phalanx.train.report.loggers import Logger, Loggers
from phalanx.train.report.origin import describe_origin, processes_of
from phalanx.train.report.run_log import RunLog
from phalanx.train.resume import restarts
from phalanx.train.resume.consensus import Consensus
from phalanx.train.resume.folder_lock import FolderLock
from phalanx.train.resume.identity import Identity, facts_of, refuse_differences, with_data
from phalanx.train.resume.preemption import Preemption, leave
from phalanx.train.resume.preflight import length_of_schedule, preflight, refuse_unwritable
from phalanx.train.resume.relocation import Relocation, why_not_set_back
from phalanx.train.resume.resumption import Hyperparameters, Progress, catch_up, take_up, words_of_resumption
from phalanx.train.resume.saving import RunSaver
from phalanx.train.resume.snapshots import Snapshots
from phalanx.train.settings import GivenSettings, Settings, SignatureWithSettings
from phalanx.train.step import determinism
from phalanx.train.step.memory_format import lay_out_model
from phalanx.train.step.objective import Objective
from phalanx.train.step.stepper import Stepper
from phalanx.train.wrapper import leave_wrapper, wrap
from phalanx.wire.rank_group import RankGroup

_OF_BEST_METRIC = {"monitor", "mode", "patience"}


def _unknown_argument(method: str, name: str, known: list[str]) -> TypeError:
    return wrong_argument(f"Trainer.{method}", name, known, inspect.signature(Trainer).parameters)


class Trainer:
    """Trains a model on all ranks of the job; the constructor joins the job if the script has not.

    Every rank makes the same Trainer and calls the same methods. Under ``phalanx run --max-restarts N`` the ranks take
    snapshots, as often as `Settings.snapshot_every` says, and resume from the last snapshot after a rank was killed.

    Arguments that are not described here are the fields of `phalanx.train.Settings`, such as ``max_epochs=10``.

    Args:
        model: Module to train. It is wrapped in `DistributedDataParallel`, unless it is wrapped already: in ours, in
            torch's, or by FSDP2's ``fully_shard``.
        optimizer: Optimizer of the model's parameters.
        loss: Function of outputs and targets. For a batch ``(inputs, targets)``, ``loss(model(inputs), targets)`` is
            the mean over its samples. In a batch that is a dictionary, "targets", "target", "labels" or "label" names
            the targets, and the other entries are keyword arguments of the model; if "inputs" is the only other entry,
            it is the positional argument.
        training_step: Function to use instead of `loss`: ``training_step(model, batch)`` returns the loss, a mean over
            the samples, or a dictionary that has the loss as "loss" and other numbers to log.
        evaluation_step: Function that evaluates a batch: ``evaluation_step(model, batch)`` returns the loss, or values
            by name, each with one number for each sample or their mean. None: the training step, or the loss and the
            metrics.
        scheduler: Learning rate scheduler; or a function that makes one once the length of the run is known:
            ``scheduler(optimizer, num_steps)``, where `num_steps` is how often the scheduler will be stepped: once a
            step or once an epoch, see `Settings.scheduler_interval`. If a resumed run is longer or shorter than before,
            the function makes another scheduler, which continues at the run's position.
        metrics: Functions by name to evaluate beside the loss: ``metric(outputs, targets)`` returns one number for each
            sample, or their mean. Objects with ``update``, ``compute`` and ``reset``, such as those of torchmetrics,
            combine the states of all ranks in ``compute``; an `evaluation_step` updates them itself.
        collate_fn: Function that makes a batch of a dataset's samples; None: torch's. If it drops samples, an
            evaluation counts those that remain, provided that all tensors of the batch have the same, smaller first
            dimension; a training step still weighs each rank's part by the number of samples requested.
        callbacks: Objects with any of ``on_fit_start``, ``on_step``, ``on_epoch``, ``on_evaluation``, ``on_save`` and
            ``on_fit_end``, each called with the trainer on every rank; `stop` ends the training. Checkpoints include
            the callbacks with ``state_dict`` and ``load_state_dict``.
        loggers: Loggers that get the numbers of metrics.jsonl on rank 0: "tensorboard", "wandb" (offline, unless a key
            or WANDB_MODE is set), or objects with ``log(metrics, step)`` and ``close()``. If a logger fails, the run
            reports this once and trains on without that logger.

    Attributes:
        model: Model in its wrapper.
        module: Model without the wrapper.
        optimizer: Optimizer that was passed.
        scheduler: Scheduler that was passed, or None; a scheduler that a function makes exists once `fit` has begun.
        callbacks: Callbacks that were passed.
        settings: Settings of this trainer; `max_epochs` and `max_steps` may change, to train longer.
        session: Session of this rank.
        device: Device of the model.
        folder: Folder of the run.
        checkpoints: Folder of the run's checkpoints.
        step: Number of optimizer steps done.
        epoch: Number of the current epoch, from 0, as in metrics.jsonl; the screen and the report count from 1. In
            ``on_evaluation`` and ``on_epoch`` it is the epoch that ends; a checkpoint saved afterwards has the next
            number.
        evaluation: Values of the last evaluation in `fit`, by name.

    Raises:
        ValueError: Arguments contradict each other.
        TypeError: An argument does not exist, or is of the wrong kind.
        ImportError: A logger's package is missing on rank 0.

    Example:
        >>> inputs = torch.randn(64, 8)
        >>> data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        >>> model = nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, max_epochs=1, folder="runs/linear")
        >>> trainer.fit(data, data)
        global batch 32 = ...
        {'loss': ...}
        >>> trainer.evaluate(data)
        {'loss': ...}
        >>> trainer.predict(data).shape
        torch.Size([64, 1])
    """

    _is_made = False  # once True, attributes that would have no effect are refused

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
        **settings: Unpack[GivenSettings],
    ) -> None:
        self._given, given = frozenset(settings), {**settings}
        callbacks = callbacks if isinstance(callbacks, str) or not isinstance(callbacks, Iterable) else [*callbacks]
        has_callbacks = bool(callbacks)
        if rank_trial.is_on():
            given, trial = rank_trial.of_trainer(given, model)
            scheduler, loggers, callbacks = None, (), (*callbacks, trial)
        s = self.settings = Settings.of(given, inspect.signature(Trainer).parameters)
        check_arguments(
            model, optimizer, scheduler, callbacks,
            loss=loss, training_step=training_step, evaluation_step=evaluation_step, collate_fn=collate_fn,
        )  # fmt: skip
        objective = Objective(loss, training_step, evaluation_step, metrics)
        objective.check_monitor(s.monitor)
        self._is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._is_plateau and s.scheduler_interval == "step":
            raise ValueError('Trainer: ReduceLROnPlateau needs scheduler_interval="epoch"')
        if self._is_plateau:
            check_plateau(scheduler, s)
        if s.channels_last:
            lay_out_model(model)
        if s.deterministic:
            determinism.prepare(model)
        self.model: nn.Module = model
        self.module: nn.Module = checkpoint.unwrap(model)
        self.optimizer: torch.optim.Optimizer = optimizer
        is_function = scheduler is not None and not hasattr(scheduler, "step")
        self._make_scheduler: Callable[[Any, int], Any] | None = scheduler if is_function else None
        self._length_of_schedule: int | None = None  # number of steps for which the script's function made the schedule
        self.scheduler: Any = None if is_function else scheduler
        self.callbacks: Sequence[Any] = callbacks
        self._given_model, self._given_loggers = model, loggers
        self._objective, self._has_callbacks, self._collate_fn = objective, has_callbacks, collate_fn
        self._relocation = Relocation()
        self._attempt: _Attempt | None = None
        self._join()
        self.folder: str = restarts.run_folder(s.folder)
        self.checkpoints: str = os.path.join(self.folder, "checkpoints")
        self.step: int = 0
        self.epoch: int = 0
        self.evaluation: dict[str, float] = {}
        self._facts = facts_of(self.module, optimizer, scheduler, training_step or loss, s, is_step=loss is None)
        self._hyperparameters = Hyperparameters(optimizer)
        self._best_metric = BestMetric(s.monitor, s.mode, s.min_delta)
        self._first_world_size = self.session.world_size
        self._has_fitted = self._has_said = False
        self._is_made = True

    __signature__ = SignatureWithSettings(__init__)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made and not name.startswith("_"):
            check_attribute(self, name, value, is_subclass=type(self) is not Trainer)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Refuse an attribute that only other trainers have, and name the right one."""
            is_own = hasattr(type(self), name)  # a property of this class has raised AttributeError
            if self._is_made and not is_own and (meant := attribute_meant(self, name)):
                raise AttributeError(f"Trainer: there is no attribute {name}; right: {meant}")
            return super().__getattribute__(name)

    def _change(self, name: str, value: Any) -> None:
        """Set an attribute that scripts may not set, because other state must change with it."""
        super().__setattr__(name, value)

    # ---- training --------------------------------------------------------------------------------------------------

    @naming_arguments(_unknown_argument)
    def fit(
        self, data: Any, validation_data: Any = None, *, batch_sampler: Iterable[Iterable[int]] | None = None
    ) -> dict[str, float]:
        """Train to the end, from where the last run in the folder stopped, and return the last evaluation.

        `Settings.resume` applies to runs that other Trainers left in the folder. A second `fit` of this Trainer
        continues its own run: it trains if `max_epochs` or `max_steps` was raised, or after a `stop`, and says so if
        nothing is left. To start over, also in a notebook, create the model, the optimizer and the Trainer again.

        Args:
            data: Map-style dataset, which the ranks divide; or a loader of this rank's own batches, each of which is
                this rank's part of a step. `Settings.global_batch_size` must then be the total size of the batches of
                all ranks. The weight of a batch is its number of samples, and a rank whose loader has ended takes part
                until all loaders have. If the first dimensions of a batch's tensors differ, all batches weigh the same.
            validation_data: Data for `evaluate` after each epoch. One batch of a dataset is also evaluated before the
                first step, to learn which values an evaluation has.
            batch_sampler: Iterable of lists of a dataset's indices to use instead of `Settings.global_batch_size`: each
                list is a batch over all ranks, and every rank must get the same lists. `fit` calls its ``set_epoch``.

        Raises:
            CheckpointError: The folder holds a run of another model, optimizer, schedule, data or settings; or no
                checkpoint can be saved there.
            NonFinite: A loss, gradient or parameter is not finite; on every rank. See `Settings.on_nan`.
            PhalanxError: Another job trains in the folder, or the folder can't be made.
            ReplicaMismatch: The ranks' copies of the model differ; on every rank. See `Settings.compare_every`.
            ValueError: The data does not fit the settings, an evaluation lacks the value that `monitor` names, or the
                schedule is shorter than the run.
            SystemExit: Any rank got SIGTERM, SIGUSR1 or Ctrl-C, and the state is saved unless weights are not finite.
                The code is 75, or 130 after a Ctrl-C without a launcher.
        """
        why_not = self._relocation.why_not_kept(self._given_model, self.optimizer, self._in_group.loggers, data)
        try:
            with Survivor(
                lambda: why_not or why_not_set_back(self.callbacks) or why_not_loadable(), self._leave
            ) as survivor:
                return survivor.outlive(lambda: self._in_group.fit(data, validation_data, batch_sampler))
        except (NonFinite, ReplicaMismatch):
            self._in_group.run_log.report()
            raise
        except RankFailed:
            restarts.leave_if_restarted()
            raise

    def stop(self) -> None:
        """End `fit` after this step on all ranks, even in the middle of an epoch.

        A call on one rank is enough. `fit` then evaluates, saves and returns. In a callback, it ends after the step
        just done; in a training step or a thread, the ranks learn of the request within 0.1 s, or after the current
        step if steps take longer. The run is not over: with the same folder, the next `fit` resumes it.

        Raises:
            RuntimeError: `fit` is not running.
        """
        if self._attempt is None or not self._attempt.is_training:
            raise RuntimeError("Trainer.stop: fit() is not running; call it in a callback or in the training step")
        self._attempt.consensus.wants_stop = not rank_trial.is_on()  # ignored in a trial, which ends by itself

    @property
    def _in_group(self) -> _Attempt:
        """Return the attempt in the present process group; if the last group has failed, join the job again."""
        return self._attempt or self._join()

    def _join(self) -> _Attempt:
        self._attempt = attempt = _Attempt(self, self._relocation.join())
        self.session: session.Session = attempt.session
        self.device: torch.device = attempt.session.device
        self._change("model", attempt.model)
        self._relocation.note_joined()
        return attempt

    def _leave(self) -> None:
        """Drop what belongs to a process group that has failed, and keep the model and the optimizer as they are."""
        leave_wrapper(self.model)
        self._change("model", self.module)
        self._attempt = None

    # ---- evaluation ------------------------------------------------------------------------------------------------

    @naming_arguments(_unknown_argument)
    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the means over all samples of `data`, and the values of metrics with a state; the same on every rank.

        The model is evaluated as it is: only `fit` restores a checkpoint from the folder.

        Args:
            data: Map-style dataset, of which each sample counts once, whatever the number of ranks; or a loader. If all
                ranks have the same loader, they take turns at its batches. With a loader that divides its data, a
                loader of this rank's own ``Subset``, a stream or a list of batches, each rank counts what it gets, so a
                repeated sample counts twice. A dataset's batch counts as many samples as were requested for it. If a
                `collate_fn` drops samples, only the rest counts, provided that all tensors have the same, smaller first
                dimension.

        Raises:
            ValueError: A value is neither one number per sample nor their mean, or a metric does not combine the ranks'
                states.
        """
        self._say_if_untrained("evaluate")
        return self._in_group.evaluator.evaluate(data)

    @naming_arguments(_unknown_argument)
    def predict(self, data: Any) -> Tensor:
        """Return the model's outputs for all samples of a map-style dataset, in order, on the CPU of every rank.

        Args:
            data: Dataset; each sample is an input of the model, a tuple that begins with the input, or a dictionary,
                whose targets are ignored.
        """
        self._say_if_untrained("predict")
        return self._in_group.evaluator.predict(data)

    def _say_if_untrained(self, method: str) -> None:
        """Say once that the model is untrained, if the folder has a run that only `fit` restores."""
        if self._has_fitted or self._has_said or self.settings.resume == "never" or not self.session.is_main:
            return
        if restarts.has_been_trained(self.module):
            return
        self._has_said = True
        if found := checkpoint.list_checkpoints(self.checkpoints):
            self.session.print(
                f"Trainer.{method}: the model is as the script has made it. Step {found[-1].step} of the run "
                f"in {self.folder} is restored by fit(), or by "
                f'phalanx.checkpoint.load({self.folder!r}, {{"model": model}})'
            )


class _Attempt:
    """The part of a trainer that belongs to one process group: made on joining it, dropped when the group fails.

    The trainer has everything that outlives a group: the model and its optimizer, the schedule, callbacks and counters.
    Read the class from the top: join, `fit`, begin, steps and epochs, end.

    Attributes:
        session: Session of this rank.
        model: Model in its wrapper.
        loggers: Loggers of the run.
        evaluator: Evaluator of the model.
        stepper: Stepper of the model's optimizer.
        run_log: Log of the run, once `fit` has begun it.
        consensus: Agreements of the ranks while they train, once `fit` has begun.
        is_training: Whether `fit` is training, so that `Trainer.stop` can end it.
    """

    def __init__(self, trainer: Trainer, joined: session.Session) -> None:
        s = trainer.settings
        self._trainer, self._settings, self.session = trainer, s, joined
        self._ranks = RankGroup()
        self.loggers = Loggers(trainer._given_loggers, self._ranks)
        self.model = wrap(trainer._given_model, joined.device, joined.world_size)
        in_steps = trainer.scheduler if s.scheduler_interval == "step" else None
        divides = "never" if trainer._has_callbacks and s.divide_optimizer == "auto" else s.divide_optimizer
        objective = trainer._objective
        self.stepper = Stepper(self.model, trainer.optimizer, in_steps, objective, self._ranks, joined, s, divides)
        self.evaluator = Evaluator(self.model, objective, self._ranks, joined.device, s, trainer._collate_fn)
        self.is_training = False

    def fit(self, data: Any, validation_data: Any, batch_sampler: Iterable[Iterable[int]] | None) -> dict[str, float]:
        """Train to the end in this group, see `Trainer.fit`."""
        try:
            with FolderLock(self._trainer.folder, self._ranks) as self._lock, writer.telling():
                return self._fit(data, validation_data, batch_sampler)
        finally:
            self.is_training = False

    def _fit(self, data: Any, validation_data: Any, batch_sampler: Iterable[Iterable[int]] | None) -> dict[str, float]:
        trainer, s = self._trainer, self._settings
        refuse_differences(trainer._facts, s, evaluates=validation_data is not None, ranks=self._ranks)
        check_callbacks(trainer.callbacks)  # again, because the script may have added some
        check_fit(
            data, validation_data, batch_sampler, s, trainer._given,
            is_plateau=trainer._is_plateau, needs_pairs=trainer._objective.is_split and trainer._collate_fn is None,
        )  # fmt: skip
        self._feed = open_feed(
            data, s, self._batch_size(), self._ranks, given=trainer._given,
            collate_fn=trainer._collate_fn, batch_sampler=batch_sampler,
        )  # fmt: skip
        begins_anew = s.resume == "never" and self._lock.is_first and not self._ranks.largest(trainer._has_fitted)
        self._set_aside = restarts.set_aside(trainer.folder, self._ranks) if begins_anew else ""
        self._is_again = trainer._has_fitted
        loaded = self._take_up(data)
        trainer._has_fitted = True
        if not self._is_over():
            refuse_unwritable(trainer.checkpoints, self._ranks)
        with (
            # Opened before any output: a reader of "training begins" may send a signal at once.
            Preemption(speaks=self.session.is_main, checkpoints=trainer.checkpoints) as self._preemption,
            self._begin(loaded) as self.run_log,
            self.stepper,
            contextlib.closing(self._feed),
            self.evaluator.keeping_loader(),
        ):
            if validation_data is not None and not self._is_over():
                self.evaluator.rehearse(validation_data, s.monitor)
            self._call("on_fit_start")
            self.consensus.agree_to_stop()
            while not (self._is_over() or self.consensus.stops):
                has_ended = self._train_epoch()
                self._after_epoch(validation_data, has_ended=has_ended)
            self._end()
        return trainer.evaluation

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def _take_up(self, data: Any) -> checkpoint.Loaded | None:
        """Restore the newest checkpoint of this run, or with ``resume="force"`` of another run."""
        trainer, s = self._trainer, self._settings
        facts = with_data(trainer._facts, data, s, self._ranks)
        self._identity = Identity(
            trainer.folder, facts, is_known=self._lock.was_ours, may_force=s.resume == "force", is_own=self._is_again
        )
        if trainer._make_scheduler is not None and trainer.scheduler is None:
            self._schedule(length_of_schedule(s, self._feed, trainer.step, trainer.epoch))
        loaded = take_up(trainer.checkpoints, self._state(), self._identity)
        if self._identity.is_forced:
            changed = self._identity.changed
            trainer._hyperparameters.give_again(trainer.optimizer, keep_state="optimizer" not in changed)
            if trainer.scheduler is not None and not trainer._is_plateau and trainer._make_scheduler is None:
                catch_up(trainer.scheduler, trainer.step if s.scheduler_interval == "step" else trainer.epoch)
            if not changed.isdisjoint(("monitor", "mode")):
                trainer._best_metric = BestMetric(s.monitor, s.mode, s.min_delta)
        self._lock.settle()
        self._lacks_end = loaded is not None and loaded.source == "memory" and trainer.step == s.max_steps
        return loaded

    def _begin(self, loaded: checkpoint.Loaded | None) -> RunLog:
        """Make the objects that the steps need, and record and show how the run begins."""
        trainer, s = self._trainer, self._settings
        self._feed.resize(self._batch_size())  # the size depends on the checkpoint, so it is known only now
        if trainer._make_scheduler is not None and not self._is_over():
            length = length_of_schedule(s, self._feed, trainer.step, trainer.epoch)
            if length != trainer._length_of_schedule or self._identity.is_forced:
                self._schedule(length)
        num_steps, of_schedule = preflight(trainer.scheduler, s, self._feed, trainer.step, trainer.epoch)
        run_log = RunLog(trainer.folder, num_steps, self._ranks, self.loggers)
        self._guard = self.stepper.begin(run_log, trainer.step)
        sentinel, of_sentinel = self.stepper.sentinel(trainer.step)
        self.consensus = Consensus(self._ranks, self._preemption, self._guard, sentinel, run_log, s.compare_every)
        self.is_training = True
        callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, rank_trial.Trial)]
        self._asks_in_steps = self._ranks.largest(has_hook(callbacks, "on_step"))
        self._snapshots = Snapshots(trainer.checkpoints, s.snapshot_every, self._state, self._may_keep)
        self._saver = RunSaver(
            trainer.checkpoints, s, trainer._best_metric, run_log, self._state, self._may_keep, loaded, self._ranks
        )
        self._began_s, self._first_step = time.monotonic(), trainer.step + 1
        origin = describe_origin(self.model, trainer.optimizer, self._feed, self._ranks, trainer.folder)
        run_log.begin(self.session, s, loaded, origin)
        lines = [
            f"{self._feed.describe(num_steps)}; run folder {trainer.folder}", processes_of(self._ranks),
            self._lock.problem, self._set_aside, self._identity.news, of_schedule, self._guard.what_is_meant(),
            of_sentinel,
            restarts.words_of_another(trainer, trainer.module, trainer.folder, loaded is not None),
            f"the best checkpoint is that of {trainer._best_metric.wanted}" if trainer._given & _OF_BEST_METRIC else "",
            words_of_resumption(
                loaded, trainer.step, trainer.epoch, trainer.folder, why_over=self._why_over(), is_again=self._is_again
            ),
        ]  # fmt: skip
        for line in filter(None, lines):
            run_log.say(line)
        return run_log

    def _schedule(self, length: int) -> None:
        """Make a schedule of that length with the script's function, and step it to the run's position."""
        trainer, s = self._trainer, self._settings
        assert trainer._make_scheduler is not None
        if trainer.scheduler is not None:  # restore the learning rates with which the earlier schedule began
            trainer._hyperparameters.give_again(trainer.optimizer, keep_state=True)
        trainer._change("scheduler", trainer._make_scheduler(trainer.optimizer, length))
        check_schedule(trainer.scheduler, trainer._make_scheduler)
        trainer._length_of_schedule = length
        in_steps = s.scheduler_interval == "step"
        catch_up(trainer.scheduler, trainer.step if in_steps else trainer.epoch)
        self.stepper.scheduler = trainer.scheduler if in_steps else None

    def _batch_size(self) -> int:
        """Return the global batch size, which may depend on the number of ranks that the run began with."""
        return self._settings.batch_size_for(self.session.world_size, self._trainer._first_world_size)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        numbered = ((f"{i} {type(c).__qualname__}", c) for i, c in enumerate(trainer.callbacks))
        stateful = {name: callback for name, callback in numbered if hasattr(callback, "load_state_dict")}
        state = {
            "trainer": Progress(trainer, self._identity, stateful),  # the first entry, which may refuse the checkpoint
            "model": trainer.module, "optimizer": trainer.optimizer, "scaler": self.stepper.scaler,
            "random": RandomState(), "callbacks": stateful, "data": self._feed, "judge": trainer._best_metric,
        }  # fmt: skip
        return state if trainer.scheduler is None else {**state, "scheduler": trainer.scheduler}

    # ---- steps and epochs --------------------------------------------------------------------------------------------

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, or to `max_steps`; return whether the epoch has ended."""
        trainer, s = self._trainer, self._settings
        self.model.train()
        self._feed.begin_epoch(trainer.epoch)
        has_ended, is_empty = True, self._feed.is_at_start
        self.run_log.begin_epoch(trainer.step + 1, is_whole=is_empty)
        is_at_last = trainer.step == s.max_steps  # resumed from the last step: only the epoch's end is left
        for parts, num_samples in self._in_step(iter(()) if is_at_last else self._feed.steps()):
            loss = self.stepper.backward(parts, num_samples, trainer.step + 1, trainer.epoch)
            del parts  # so that the next batch reuses this memory, which is in the caches
            if self.consensus.is_due(trainer.step):  # here, because the ranks have just waited for each other
                self.consensus.agree(trainer.step)
            self.stepper.optimize(trainer.step + 1, trainer.epoch)
            trainer.step += 1
            self._feed.advance()
            self._after_step(loss, num_samples)
            is_empty = False
            if trainer.step == s.max_steps:
                break
        if trainer.step == s.max_steps or self.consensus.stops:
            has_ended, is_empty = self._feed.is_at_end, False
        self._lacks_end = False
        if is_empty:
            raise ValueError(
                "Trainer: the data yields no step: fewer samples than a batch, an empty loader, or an iterator "
                "that an earlier epoch has used up; pass the loader itself, or a list of batches"
            )
        if self.run_log.has_news:
            self._log()
        return has_ended

    def _in_step(self, steps: Iterator[tuple[list[Part], int]]) -> Iterator[tuple[list[Part], int]]:
        """Yield steps as long as any rank has one; act on signals and stops on which all ranks have agreed."""
        clock = self.run_log.clock
        while True:
            if self.consensus.signal:
                self._preempt(self.consensus.signal)
            if self.consensus.stops:
                return
            clock.restart()
            clock.step = self._trainer.step + 1
            clock.begin("data")
            step = next(steps, None)
            clock.lap("data")
            step = self._feed.together(step)
            if step is None:
                return
            clock.lap("wait")
            event = writer.begin_step(clock.step, step[1], self.run_log.num_steps)
            try:
                yield step
            finally:
                writer.end(event)
            del step

    def _after_step(self, loss: Tensor, num_samples: int) -> None:
        trainer, s, run_log = self._trainer, self._settings, self.run_log
        self._lock.check()
        run_log.count(loss, num_samples)
        self._call("on_step")  # before the snapshot, because the snapshot includes the callbacks' state
        run_log.clock.lap("callbacks")
        if self._asks_in_steps:
            self.consensus.agree_to_stop()
            run_log.clock.lap("wait")
        self._snapshots.after_step(trainer.step)
        run_log.clock.lap("snapshot")
        if trainer.step == self._first_step:
            note_modules()
        if trainer.step % s.log_every == 0:
            self._log()
        if s.save_every and trainer.step % s.save_every == 0:
            self._save()

    def _log(self) -> None:
        trainer = self._trainer
        lr = trainer.optimizer.param_groups[0]["lr"]
        by_rank = self.run_log.log(trainer.step, trainer.epoch, lr, self.stepper.grad_norm, self.stepper.named)
        self.consensus.adapt(trainer.step, min(map(sum, by_rank)))
        if news := self._snapshots.adapt(by_rank):
            self.run_log.say(news)
        self._guard.look_at_scale(self.stepper.scaler, trainer.step, trainer.epoch)
        self._guard.look_at_log(self.run_log.last_losses, self.session.rank, trainer.step, trainer.epoch)

    def _after_epoch(self, validation_data: Any, *, has_ended: bool) -> None:
        """Evaluate, log and save at the end of an epoch, or where `max_steps` or a stop ended it in the middle."""
        trainer, s = self._trainer, self._settings
        is_best = False
        if validation_data is not None:
            # In the middle of an epoch, random state is restored: an uninterrupted run would not have evaluated here.
            with contextlib.nullcontext() if has_ended else random_state_kept():
                trainer.evaluation = trainer.evaluate(validation_data)
                is_best = has_ended and trainer._best_metric.update(trainer.evaluation, trainer.step)
                self.run_log.record_evaluation(trainer.step, trainer.epoch, trainer.evaluation)
                self._call("on_evaluation")
        if trainer.scheduler is not None and s.scheduler_interval == "epoch" and has_ended:
            trainer.scheduler.step(*([trainer.evaluation[s.monitor]] if trainer._is_plateau else []))
        self.run_log.end_epoch(trainer.step, trainer.epoch, trainer.evaluation, has_ended=has_ended)
        if has_ended:
            self._call("on_epoch")
            trainer.epoch += 1
            self._feed.begin_epoch(trainer.epoch)
        self.consensus.agree_to_stop()
        is_last = self._is_over() or self.consensus.stops
        if is_best or is_last or (s.save_every is None and self._saver.is_due(trainer.step)):
            self._save()
        self._saver.say_left_out(trainer.step)
        self.consensus.agree(trainer.step)  # a signal may have arrived, and a short epoch may have had no agreement

    # ---- what is kept, and the end -----------------------------------------------------------------------------------

    def _why_over(self) -> str:
        """Return the name of the setting that ends the training here; empty if something is left to train."""
        trainer, s = self._trainer, self._settings
        if self._lacks_end:
            return ""
        if trainer.epoch >= (s.max_epochs or math.inf):
            return "max_epochs"
        if trainer.step >= (s.max_steps or math.inf):
            return "max_steps"
        return "patience" if s.patience is not None and trainer._best_metric.num_worse >= s.patience else ""

    def _is_over(self) -> bool:
        return bool(self._why_over())

    def _may_keep(self) -> bool:
        last_epoch = max(0, self._trainer.epoch - self._feed.is_at_start)  # the epoch of the last step
        return self._guard.may_keep(self._trainer.step, last_epoch)

    def _save(self, *, wait: bool = False) -> bool:
        is_saved = self._saver.save(self._trainer.step, wait=wait)
        if is_saved:
            self._call("on_save")
            self.consensus.agree_to_stop()
        return is_saved

    def _preempt(self, number: int) -> None:
        """Save and end this rank; if the job is about to restart with more ranks, take a snapshot instead of saving."""
        step = self._trainer.step
        # All ranks are asked, because on several hosts, one launcher may know of the restart before the others.
        if self._ranks.largest(memory().restart_is_planned):
            self._snapshots.take(step)
            raise PlannedRestart
        if self.run_log.has_news:
            self._log()
        begins_anew = self._settings.resume == "never"
        is_saved = self._save(wait=True)
        leave(self.run_log, number, step, is_saved=is_saved, ranks=self._ranks, begins_anew=begins_anew)

    def _end(self) -> None:
        trainer = self._trainer
        reason, words = self._why_over() or "stop", ""
        if reason == "stop":
            words = f"stopped by trainer.stop() after step {trainer.step}"
        elif reason == "patience":
            words = f"stopped at epoch {trainer.epoch}: {trainer._best_metric.why_stopped()}"
        if words:
            self.run_log.say(words)
        self._call("on_fit_end")
        checkpoint.wait()
        told = {"reason": reason, **({"message": words} if words else {})}
        seconds = time.monotonic() - self._began_s
        self.run_log.record("end", step=trainer.step, epoch=trainer.epoch, seconds=seconds, **told)
        self.run_log.report()

    def _call(self, event: str) -> None:
        call(self._trainer.callbacks, event, self._trainer)
