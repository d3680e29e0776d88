"""Restores a checkpoint into a trainer; with ``resume="force"``, even one of another run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from phalanx import checkpoint
from phalanx._errors import CheckpointError
from phalanx.checkpoint.loading import load_run
from phalanx.train.resume.identity import Identity


class Progress:
    """The trainer's counters as part of its state, with the identity of the run.

    Args:
        trainer: Trainer whose counters these are.
        identity: Identity of the trainer's run.
        callbacks: Names of the callbacks that have a state.
    """

    _names = ("step", "epoch", "evaluation", "_first_world_size", "_length_of_schedule")

    def __init__(self, trainer: Any, identity: Identity, callbacks: Iterable[str]) -> None:
        self._trainer, self._identity, self._callbacks = trainer, identity, [*callbacks]

    def state_dict(self) -> dict[str, Any]:
        numbers = {name.lstrip("_"): getattr(self._trainer, name) for name in self._names}
        return {**numbers, "identity": self._identity.state(), "callbacks": self._callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        theirs = state.get("callbacks", self._callbacks)  # earlier versions did not save the names
        is_lacking = any(name not in theirs for name in self._callbacks)
        callbacks = (", ".join(theirs) or "None", ", ".join(self._callbacks)) if is_lacking else None
        self._identity.check(state.get("identity"), state["step"], callbacks)
        for name in self._names:
            if (key := name.lstrip("_")) in state:  # earlier versions saved fewer counters
                setattr(self._trainer, name, state[key])


class Unforced:
    """Part of a trainer's state that is not restored if the checkpoint belongs to another run."""

    def __init__(self, target: Any, identity: Identity) -> None:
        self._target, self._identity = target, identity

    def state_dict(self) -> Any:
        return self._target.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if not self._identity.is_forced:
            self._target.load_state_dict(state)


class ForcedFeed:
    """Restores the position in the data, or the start of the epoch if the saved position belongs to other data."""

    def __init__(self, feed: Any, identity: Identity) -> None:
        self._feed, self._identity = feed, identity

    def state_dict(self) -> Any:
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._feed.load_state_dict(state)
        except ValueError:
            if not self._identity.is_forced:
                raise
            self._feed.begin_epoch(state["epoch"])


def take_up(folder: str, state: Mapping[str, Any], identity: Identity) -> checkpoint.Loaded | None:
    """Restore the newest checkpoint in a folder and return it; None if there is none. Every rank must call this.

    Raises:
        CheckpointError: The checkpoint belongs to another run, or does not fit the state.
    """
    wanted = dict(state)
    if identity.may_force:
        wanted |= {name: Unforced(state[name], identity) for name in ("scaler", "scheduler") if name in state}
        wanted["data"] = ForcedFeed(state["data"], identity)
    return load_run(folder, wanted, strict=not identity.may_force)


def words_of_resumption(
    loaded: checkpoint.Loaded | None, step: int, epoch: int, folder: str, *, why_over: str, is_again: bool
) -> str:
    """Return the line that says where a run resumes; empty if the run begins.

    Args:
        loaded: Checkpoint that was restored; None: there was none.
        step: Number of steps done.
        epoch: Number of the epoch.
        folder: Folder of the run.
        why_over: Name of the setting that ends the training here; empty if something is left to train.
        is_again: Whether this trainer has trained before; then `fit` continues the trainer's own run, whatever `resume`
            says.
    """
    if loaded is None and step == 0:
        return ""
    if why_over:
        anew = "make the model, the optimizer and the Trainer anew, with" if is_again else "set"
        return (
            f"already finished at step {step}; nothing to train. To train longer, raise {why_over}; to "
            f'start over, {anew} resume="never" or another folder'
        )
    if loaded is None:
        return f"no checkpoint: continuing after step {step} with what the Trainer has; epoch {epoch + 1} begins again"
    return f"resuming after step {step} from {loaded.source}: epoch {epoch + 1}, in {folder}"


class Hyperparameters:
    """Hyperparameters that the script gave its optimizer, to be set again after another run's state was loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def give_again(self, optimizer: torch.optim.Optimizer, *, keep_state: bool) -> None:
        """Set the hyperparameters; without `keep_state`, also clear the state, which another optimizer class made."""
        for group, given in zip(optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **copy.deepcopy(given)})
        if not keep_state:
            for holder in (optimizer, getattr(optimizer, "optimizer", None)):
                if isinstance(holder, torch.optim.Optimizer):
                    holder.state.clear()


def catch_up(scheduler: Any, num_steps: int) -> None:
    """Step a new scheduler as often as the run has stepped its schedule.

    Raises:
        CheckpointError: The schedule is shorter than that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
        for number in range(num_steps):
            try:
                scheduler.step()
            except ValueError as error:
                raise CheckpointError(
                    f"Trainer: the run is past step {num_steps} of its schedule, and this {type(scheduler).__name__} "
                    f"ends at step {number}: make it longer ({error})",
                    op="load",
                    entry="schedule",
                ) from error
