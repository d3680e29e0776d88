"""Takes a trainer's snapshots in memory, as often as 3 % of the training time allows.

At first the trainer takes a snapshot after every step. Then all ranks choose the interval that costs 3 % of the time,
from the duration of snapshots on the slowest rank and of steps on the fastest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from phalanx import checkpoint
from phalanx.checkpoint.memory.snapshots import memory

_SHARE = 0.03  # fraction of the training time for snapshots


class Snapshots:
    """Takes snapshots of the state: every `every` steps, as often as `_SHARE` allows ("auto"), or never (0).

    Every rank has this object, and `may_keep` must return the same on every rank.
    """

    def __init__(
        self,
        folder: str,
        every: int | Literal["auto"],
        state: Callable[[], Mapping[str, Any]],
        may_keep: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._adapts = every == "auto"
        self._state = state
        self._may_keep = may_keep
        memory().agree()
        self.every: int = 1 if every == "auto" else every
        self._num_taken = self._num_steps = 0  # snapshots and steps since `adapt` was last called
        self._num_adapted = 0

    def after_step(self, step: int) -> None:
        """Take a snapshot if one is due."""
        self._num_steps += 1
        if memory().problem:
            memory().let_go()
        elif self.every and (step % self.every == 0 or memory().is_urgent):
            self._num_taken += self.take(step)

    def take(self, step: int) -> bool:
        """Take a snapshot now and return True; return False if the state is not finite."""
        may_keep = self._may_keep()
        if may_keep:
            checkpoint.snapshot(self._folder, self._state(), step)
        return may_keep

    def adapt(self, phases_by_rank: list[list[float]]) -> str:
        """Choose the interval between snapshots, the same on every rank; return a line on their cost, once known.

        Args:
            phases_by_rank: Mean seconds of a step in each phase since the last call, by rank; the last phase is
                snapshots.
        """
        num_taken, num_steps = self._num_taken, self._num_steps
        self._num_taken = self._num_steps = 0
        if not num_taken or memory().problem:
            return f"no snapshots in memory: {memory().problem}" if num_taken else ""
        cost_s = max(phases[-1] for phases in phases_by_rank) * num_steps / num_taken
        step_s = min(sum(phases[:-1]) for phases in phases_by_rank)
        if self._adapts:
            self.every = max(1, math.ceil(cost_s / (_SHARE * step_s)))
        self._num_adapted += 1
        if self._num_adapted != 2:  # not at the first call: the first snapshots also allocated memory
            return ""
        share, size_mib = cost_s / self.every / step_s, memory().size_bytes / 2**20
        every = "after each step" if self.every == 1 else f"every {self.every} steps"
        replicas = memory().replicas()
        return (
            f"snapshots in memory {every}: {share:.1%} of the time, {size_mib:.1f} MiB a rank"
            f"{replicas and f'; {replicas}'}"
        )
