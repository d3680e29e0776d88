"""Callbacks of a script: the methods that the trainer calls, and a check that refuses objects without any of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import lr_scheduler

from phalanx._env import nearest
from phalanx._text import listed

HOOKS = ("on_fit_start", "on_step", "on_epoch", "on_evaluation", "on_save", "on_fit_end")
"""Methods of a callback that the trainer calls, with the trainer as the argument."""

_OTHER_NAMES = {  # names in other trainers, with our names
    "on_train_start": "on_fit_start", "on_train_begin": "on_fit_start",
    "on_step_end": "on_step", "on_batch_end": "on_step", "on_train_batch_end": "on_step",
    "on_optimizer_step": "on_step", "on_epoch_end": "on_epoch", "on_train_epoch_end": "on_epoch",
    "on_validation_end": "on_evaluation", "on_validation_epoch_end": "on_evaluation", "on_evaluate": "on_evaluation",
    "on_test_end": "on_evaluation", "on_save_checkpoint": "on_save", "on_train_end": "on_fit_end",
}  # fmt: skip
_MAX_NAMED = 3


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks with a hook that would never be called, and callbacks without any method that would be called.

    Raises:
        TypeError: A callback has a method ``on_...`` that is no hook, or a callback has no hook at all.
    """
    for callback in callbacks:
        who = f"the callback {type(callback).__qualname__}"
        hooks = (
            f"The Trainer calls {', '.join(HOOKS[:-1])} and {HOOKS[-1]}, each with itself: def on_step(self, trainer)"
        )
        if unknown := [name for name in dir(callback) if _is_unknown(callback, name)]:
            meant = _meant(unknown[0]) if len(unknown) == 1 else ""
            hint = f", did you mean {meant}?" if meant else "."
            raise TypeError(
                f"Trainer: {who} has {listed(unknown, _MAX_NAMED)}, which would never be called{hint} {hooks}. Don't "
                "start the names of your own methods with on_"
            )
        if not any(has_hook([callback], hook) for hook in HOOKS):
            raise TypeError(f"Trainer: {who} has no method that would be called. {_right_use(callback)}{hooks}")


def has_hook(callbacks: Iterable[Any], hook: str) -> bool:
    """Return whether any callback has this method."""
    return any(callable(getattr(callback, hook, None)) for callback in callbacks)


def call(callbacks: Iterable[Any], hook: str, trainer: Any) -> None:
    """Call this method of every callback that has it."""
    for callback in callbacks:
        if has_hook([callback], hook):
            getattr(callback, hook)(trainer)


def _right_use(callback: Any) -> str:
    """Return the right use of an object that is not a callback; "" if it is unknown."""
    kind = type(callback).__qualname__
    if callable(getattr(callback, "update_parameters", None)):
        return (
            f"Give it one: class Average({kind}): def on_step(self, trainer): self.update_parameters(trainer.module). "
        )
    if isinstance(callback, lr_scheduler.LRScheduler):
        return "A schedule is an argument of its own: Trainer(..., scheduler=scheduler). "
    return ""


def _is_unknown(callback: Any, name: str) -> bool:
    return name.startswith("on_") and name not in HOOKS and callable(getattr(callback, name, None))


def _meant(name: str) -> str:
    return _OTHER_NAMES.get(name) or nearest(name, HOOKS)
