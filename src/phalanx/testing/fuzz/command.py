"""The command line: draws and runs programs until a fault is found or the time is up, then prints a summary."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence

from phalanx._command_line import Parser, UsageError, exit_code_of, whole_number
from phalanx._errors import require_linux
from phalanx._text import complain, is_terminal
from phalanx.testing.fuzz import mpi
from phalanx.testing.fuzz.program import Program, draw_place, draw_program
from phalanx.testing.fuzz.session import Outcome, Session, joined
from phalanx.testing.fuzz.shrink import shrink, write_script

JUDGES = ("gloo", "mpi", "arithmetic")
_PROGRAMS_OF_SESSION = 10  # after this many programs, new ranks start, with another number of ranks, hosts and settings
_MOST_RANKS = 64
_SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8)  # world sizes by default


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fuzzer; return 0 if nothing was found, 1 after a fault, 2 for a mistake in the command line."""
    return exit_code_of(lambda: _command(list(sys.argv[1:] if argv is None else argv)))


def _command(args: list[str]) -> int:
    parser = make_parser()
    try:
        given = parser.parse_args(args)
        _check(given)
    except UsageError as error:
        return parser.refuse(error, args)
    require_linux("the fuzzer", "run it on Linux")
    # functional collectives need this module; ranks are forked from a process that has already imported it
    importlib.import_module("torch._dynamo")
    try:
        return Fuzzer(given).run()
    except mpi.NoJudge as error:
        complain(f"{parser.prog}: {error}")
        return 2


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        "python -m phalanx.testing.fuzz",
        "python -m phalanx.testing.fuzz [flags]",
        "Run random programs of collectives and messages on phalanx, and compare every result with that of another "
        "backend. A program that fails is cut down and written as a script.",
    )
    add = parser.add_argument
    add("--against", choices=JUDGES, default="gloo", help="reference for results; arithmetic where it has none")
    add("--seconds", type=_seconds, default=60.0, help="time to look for a fault (default 60)")
    add("--programs", type=whole_number, default=0, help="number of programs to run instead")
    add(
        "--ranks",
        type=_sizes,
        default=_SIZES,
        help="number of ranks, or several to choose from: 2,3,4 (default 1 to 8)",
    )
    add("--hosts", type=whole_number, default=None, help="number of simulated hosts (default: one, at times some)")
    add("--seed", type=whole_number, default=None, help="seed of all that is drawn (default: another each time)")
    add("--steps", type=whole_number, default=24, help="number of calls in a program (default 24)")
    add("--limit", type=_seconds, default=20.0, help="seconds after which a program counts as hung (default 20)")
    add("--shrink", type=_seconds, default=60.0, help="seconds to cut a failing program down; 0: leave it")
    add("--out", default=".", help="folder for the script of a failing program (default: this one)")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e7:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(one) if one.isdecimal() else 0 for one in text.split(","))
    if not all(1 <= size <= _MOST_RANKS for size in sizes):
        raise argparse.ArgumentTypeError(
            f"must be whole numbers from 1 to {_MOST_RANKS}, such as 4 or 2,3; got {text!r}"
        )
    return sizes


def _check(given: argparse.Namespace) -> None:
    if given.hosts is not None and not 1 <= given.hosts <= min(given.ranks):
        raise UsageError(
            f"--hosts must lie in [1, {min(given.ranks)}], the smallest number of ranks, got {given.hosts}"
        )
    if given.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {given.steps}")
    if given.against == "mpi" and (missing := mpi.why_not()):
        raise UsageError(f"--against mpi: {missing}")
    if given.limit <= 0:
        raise UsageError("--limit must be more than 0")


class Fuzzer:
    """Runs programs one after another, and counts programs, calls and results.

    Args:
        given: Arguments of the command.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
        self._began_s = 0.0  # set when the first ranks have started
        self._num_programs = 0
        self._calls: Counter[str] = Counter()
        self._judged: Counter[str] = Counter()
        self._of_judge: list[str] = []

    def run(self) -> int:
        """Run until the time is up or a fault is found; return the exit code."""
        print(f"seed {self._seed}, against {self._given.against}", flush=True)
        number = 0
        while not self._is_over():
            if (code := self._session(number)) != 0:
                return code
            number += 1
        self._sum_up("no fault")
        return 0

    def _is_over(self) -> bool:
        if self._given.programs:
            return self._num_programs >= self._given.programs
        return self._began_s > 0 and time.monotonic() - self._began_s >= self._given.seconds

    def _session(self, number: int) -> int:
        """Start ranks and run several programs on them; return the exit code."""
        given = self._given
        place = draw_place(random.Random(f"{self._seed} {number}"), given.ranks, given.hosts)
        programs: list[Program] = []
        with contextlib.closing(Session(place, given.against, given.limit)) as session:
            self._began_s = self._began_s or time.monotonic()
            while len(programs) < _PROGRAMS_OF_SESSION and not self._is_over():
                draw = random.Random(f"{self._seed} {number} {len(programs)}")
                programs.append(draw_program(draw, place, given.steps))
                outcome = session.run(programs[-1])
                self._count(programs[-1], outcome)
                if outcome.fault:
                    break
            else:
                return 0
        return self._tell(programs, outcome)

    def _count(self, program: Program, outcome: Outcome) -> None:
        self._num_programs += 1
        for step in program.steps:
            self._calls[step.name] += program.num_rounds
        self._judged += outcome.judged
        self._of_judge += outcome.of_judge
        if is_terminal(sys.stdout):
            passed_s = time.monotonic() - self._began_s
            words = (
                f"{passed_s:.0f} s: {self._num_programs:,} programs, {self._calls.total():,} calls on {program.place}"
            )
            print(f"\r\033[K{words}", end="", flush=True)

    def _sum_up(self, found: str) -> None:
        if is_terminal(sys.stdout):
            print("\r\033[K", end="")
        passed_s = time.monotonic() - self._began_s
        print(f"{found}: {self._num_programs:,} programs with {self._calls.total():,} calls in {passed_s:.1f} s")
        print("calls: " + ", ".join(f"{name} {num:,}" for name, num in self._calls.most_common()))
        print("compared, on each rank: " + ", ".join(f"{num:,} with {by}" for by, num in self._judged.most_common()))
        if self._of_judge:
            print(f"arithmetic says that {self._given.against} was wrong {len(self._of_judge):,} times, such as:")
            print(f"  {self._of_judge[0]}")
        sys.stdout.flush()

    def _tell(self, programs: list[Program], outcome: Outcome) -> int:
        """Print a fault, shrink its program, and write the script."""
        given, program = self._given, programs[-1]
        self._sum_up(f"a fault after {time.monotonic() - self._began_s:.1f} s")
        print(f"program {self._num_programs - 1} of seed {self._seed}, {program.place}: {_words(program, outcome)}")
        if given.shrink > 0:
            print(f"cutting it down, for {given.shrink:g} s at most", flush=True)
            candidates = [program, joined(programs)]
            program, outcome = shrink(candidates, outcome, given.against, given.limit, given.shrink)
            print(f"{len(program.steps)} steps are left, {program.place}: {_words(program, outcome)}")
        name = f"phalanx_fuzz_{self._seed}_{self._num_programs - 1}"
        command = shlex.join(self._again())
        path = write_script(program, _words(program, outcome), command, given.against, given.out, name)
        print(f"script: {path}; run it: {shlex.join(['python', path])}")
        print(f"all again: {command}", flush=True)
        return 1

    def _again(self) -> list[str]:
        given = self._given
        words = ["python", "-m", "phalanx.testing.fuzz", "--seed", str(self._seed), "--against", given.against]
        words += ["--programs", str(self._num_programs), "--steps", str(given.steps)]
        if given.ranks != _SIZES:
            words += ["--ranks", ",".join(map(str, given.ranks))]
        if given.hosts is not None:
            words += ["--hosts", str(given.hosts)]
        return words


def _words(program: Program, outcome: Outcome) -> str:
    if outcome.step is None:
        return outcome.fault
    return f"step {outcome.step}, {program.steps[outcome.step]}: {outcome.fault}"
