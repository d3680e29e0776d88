"""The command ``phalanx``: finds the subcommand and runs it.

This module does not import torch; subcommands that need torch import it themselves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import phalanx
from phalanx._command_line import Parser, UsageError, exit_code_of, misspelled
from phalanx._env import nearest
from phalanx._errors import PhalanxError, require_linux
from phalanx._text import complain


class _Command(NamedTuple):
    """A subcommand: its usual call, its description, the module whose `main` runs it, and whether it needs Linux."""

    usage: str
    about: str
    module: str
    needs_linux: bool = True


_COMMANDS = {
    "run": _Command(
        "phalanx run --nproc-per-node 2 train.py [args]",
        "start a script on several ranks, with torchrun's flags",
        "launch.command.main",
    ),
    "tune": _Command(
        "phalanx tune train.py [args]",
        "measure which settings make a script the fastest on this machine",
        "tune.tune",
    ),
    "check": _Command(
        "phalanx check --nproc 8 train.py [args]",
        "try a script's first steps: do all ranks make the same calls?",
        "diagnose.check.check",
    ),
    "doctor": _Command(
        "phalanx doctor [flags]", "check that this machine can train, and that hosts reach each other", "doctor.doctor"
    ),
    "top": _Command(
        "phalanx top [JOB | PID]",
        "show what the ranks of running jobs are doing, and what they use",
        "diagnose.top.top",
    ),
    "why": _Command(
        "phalanx why [JOB | PID | RUN]",
        "say why a job hangs, or why it ended: which rank, which line",
        "diagnose.why.why",
    ),
    "stacks": _Command(
        "phalanx stacks [JOB | PID]", "print the Python stacks of all processes of a job", "diagnose.stacks_command"
    ),
    "attach": _Command(
        "phalanx attach RANK", "open a debugger in a rank of a running job, while the others wait", "diagnose.attach"
    ),
    "trace": _Command(
        "phalanx trace [RUN | JOB | PID]",
        "write what all ranks did as one trace for ui.perfetto.dev",
        "diagnose.trace.trace",
        needs_linux=False,
    ),
    "report": _Command(
        "phalanx report FOLDER",
        "write the report of a run, finished or not",
        "train.report.report_command",
        needs_linux=False,
    ),
    "explain": _Command(
        "phalanx explain [NAME | MESSAGE]",
        "say what an error message means and what to do about it",
        "failure.explain.explain",
        needs_linux=False,
    ),
    "ckpt": _Command(
        "phalanx ckpt ls|show|verify|diff|export FOLDER",
        "list, verify, compare and export checkpoints",
        "checkpoint.ckpt",
        needs_linux=False,
    ),
    "warm": _Command(
        "phalanx warm --list|--stop",
        "show or end the processes that phalanx run --warm forks jobs from",
        "launch.warm.warm",
    ),
}


_OLD_NAMES = {"verify-resume": ["check", "--resume"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 for a mistake in the command line."""
    return exit_code_of(lambda: _command(list(sys.argv[1:] if argv is None else argv)))


def _command(args: list[str]) -> int:
    name, rest = (args[0], args[1:]) if args else ("", [])
    if name in _OLD_NAMES:
        return _command([*_OLD_NAMES[name], *rest])
    if name == "help":
        return _command([*rest, "--help"])
    command = _COMMANDS.get(name)
    if command is None:
        return _no_command(args)
    if command.needs_linux:
        try:
            require_linux(f"phalanx {name}", "start scripts with torchrun, on the backend gloo")
        except PhalanxError as error:
            complain(str(error))
            return 2
    if rest == ["--version"]:
        return _no_command(rest)
    return int(importlib.import_module(f"phalanx.{command.module}").main(rest))


def _no_command(args: list[str]) -> int:
    parser = Parser(
        "phalanx",
        "phalanx COMMAND [args]",
        "Train one PyTorch model on many processes as if they were one. phalanx help COMMAND lists a command's flags.",
    )
    parser.add_argument(
        "--version", action="version", version=f"phalanx {phalanx.__version__}", help="show the version"
    )
    parser.add_commands({command.usage: command.about for command in _COMMANDS.values()})
    try:
        if not args:
            raise UsageError("no command given; phalanx --help lists them")
        if args[0].endswith(".py") and not args[0].startswith("-"):
            raise UsageError(f"{args[0]!r} is a script, not a command", args[0], ["run", args[0]])
        if not args[0].startswith("-"):
            near = nearest(args[0], _COMMANDS, cutoff=0.65)  # higher than the default, at which train resembles trace
            what = f"unknown command {args[0]!r}"
            raise misspelled(what if near else f"{what}; phalanx --help lists all", args[0], near)
        parser.parse_args(args)
    except UsageError as error:
        return parser.refuse(error, args)
    return 0
