"""Shrinks a failing program to a few steps that still fail, and writes it as a script."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from phalanx.testing.fuzz.program import GroupPlan, Program, Step, as_source, describe
from phalanx.testing.fuzz.session import Outcome, Session

_SCRIPT = '''\
"""Found by `{command}`:

{fault}

Steps, in the order in which the ranks of each group make them:

{steps}

Run this file: it prints the fault and ends with 1, or with 0 if it does not happen here.
"""

import sys

from phalanx.testing.fuzz.program import GroupPlan, Program, Step
from phalanx.testing.fuzz.session import replay

PROGRAM = {program}

if __name__ == "__main__":
    sys.exit(replay(PROGRAM, "{against}"))
'''


class Shrinker:
    """Searches for the smallest program that still fails.

    Args:
        against: Reference for the results, a value of ``--against`` (see `command`).
        limit_s: Seconds that a program may take.
        budget_s: Seconds after which the search ends with the smallest program found so far.
    """

    def __init__(self, against: str, limit_s: float, budget_s: float) -> None:
        self._against, self._limit_s = against, limit_s
        self._end_s = time.monotonic() + budget_s
        self._session: Session | None = None
        self._num_tries = 1
        self.outcome = Outcome()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def reproduces(self, program: Program, num_tries: int) -> bool:
        """Whether a program fails on new ranks; also decides how often the search will try each smaller program."""
        num_failed = 0
        for number in range(num_tries):
            num_failed += self._fails_once(program, fresh=True)
            if number == 1 and num_failed == 2:
                break
        self._num_tries = 1 if num_failed > 1 else 4
        return num_failed > 0

    def _fails_once(self, program: Program, *, fresh: bool = False) -> bool:
        if self._session is not None and (fresh or not self._session.fits(program)):
            self._session.close()
            self._session = None
        if self._session is None:
            self._session = Session(program, self._against, self._limit_s)
        outcome = self._session.run(program)
        if outcome.fault:
            self.outcome = outcome
        return bool(outcome.fault)

    def _fails(self, program: Program) -> bool:
        return any(self._fails_once(program) for _ in range(self._num_tries) if time.monotonic() < self._end_s)

    def shrunk(self, program: Program) -> Program:
        """Return the smallest failing program that the search finds."""
        if (step := self.outcome.step) is not None:
            alone = program.with_steps(program.steps[step : step + 1])
            program = alone if self._fails(alone) else program
        program = self._fewer_steps(program)
        program = self._first_that_fails(program, _smaller_places)
        program = self._fewer_steps(program)
        program = self._simpler_steps(program)
        self._fails(program)
        return program

    def _first_that_fails(self, program: Program, smaller: Callable[[Program], Iterator[Program]]) -> Program:
        """Replace the program by the first smaller program that fails, again and again; return the last program."""
        while True:
            found = next((one for one in smaller(program) if one != program and self._fails(one)), None)
            if found is None:
                return program
            program = found

    def _fewer_steps(self, program: Program) -> Program:
        """Leave out ranges of steps: half of the steps, then a quarter, and so on (Zeller and Hildebrandt 2002)."""
        size = len(program.steps)
        while size >= 1:
            at = 0
            while at < len(program.steps):
                rest = program.with_steps(program.steps[:at] + program.steps[at + size :])
                if rest.steps and len(rest.steps) < len(program.steps) and self._fails(rest):
                    program = rest
                else:
                    at += size
            size //= 2
        return program

    def _simpler_steps(self, program: Program) -> Program:
        for at in range(len(program.steps)):

            def changed(whole: Program, at: int = at) -> Iterator[Program]:
                for step in _simpler(whole.steps[at]):
                    yield whole.with_steps((*whole.steps[:at], step, *whole.steps[at + 1 :]))

            program = self._first_that_fails(program, changed)
        return program


def _smaller_places(program: Program) -> Iterator[Program]:
    used = sorted({step.group for step in program.steps})
    groups = tuple(program.groups[number] for number in used)
    steps = [replace(step, group=used.index(step.group)) for step in program.steps]
    yield replace(program, groups=groups, steps=tuple(steps))
    yield replace(program, environ={})
    yield replace(program, hosts=())
    yield replace(program, num_rounds=1)
    size = program.world_size - 1
    if size >= 1 and not program.hosts:
        fewer = [GroupPlan(tuple(r for r in plan.ranks if r < size), plan.how) for plan in program.groups]
        if all(plan.ranks for plan in fewer):
            cut = [replace(step, root=min(step.root, len(fewer[step.group].ranks) - 1)) for step in program.steps]
            yield replace(program, world_size=size, groups=tuple(fewer), steps=tuple(cut))


def _simpler(step: Step) -> Iterator[Step]:
    plain = Step(step.name, step.group, step.shape, seed=step.seed)
    for name in ("async_op", "lag", "in_place", "source_layout", "target_layout", "values", "root"):
        if getattr(step, name) != getattr(plain, name):
            yield replace(step, **{name: getattr(plain, name)})
    if len(step.shape) > 1:
        yield replace(step, shape=(step.shape[0] * step.shape[1],))
    if step.shape[0] > 1:
        yield replace(step, shape=(step.shape[0] // 2, *step.shape[1:]))
        yield replace(step, shape=(step.shape[0] - 1, *step.shape[1:]))
    if step.dtype != "float32":
        yield replace(step, dtype="float32")
    if step.reduce_op != "SUM":
        yield replace(step, reduce_op="SUM", factor=None)


def write_script(program: Program, fault: str, command: str, against: str, folder: str, name: str) -> str:
    """Write a script that runs a program, and return its path."""
    path = os.path.join(folder, f"{name}.py")
    indented = "\n".join(f"    {line}" for line in fault.splitlines()[:40]).replace("\\", "\\\\").replace('"""', "'''")
    steps = "\n".join(f"{number:>5}. {line}" for number, line in enumerate(describe(program)))
    text = _SCRIPT.format(command=command, fault=indented, steps=steps, program=as_source(program), against=against)
    with open(path, "w") as file:
        file.write(text)
    return path


def shrink(
    candidates: Sequence[Program], outcome: Outcome, against: str, limit_s: float, budget_s: float
) -> tuple[Program, Outcome]:
    """Shrink the first candidate that fails again; return the smaller program and its outcome.

    If no candidate fails again, return the last candidate and `outcome`.
    """
    with contextlib.closing(Shrinker(against, limit_s, budget_s)) as shrinker:
        for candidate in candidates:
            if shrinker.reproduces(candidate, 4):
                return shrinker.shrunk(candidate), shrinker.outcome
    return candidates[-1], outcome
