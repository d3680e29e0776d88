"""Decides whether a trainer's process can be kept after a failure, as a rank beside newly started processes.

A new process runs the script from the top, while a kept process repeats only the trainer's own steps for joining a job.
The two call the same collectives only if the script itself calls none. So a process can't be kept if the script has
made the group by hand, made other groups, wrapped the model itself, or called a collective between the constructor and
`fit` (the group counts its collectives). Nor can a process be kept if a loader of the script divides the data among the
previous ranks, or if a callback has attributes that no checkpoint holds. In a new process, such attributes start
afresh, so the copies of the model might diverge. The script may have called `phalanx.init`: a new process calls it,
too, and a kept process repeats the call with the same arguments. The script's session object then shows the new rank
and world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from phalanx.session import session
from phalanx.train.feed.feed import is_dataset
from phalanx.train.report.loggers import Loggers
from phalanx.train.wrapper import can_wrap


class Relocation:
    """A trainer's membership in a process group, and whether the trainer can move to another group."""

    def __init__(self) -> None:
        self._why_not_met = session.why_not_met()
        self._made: session.Made | None = None
        self._use: tuple[int, bool] | None = None

    def join(self) -> session.Session:
        """Join the job, for the first time or again."""
        if self._made is not None:
            return session.init_again(self._made)
        joined = session.init()
        self._made = session.made()
        return joined

    def note_joined(self) -> None:
        """Record that the trainer has joined a job, and has finished its setup."""
        self._use = session.use_of_group()

    def why_not_kept(self, model: nn.Module, optimizer: torch.optim.Optimizer, loggers: Loggers, data: Any) -> str:
        """Return, at the beginning of `fit`, why the trainer could not join another group; empty if it could."""
        if self._why_not_met:
            return f"{self._why_not_met} Trainer()"
        if self._use != session.use_of_group():
            return "the script has used its process group between Trainer() and fit()"
        if not can_wrap(model):
            return "the script has wrapped the model itself"
        if hasattr(optimizer, "process_group"):
            return "the optimizer has a process group of its own"
        if not is_dataset(data):
            return "fit() was given a loader, which divides its data among the previous ranks"
        if not loggers.can_open_again:
            return "a logger is an object of the script, which is closed by now"
        return ""


def why_not_set_back(callbacks: Sequence[Any]) -> str:
    """Return why callbacks can't be restored after another rank has failed; "" if they can."""
    for one in callbacks:
        # Attributes that no checkpoint holds start afresh in a new process, so copies of the model might diverge.
        if getattr(one, "__dict__", None) and not hasattr(one, "load_state_dict"):
            return f"the callback {type(one).__qualname__} has attributes, and no load_state_dict to set them back"
    return ""
