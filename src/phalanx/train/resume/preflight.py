"""Checks, before the first step, for problems that would end a run later: too short a schedule, an unwritable folder.

`preflight` returns the number of steps that the run can have, and checks that every schedule, alone or inside a
SequentialLR or ChainedScheduler, reaches the end of the run. `refuse_unwritable` checks that every rank can create a
checkpoint in the folder. Validation data is checked elsewhere, by `Evaluator.rehearse`.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from torch.optim import lr_scheduler

from phalanx._errors import CheckpointError
from phalanx._torch import MILESTONES_OF_SCHEDULER, PARTS_OF_SCHEDULER
from phalanx.train.feed.feed import Feed
from phalanx.train.settings import Settings
from phalanx.wire.rank_group import RankGroup

_BENT = {  # for each class, the attribute with the schedule's length, and what the learning rate does afterwards
    lr_scheduler.CosineAnnealingLR: ("T_max", "rises again"),
    lr_scheduler.PolynomialLR: ("total_iters", "stays 0"),
}


def preflight(scheduler: Any, s: Settings, feed: Feed, step: int, epoch: int) -> tuple[int, str]:
    """Return the largest number of optimizer steps that a run can have, and a warning about its schedule.

    Every rank must call this.

    Returns:
        The number, `sys.maxsize` if unknown; and the warning, "" if there is none.

    Raises:
        ValueError: The schedule, or a schedule within it, ends before the run.
    """
    per_epoch, of_this_epoch = feed.num_steps, feed.num_left
    num_epochs = max(0, s.max_epochs - epoch) if s.max_epochs else sys.maxsize
    # Only the remaining steps are computed, because a different number of ranks may have taken the earlier ones.
    num_left = s.max_steps - step if s.max_steps else sys.maxsize
    if not num_epochs:
        num_left = 0
    elif num_epochs < sys.maxsize and per_epoch and of_this_epoch is not None:
        num_left = min(num_left, of_this_epoch + (num_epochs - 1) * per_epoch)
    num_steps = num_left if num_left == sys.maxsize else step + num_left
    left = num_left
    if s.scheduler_interval == "epoch":
        if per_epoch and of_this_epoch is not None and num_left < sys.maxsize:
            num_epochs = min(num_epochs, (num_left - of_this_epoch) // per_epoch + 1)
        left = num_epochs
    return num_steps, _about_schedule(scheduler, left, s.scheduler_interval)


def length_of_schedule(s: Settings, feed: Feed, step: int, epoch: int) -> int:
    """Return how often a schedule is stepped in the whole run, the same on every rank; every rank must call this.

    Raises:
        ValueError: The data has no length, and `max_steps` is not set.
    """
    length, _ = preflight(None, s, feed, step, epoch)
    if s.scheduler_interval == "epoch":
        per_epoch = feed.num_steps
        by_steps = max(1, length // per_epoch) if s.max_steps and per_epoch else sys.maxsize
        length = min(s.max_epochs or sys.maxsize, by_steps)
    if length == sys.maxsize:
        raise ValueError(
            "Trainer.fit: scheduler is a function of the number of steps, which nobody knows: the data has no length. "
            "Set max_steps, or pass a schedule"
        )
    return length


def _about_schedule(scheduler: Any, num_steps: int, interval: str) -> str:
    """Return a warning about a schedule that will be stepped `num_steps` more times (`sys.maxsize`: unknown)."""
    if num_steps == sys.maxsize:
        return ""
    other = "" if interval == "epoch" else ', or step it once an epoch with scheduler_interval="epoch"'
    for schedule, total in _parts_of(scheduler, _num_done(scheduler) + num_steps):
        name = type(schedule).__name__
        if isinstance(schedule, lr_scheduler.OneCycleLR) and schedule.total_steps < total:
            raise ValueError(
                f"Trainer.fit: the schedule {name} ends after {schedule.total_steps} steps, and this run steps it "
                f"{total} times, once each {interval}: make it longer, "
                f"{name}(optimizer, ..., total_steps={total}){other}"
            )
        for kind, (length, what) in _BENT.items() if interval == "step" else ():
            if isinstance(schedule, kind) and (end := getattr(schedule, length)) < total:
                return (
                    f"warning: the learning rate of {name}({length}={end}) {what} after {end} of {total} steps: count "
                    f"in steps, {length}={total}{other}"
                )
    return ""


def _num_done(scheduler: Any) -> int:
    """Return how often a schedule was stepped; a ChainedScheduler keeps no count, but the schedules in it do."""
    parts = getattr(scheduler, PARTS_OF_SCHEDULER, ())
    return getattr(scheduler, "last_epoch", _num_done(parts[0]) if parts else 0)


def _parts_of(scheduler: Any, total: int) -> Iterator[tuple[Any, int]]:
    """Yield the schedules within a schedule that is stepped `total` times, each with its own number of steps.

    The parts of a SequentialLR take turns, and each counts from 0 when its turn begins.
    """
    parts = getattr(scheduler, PARTS_OF_SCHEDULER, ())
    if not parts:
        yield scheduler, total
    elif isinstance(scheduler, lr_scheduler.SequentialLR):
        turns = getattr(scheduler, MILESTONES_OF_SCHEDULER, None)
        bounds = [] if turns is None else itertools.pairwise([0, *turns, sys.maxsize])
        for part, (begin, end) in zip(parts, bounds, strict=False):
            if begin <= total:
                yield from _parts_of(part, min(total, end - 1) - begin)
    else:
        for part in parts:
            yield from _parts_of(part, total)


def refuse_unwritable(folder: str, ranks: RankGroup) -> None:
    """Refuse a folder in which any rank can't create a checkpoint; every rank must call this.

    Raises:
        CheckpointError: A rank can't create a checkpoint; every rank raises the same error.
    """
    problem = ""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tried-", dir=folder):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    problems = {rank: told for rank, told in enumerate(ranks.gather(problem)) if told}
    if problems:
        rank, told = next(iter(problems.items()))
        raise CheckpointError(
            f"rank {rank}: Trainer.fit: no checkpoint can be saved in {os.path.abspath(folder)}: {told}. Make the "
            "folder writable, or give the run another one (folder=... or PHALANX_RUN_FOLDER)",
            op="save",
            ranks=tuple(problems),
            entry="checkpoint-not-saved",
        )
