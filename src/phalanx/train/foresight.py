"""What would end a run later and can be known before its first step: a schedule that is too short, a closed folder."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from torch.optim import lr_scheduler

from phalanx._errors import CheckpointError
from phalanx._rank_group import RankGroup
from phalanx.train.settings import Settings


def num_schedule_steps(s: Settings, step: int, epoch: int, num_steps: int, steps_per_epoch: int | None) -> int:
    """Return how often the schedule will be stepped at most, from this step and epoch on; `sys.maxsize` if unknown.

    Args:
        num_steps: Optimizer steps of the whole run, or `sys.maxsize`.
    """
    if s.scheduler_interval == "step":
        return num_steps if num_steps == sys.maxsize else num_steps - step
    of_steps = num_steps // steps_per_epoch if steps_per_epoch else sys.maxsize
    return min(s.max_epochs or sys.maxsize, of_steps) - epoch


def check_schedule(scheduler: Any, num_steps: int, interval: str) -> str:
    """Return what to say about a schedule that is to be stepped `num_steps` times; empty if nothing.

    Raises:
        ValueError: It ends before.
    """
    if num_steps == sys.maxsize:
        return ""
    name, total = type(scheduler).__name__, getattr(scheduler, "last_epoch", 0) + num_steps
    other = "" if interval == "epoch" else ', or step it once an epoch with scheduler_interval="epoch"'
    if isinstance(scheduler, lr_scheduler.OneCycleLR) and scheduler.total_steps < total:
        raise ValueError(
            f"Trainer.fit: the schedule {name} ends after {scheduler.total_steps} steps, and this run steps it {total} "
            f"times, once each {interval}: make it longer, {name}(optimizer, ..., total_steps={total}){other}"
        )
    if interval == "step":
        for kind, length, what in (
            (lr_scheduler.CosineAnnealingLR, "T_max", "rises again"),
            (lr_scheduler.PolynomialLR, "total_iters", "stays 0"),
        ):
            if isinstance(scheduler, kind) and (end := getattr(scheduler, length)) < total:
                return (
                    f"warning: the learning rate of {name}({length}={end}) {what} after {end} of {total} steps: count "
                    f"in steps, {length}={total}{other}"
                )
    return ""


def refuse_unwritable(folder: str, ranks: RankGroup) -> None:
    """Refuse a folder of checkpoints in which some rank can make none; every rank calls it.

    Raises:
        CheckpointError: On every rank the same.
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
        )
