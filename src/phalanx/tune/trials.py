"""The jobs of ``phalanx tune``: each runs the user's script under ``phalanx run``, and steps on request.

The script is started once for each combination of settings that a running process can't change (ranks, memory, settings
of a Trainer), and these jobs stay alive side by side. A hook on the optimizer's step holds each job until the job is
asked to step. So jobs take turns of 0.3 s, other load on the machine slows all of them alike, and each job imports the
script only once. The number of threads and the optimizer's fused form change from turn to turn within a job. A Trainer
in a trial has no end, saves nothing and follows no schedule; any other script is started again when it has ended. When
the tuner ends, the kernel kills the supervisors of its jobs (PDEATHSIG), and their reapers then end the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from phalanx.launch import rank_trial
from phalanx.tune.trial_job import Ended, TrialJob
from phalanx.wire.files import write_whole
from phalanx.wire.waiting import wait_until

_Answer = TypeVar("_Answer")

_PAUSE_S = 0.002
_TURN_S = 0.3
_LEAST_STEPS = 3
_SETTLING_STEPS, _MOST_SETTLING_S = 20, 3.0  # steps in which a Trainer chooses how to step; skipped if too slow
_LEAST_PATIENCE_S, _SHARE_OF_PATIENCE = 10.0, 0.25  # a turn's limit: so many seconds or, if longer, so much of the rest
_LEAST_START_S, _STARTS = 30.0, 4  # a start's limit: so many seconds or, if longer, this many times the longest start
_SKIPPED = 0.25  # unmeasured steps at the start of a turn, as a fraction of the measured steps
_OUTLIERS = 0.1  # fraction of the steps that do not count: the slowest ones, such as those after an evaluation
_MOST_RESTARTS = 20
_LATE = "has not taken its steps in time; --seconds gives it more"


class Failed(Exception):
    """A job can't be measured.

    Attributes:
        printed: End of the job's output.
        code: Exit code of the job.
    """

    def __init__(self, message: str, printed: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.printed, self.code = printed, code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        ranks: Number of ranks.
        threads: Number of threads of each rank.
        memory: Value of ``--memory``.
        fused: Whether the optimizer steps in its fused form.
        changes: Settings of the Trainer or the loaders that differ from the script's, as pairs of name and value.
    """

    ranks: int
    threads: int
    memory: str = "auto"
    fused: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def job(self) -> tuple[int, str, tuple[tuple[str, Any], ...]]:
        """The part of the setup that can't change in a running job."""
        return self.ranks, self.memory, self.changes


class Trial:
    """A job that tries one setup: it trains during its own turns, and waits during the other trials' turns.

    Args:
        setup: Way to train; each turn sets the threads and the optimizer's form anew.
        words: Flags, script and arguments for ``phalanx run``.
        folder: Folder for the job's output.
        deadline: Time on the monotonic clock at which the search ends.

    Attributes:
        facts: Facts that rank 0 has reported about the script; empty until all ranks have answered.
        start_s: Seconds until the ranks had taken their first steps.
    """

    def __init__(self, setup: Setup, words: Sequence[str], folder: str, deadline: float) -> None:
        self._setup, self._words, self._folder, self._deadline = setup, words, folder, deadline
        self._num_restarts = 0
        self._step_s: dict[int, float] = {}  # duration of a step, by number of threads
        self._most_steps = 2000
        self.facts: Mapping[str, Any] = {}
        self.start_s = 0.0
        self._start()

    def _start(self) -> None:
        setup = self._setup
        self._serial, self._began_s = 0, time.monotonic()
        room = os.path.join(self._folder, f"start_{self._num_restarts}")
        flags = ("--nproc-per-node", str(setup.ranks), "--memory", setup.memory)
        self._job = TrialJob((*flags, *self._words), room, setup.ranks, rank_trial.variables(room, dict(setup.changes)))

    @property
    def printed(self) -> str:
        """End of the job's output."""
        return self._job.printed

    def has_met(self) -> bool:
        """Return whether every rank has taken its first steps; if so, read the job's facts.

        Raises:
            Failed: The job has ended, or can't be measured.
        """
        try:
            told = self._told(0)
        except Ended:
            raise Failed("ended before its optimizer had taken three steps", self.printed, self._job.code) from None
        if not told:
            return False
        self.start_s = time.monotonic() - self._began_s
        self.facts = told[0]
        if not self.facts["device"].startswith("cpu"):
            raise Failed(f"trains on {self.facts['device']}, and phalanx tune measures training on a CPU")
        if self._setup.ranks > 1 and not self.facts["has_group"]:
            raise Failed("makes no process group, so each rank would train on its own")
        return True

    def rate(self, setup: Setup, *, counts_samples: bool) -> float:
        """Measure the speed of all ranks together, in samples or steps per second.

        Before the first turn with a new number of threads, short turns measure how long a step takes, and let a Trainer
        choose how to step.

        Raises:
            Failed: The script has failed, or has ended too early too many times.
        """
        if setup.threads not in self._step_s:
            has_settled = bool(self._step_s)
            self._take(setup, _LEAST_STEPS)
            if not has_settled and self._step_s[setup.threads] * _SETTLING_STEPS < _MOST_SETTLING_S:
                self._take(setup, _SETTLING_STEPS)
        step_s = self._step_s[setup.threads]
        told = self._take(setup, round(_TURN_S / step_s))
        return sum(_rate(rank["steps"], self.facts["samples"] if counts_samples else 0) for rank in told)

    @property
    def loading_share(self) -> float:
        """Share of the last turn that rank 0 spent on loading."""
        return self._loading_share

    def _take(self, setup: Setup, steps: int) -> list[Any]:
        while True:
            self._serial += 1
            steps = max(_LEAST_STEPS, min(steps, self._most_steps))
            skip = max(1, round(steps * _SKIPPED))  # not measured: caches are cold, and workers have loaded ahead
            turn = rank_trial.Turn(
                serial=self._serial, steps=steps, skip=skip, threads=setup.threads, fused=setup.fused
            )
            write_whole(rank_trial.asked_file(self._job.room), json.dumps(dataclasses.asdict(turn)))
            try:
                told = self._await(lambda: self._told(self._serial))
                break
            except Ended:
                self._most_steps = min(self._most_steps, max(_LEAST_STEPS, steps // 2))
                self._begin_again()
        every = told[0]["steps"]
        seconds = sum(step[0] for step in every)
        self._loading_share = sum(step[2] for step in every) / seconds
        self._step_s[setup.threads] = max(seconds / len(every), 1e-6)
        return told

    def _begin_again(self) -> None:
        """Restart a script whose training is over."""
        code = self._job.code
        if code:
            raise Failed(f"has ended with code {code}", self.printed, code)
        self._num_restarts += 1
        if self._num_restarts > _MOST_RESTARTS:
            raise Failed("is over too soon to be measured: let it train for longer", self.printed)
        self._start()
        self._await(self.has_met, _STARTS * self.start_s)

    def _await(self, ask: Callable[[], _Answer], least_s: float = _LEAST_PATIENCE_S) -> _Answer:
        """Return the first non-empty answer; a job that hangs can use up only a share of the time left.

        Raises:
            Failed: There was no answer within `least_s` or that share of the time left, whichever is longer.
        """
        now_s = time.monotonic()
        until_s = now_s + max(least_s, (self._deadline - now_s) * _SHARE_OF_PATIENCE)
        answer = wait_until(lambda: ask() or None, until_s, least_s=_PAUSE_S, most_s=_PAUSE_S)
        if answer is None:
            raise self.late()
        return answer

    def late(self) -> Failed:
        """Return the failure of a job that takes too long."""
        return Failed(_LATE, self.printed)

    def _told(self, serial: int) -> list[Any]:
        """Return the ranks' answers for a turn, in rank order; an empty list until all have answered.

        Raises:
            Ended: The job ended before all ranks had answered.
            Failed: A rank trains in several processes.
        """
        if problem := self._job.multiprocess:
            raise Failed(problem, self.printed)
        return self._job.told(serial)

    def ask_to_end(self) -> None:
        """Ask the job to end; `end` waits until it has ended."""
        self._job.ask_to_end()

    def end(self) -> None:
        """End the job, and wait until it has ended."""
        self._job.end()


def _rate(steps: Sequence[tuple[float, int, float]], usual_samples: float) -> float:
    """Return the speed of a rank's steps, in samples a second, or in steps if `usual_samples` is 0."""
    kept = sorted(steps)[: max(1, round(len(steps) * (1 - _OUTLIERS)))]
    loaded = sum(step[1] for step in kept)
    # A script that no longer loads anything trains on batches that it has kept, each with the usual number of samples.
    done = (loaded or usual_samples * len(kept)) if usual_samples else len(kept)
    return done / sum(step[0] for step in kept)


class Trials:
    """All jobs of a search, which live side by side until the context ends.

    Args:
        words: Flags, script and arguments for ``phalanx run``.
        folder: Folder for the jobs' output.
        deadline: Time on the monotonic clock at which the search ends.

    Attributes:
        start_s: Longest time that a job has taken to start, in seconds; 0: no job has started yet.
    """

    def __init__(self, words: Sequence[str], folder: str, deadline: float) -> None:
        self._words, self._folder, self._deadline = words, folder, deadline
        self._trials: dict[Any, Trial] = {}
        self._failures: dict[Any, Failed] = {}
        self.start_s = 0.0

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for trial in self._trials.values():
            trial.ask_to_end()  # ask all jobs before the first wait, so that they end side by side
        for trial in self._trials.values():
            trial.end()

    def start(self, setups: Sequence[Setup], limit_s: float, more_s: float = 0.0) -> dict[Setup, Failed]:
        """Start the jobs that these setups need, side by side; return the setups that can't be measured.

        Args:
            setups: Setups to measure.
            limit_s: Limit for the first start; later starts are limited by the longest start so far.
            more_s: Additional seconds that these starts may take.
        """
        begin_s = time.monotonic()
        jobs = {setup.job: setup for setup in setups if setup.job not in self._failures}
        new = [job for job in jobs if job not in self._trials]
        for job in new:
            folder = os.path.join(self._folder, str(len(self._trials) + len(self._failures)))
            self._trials[job] = Trial(jobs[job], self._words, folder, self._deadline)
        while new:
            taken_s = time.monotonic() - begin_s
            if self.start_s:
                limit_s = min(limit_s, max(_LEAST_START_S, _STARTS * self.start_s) + more_s)
            for job in [*new]:
                try:
                    if self._trials[job].has_met():
                        new.remove(job)
                        self.start_s = max(self.start_s, self._trials[job].start_s)
                    elif taken_s > limit_s:
                        raise self._trials[job].late()
                except Failed as failure:
                    new.remove(job)
                    self._drop(jobs[job], failure)
            time.sleep(_PAUSE_S)
        return {setup: self._failures[setup.job] for setup in setups if setup.job in self._failures}

    @property
    def counts_samples(self) -> bool:
        """Whether every job loads samples for each step, so that speeds can count samples."""
        return all(trial.facts["samples"] for trial in self._trials.values())

    def rate(self, setup: Setup) -> float | None:
        """Measure a setup's speed once; return None if its job has failed."""
        if setup.job in self._trials:
            try:
                return self.of(setup).rate(setup, counts_samples=self.counts_samples)
            except Failed as failure:
                self._drop(setup, failure)
        return None

    def failure_of(self, setup: Setup) -> Failed:
        """Return why a setup could not be measured."""
        return self._failures[setup.job]

    def _drop(self, setup: Setup, failure: Failed) -> None:
        self._failures[setup.job] = failure
        self._trials.pop(setup.job).end()

    def of(self, setup: Setup) -> Trial:
        """Return the job in which a setup is measured."""
        return self._trials[setup.job]
