"""A session of the fuzzer: ranks that run one program after another, and the outcome of each program."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace

from phalanx.failure.ending import RankError
from phalanx.testing.fuzz import rank
from phalanx.testing.fuzz.mpi import MpiRanks
from phalanx.testing.fuzz.program import GroupPlan, Program
from phalanx.testing.kept import KeptRanks

_START_S = 120.0  # time for a group to form on a busy machine


@dataclass
class Outcome:
    """The outcome of a program.

    Attributes:
        fault: Description of the first fault; empty if there is none.
        step: Index of the step with the fault; None if the ranks ended without naming a step.
        judged: Number of judged calls, summed over the ranks; key: the backend or method that judged them.
        of_judge: Descriptions of wrong results of the reference backend.
    """

    fault: str = ""
    step: int | None = None
    judged: Counter[str] = field(default_factory=Counter)
    of_judge: list[str] = field(default_factory=list)


class Session:
    """Ranks that run programs one after another. They end after a program in which a rank raises, dies or hangs.

    Args:
        place: Program with the number of ranks, hosts and settings that all programs of this session must have.
        against: Reference for the results, a value of ``--against`` (see `command`).
        limit_s: Seconds that a program may take; the groups' timeout is half of that.
    """

    def __init__(self, place: Program, against: str, limit_s: float) -> None:
        self.place, self._against, self._limit_s = place, against, limit_s
        self._stack = contextlib.ExitStack()
        self.has_ended = False
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-fuzz-"))
        self._ranks = KeptRanks(place.world_size, place.hosts, place.environ)
        self._stack.callback(self._ranks.close)
        try:
            init_method = f"file://{folder}/rendezvous"
            self._mpi = MpiRanks(place.world_size) if against == "mpi" else None
            if self._mpi is not None:
                self._stack.callback(self._mpi.close)
            self._ranks.call(rank.start, init_method, place.world_size, limit_s / 2, timeout_s=_START_S)
        except BaseException:
            self.close()
            raise

    def fits(self, program: Program) -> bool:
        """Whether a program can run on these ranks."""
        own = self.place.world_size, self.place.hosts, self.place.environ
        return not self.has_ended and own == (program.world_size, program.hosts, program.environ)

    def run(self, program: Program) -> Outcome:
        """Run a program on phalanx, judge its results and return the outcome."""
        try:
            self._ranks.call(rank.perform, program, timeout_s=self._limit_s)
        except RankError as error:
            return self._ended(str(error))
        try:
            if self._mpi is not None:
                self._mpi.run(program, 2 * self._limit_s)
            folder = "" if self._mpi is None else self._mpi.folder
            verdicts = self._ranks.call(rank.judge, program, self._against, folder, timeout_s=2 * self._limit_s)
        except (RankError, RuntimeError) as error:
            return self._ended(f"while the results were compared with those of {self._against}: {error}")
        outcome = Outcome()
        for number, verdict in enumerate(verdicts):
            outcome.judged.update(verdict.judged)
            outcome.of_judge += verdict.of_judge
            for step, words in verdict.faults:
                if outcome.step is None or step < outcome.step:
                    outcome.step, outcome.fault = step, f"rank {number}: {words}"
        digests = [verdict.digests for verdict in verdicts]
        for step in range(len(program.steps)):
            if len({one[step] for one in digests if step in one}) > 1 and not outcome.fault:
                outcome.step, outcome.fault = step, "the ranks have different bits"
        return outcome

    def _ended(self, words: str) -> Outcome:
        self.has_ended = True
        step = re.search(r"StepFailed: step (\d+) ", words)
        return Outcome(words, int(step[1]) if step else None)

    def close(self) -> None:
        """End the ranks."""
        self.has_ended = True
        self._stack.close()


def joined(programs: list[Program]) -> Program:
    """Return one program with the steps of all given programs, which must have the same ranks and settings."""
    groups: list[GroupPlan] = []
    steps = []
    for program in programs:
        for plan in program.groups:
            if plan not in groups:
                groups.append(plan)
        steps += [replace(step, group=groups.index(program.groups[step.group])) for step in program.steps]
    return replace(programs[-1], groups=tuple(groups), steps=tuple(steps))


def replay(program: Program, against: str, limit_s: float = 20.0, num_times: int = 20) -> int:
    """Run a program up to `num_times` times, until it fails; print the fault, and return the exit code."""
    for _ in range(num_times):
        with contextlib.closing(Session(program, against, limit_s)) as session:
            outcome = session.run(program)
        if outcome.fault:
            where = "" if outcome.step is None else f"step {outcome.step}, {program.steps[outcome.step]}: "
            print(f"{where}{outcome.fault}")
            return 1
    print(f"no fault in {num_times} runs", file=sys.stderr)
    return 0
