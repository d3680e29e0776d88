"""The best evaluation so far.

Nothing here guesses which of two evaluations is better. ``mode`` says whether a lower value of ``monitor`` is better.
If ``mode`` is None, a word in the name of the metric decides, such as loss or accuracy. A name that leaves a doubt is
refused when the Trainer is made, because a wrong guess would keep the worst checkpoint and stop a run that improves.
The best metric, retention, the report and ReduceLROnPlateau all use this one setting, and each checkpoint with a metric
stores this setting for ``load(step="best")``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx._text import counted


class BestMetric:
    """Compares evaluations by one of their values; part of a trainer's state.

    Args:
        monitor: Name of the value.
        mode: Whether the lowest or the highest value is the best: "min" or "max".
        min_delta: Improvement that an evaluation must exceed to reset `num_worse`.

    Attributes:
        best: Score of the best evaluation, higher is better; None: no evaluation so far.
        best_step: Step of the best evaluation.
        num_worse: Number of evaluations since the last improvement by more than `min_delta`.
    """

    def __init__(self, monitor: str, mode: str | None, min_delta: float = 0.0) -> None:
        self._monitor, self._min_delta = monitor, min_delta
        self._sign = -1 if mode == "min" else 1
        self.best: float | None = None
        self.best_step: int | None = None
        self.num_worse: int = 0
        self._goal: float | None = None  # score to exceed by `min_delta`; smaller improvements leave it as it is
        self._score: float | None = None  # score of the last evaluation, made after step `_step`
        self._step = -1

    def update(self, evaluation: Mapping[str, float], step: int) -> bool:
        """Record the evaluation after `step`; return whether it is the best so far, which NaN and infinity never are.

        Raises:
            ValueError: The evaluation lacks the monitored value.
        """
        value = evaluation.get(self._monitor)
        if value is None:
            known = ", ".join(evaluation)
            raise ValueError(f"Trainer: monitor={self._monitor!r} is not a value of the evaluation: {known}")
        score = self._sign * value
        self._score, self._step = score if math.isfinite(score) else None, step
        is_best = math.isfinite(score) and (self.best is None or score > self.best)
        self.best, self.best_step = (score, step) if is_best else (self.best, self.best_step)
        is_better = math.isfinite(score) and (self._goal is None or score > self._goal + self._min_delta)
        self._goal, self.num_worse = (score, 0) if is_better else (self._goal, self.num_worse + 1)
        return is_best

    def value_of(self, step: int) -> float | None:
        """Return the monitored value of the evaluation after `step`, if the value is finite; otherwise None."""
        if step != self._step or self._score is None:
            return None
        return self._sign * self._score

    @property
    def wanted(self) -> str:
        """Description of the best value, such as ``the lowest loss``."""
        return f"the {self._which} {self._monitor}"

    def why_stopped(self) -> str:
        """Return a sentence that says for how long no evaluation has improved, and which evaluation was best."""
        by = f" by more than {self._min_delta:g}" if self._min_delta else ""
        words = f"{self._monitor} has not improved{by} for {counted(self.num_worse, 'epoch')}"
        if self.best is None:
            return f"{words}; it was never finite"
        at = "" if self.best_step is None else f" at step {self.best_step}"
        return f"{words}; best ({self._which}) {self._sign * self.best:.4g}{at}"

    @property
    def _which(self) -> str:
        return "lowest" if self._sign < 0 else "highest"

    def state_dict(self) -> dict[str, Any]:
        numbers = {"best": self.best, "num_worse": self.num_worse, "score": self._score, "step": self._step}
        return {**numbers, "goal": self._goal, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_worse, self._score, self._step = (
            state[name] for name in ("best", "num_worse", "score", "step")
        )
        self._goal = state.get("goal", self.best)  # earlier versions did not save the goal
        self.best_step = state.get("best_step")
