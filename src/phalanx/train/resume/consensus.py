"""How ranks agree, every few steps, on what any rank has noticed: a signal, a stop, a bad value, or differing copies.

The ranks agree right after gradients have been averaged, when they have just waited for each other. One all_reduce of a
few numbers tells every rank whether any rank was asked to end. All ranks then act on this after the same step. The
all_reduce costs some 0.1 ms. So if steps take less than 0.1 s, the ranks agree only about every 0.1 s, and at the end
of every epoch.
"""

from __future__ import annotations

from phalanx._errors import ReplicaMismatch
from phalanx.parallel.divergence.sentinel import LEAST_OF_A_CYCLE, Sentinel
from phalanx.train.report.run_log import RunLog
from phalanx.train.resume.preemption import Preemption
from phalanx.train.step.finite import FiniteGuard
from phalanx.wire.rank_group import RankGroup

_AGREE_S = 0.1  # time between two agreements; if steps take longer, ranks agree in each step
_NOT_FINITE = 1 << 10  # larger than any signal's number, so that it takes precedence in the maximum


class Consensus:
    """Agreements of all ranks while they train: all act on the result after the same step.

    Args:
        compare_every: `Settings.compare_every`.

    Attributes:
        signal: Number of the signal on which every rank acts before its next step; 0: none.
        wants_stop: Whether somebody has asked this rank to end the training.
        stops: Whether all ranks end the training before their next step.
    """

    def __init__(
        self,
        ranks: RankGroup,
        preemption: Preemption,
        guard: FiniteGuard,
        sentinel: Sentinel,
        run_log: RunLog,
        compare_every: int | str,
    ) -> None:
        self._ranks, self._preemption, self._guard = ranks, preemption, guard
        self._sentinel, self._run_log, self._compare_every = sentinel, run_log, compare_every
        self.signal: int = 0
        self.wants_stop: bool = False
        self.stops: bool = False
        self._every, self._next = 1, 0  # steps between two agreements, and the step of the next one

    def is_due(self, step: int) -> bool:
        """Return whether the ranks are due to agree after `step` steps; the same on all ranks."""
        return step >= self._next

    def agree(self, step: int) -> None:
        """Agree with all ranks on what any rank has noticed.

        Raises:
            NonFinite: A value is not finite on some rank.
            ReplicaMismatch: The ranks' copies of the model differ.
        """
        self._next = step + self._every
        urgent = _NOT_FINITE if self._guard.has_finding else self._preemption.signal
        agreed, stops, *largest = self._ranks.largest_of_each([urgent, self.wants_stop, *self._sentinel.look(step)])
        self.stops = bool(stops)
        if agreed == _NOT_FINITE:
            self._guard.settle()
        else:
            self.signal = agreed
        try:
            self._sentinel.hear(largest)
        except ReplicaMismatch as error:
            facts = {"step": error.step, "ranks": error.ranks, "tensors": error.tensors}
            self._run_log.record("replicas_differ", **facts, message=str(error))
            raise

    def agree_to_stop(self) -> None:
        """Agree only on whether to end the training; every rank must call this after the same step."""
        self.stops = bool(self._ranks.largest(self.wants_stop))

    def adapt(self, step: int, fastest_s: float) -> None:
        """Choose how often to agree, given the fastest rank's time for a step; the same on every rank."""
        self._sentinel.adapt(step, fastest_s)
        self._every = max(1, int(_AGREE_S / fastest_s))
        if isinstance(self._compare_every, int) and self._compare_every:
            self._every = min(self._every, max(1, self._compare_every // LEAST_OF_A_CYCLE))
        self._next = min(self._next, step + self._every)
