"""`RunSaver`: saves a trainer's checkpoints on disk, if its weights are finite.

**Fewer saves if memory is safe.** If each host's part of the state is in the memory of at least two hosts, a checkpoint
on disk is needed only if all hosts with the same part are lost at once. So in this case, unless the user has set an
interval, the state at the end of an epoch is saved only if the last checkpoint is at least 10 minutes old. Ranks agree
on whether to save, by one small all_reduce per epoch, because their clocks and hosts differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from phalanx import checkpoint
from phalanx._text import counted
from phalanx.checkpoint.memory.snapshots import memory
from phalanx.record.notes import note_checkpoints
from phalanx.train.evaluate.best_metric import BestMetric
from phalanx.train.report.run_log import RunLog
from phalanx.train.settings import Settings
from phalanx.wire.rank_group import RankGroup

LEAST_S = 600.0
"""Least time between checkpoints on disk at the ends of epochs, if other hosts hold the state in memory."""


class RunSaver:
    """Saves a trainer's state, with the evaluated value that `Settings.monitor` names.

    Every rank has a RunSaver, and `may_keep` must return the same on every rank.
    """

    def __init__(
        self,
        folder: str,
        settings: Settings,
        best: BestMetric,
        run_log: RunLog,
        state: Callable[[], Mapping[str, Any]],
        may_keep: Callable[[], bool],
        loaded: checkpoint.Loaded | None,
        ranks: RankGroup,
    ) -> None:
        note_checkpoints(folder)
        self._folder = folder
        self._settings = settings
        self._best_metric = best
        self._run_log = run_log
        self._state = state
        self._may_keep = may_keep
        self._ranks = ranks
        self._saved_s = -math.inf  # time at which this process last saved
        self._has_said_rare = False
        self._saved_step = None if loaded is None else loaded.step
        self._num_left_out = 0  # checkpoints left out since `say_left_out` was last called

    def is_due(self, step: int) -> bool:
        """Return whether to save at the end of an epoch; every rank must call this.

        False if the memory of two hosts holds the state and the last checkpoint is recent.
        """
        if not memory().spans_hosts:
            return True
        is_old = time.monotonic() - self._saved_s >= LEAST_S
        due, least = self._ranks.largest_of_each([is_old, -memory().num_hosts()])
        num_hosts = -least
        if due or num_hosts < 2:
            return True
        if not self._has_said_rare:
            self._has_said_rare = True
            self._run_log.record("rare_saves", step=step, least_s=LEAST_S, num_hosts=num_hosts)
            self._run_log.say(
                f"the memory of {num_hosts} hosts has the state: checkpoints go to disk every {LEAST_S / 60:g} minutes "
                "rather than after every epoch (save_every= sets another interval)"
            )
        return False

    def save(self, step: int, *, wait: bool = False) -> bool:
        """Save the state and return True; return False if the weights are not finite."""
        if not self._may_keep():
            self._num_left_out += 1
            return False
        begin, begin_s = time.perf_counter(), time.monotonic()
        keep: dict[str, Any] = {"keep_last": self._settings.keep_last}
        if self._best_metric.best is not None:
            keep |= {"keep_best": 1, "best_is_least": self._settings.mode == "min"}
        metric = self._best_metric.value_of(step)
        checkpoint.save(self._folder, self._state(), step, metric=metric, keep=keep, wait=wait)
        self._saved_step, self._saved_s = step, begin_s
        self._run_log.record("save", step=step, blocked_s=time.perf_counter() - begin)
        return True

    def say_left_out(self, step: int) -> None:
        """Tell the user how many checkpoints were left out since the last call, if any."""
        if self._num_left_out:
            newest = "there is none" if self._saved_step is None else f"the newest is that of step {self._saved_step}"
            self._run_log.say(
                f"{counted(self._num_left_out, 'checkpoint')} left out: weights or buffers are not finite after step "
                f"{step}; {newest}"
            )
            self._num_left_out = 0
