"""The command ``phalanx``: finds the subcommand and runs it.

Imports no torch; subcommands that need it import it themselves.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence

import phalanx
from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx._env import nearest
from phalanx._errors import PhalanxError, require_linux
from phalanx.launch.flags import RIGHT_CALL, add_flags, run_parser
from phalanx.launch.plan import make_plan
from phalanx.launch.run import run

_COMMANDS = {
    "run": (RIGHT_CALL, "start a script on several ranks, with torchrun's flags"),
    "tune": ("phalanx tune train.py [args]", "measure which settings make a script the fastest on this machine"),
    "doctor": ("phalanx doctor [flags]", "check that this machine can train, and that hosts reach each other"),
    "report": ("phalanx report FOLDER", "write the report of a run, finished or not"),
    "ckpt": ("phalanx ckpt ls|show|verify|diff|export FOLDER", "list, verify, compare and export checkpoints"),
    "verify-resume": (
        "phalanx verify-resume --nproc-per-node 2 train.py [args]",
        "prove that a script with a Trainer resumes to the same bits",
    ),
}
_LINUX_ONLY = ("run", "tune", "doctor", "verify-resume")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 for a mistake in the command line.

    If the reader of our output goes early, as ``head`` does, the code is that of a program killed by SIGPIPE; after
    Ctrl-C, that of one killed by SIGINT.
    """
    _print_any_name()
    try:
        try:
            return _command(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _drop_output_without_reader():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _drop_output_without_reader() -> bool:
    """Redirect output whose reader has gone, so that Python does not flush it again; return whether there was any."""
    waiting = select.poll()
    for fd in (1, 2):
        waiting.register(fd, 0)
    gone = [fd for fd, event in waiting.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for fd in gone:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), fd)
    return bool(gone)


def _command(args: list[str]) -> int:
    name, rest = (args[0], args[1:]) if args else ("", [])
    if name in _LINUX_ONLY:
        try:
            require_linux(f"phalanx {name}", "start scripts with torchrun, on the backend gloo")
        except PhalanxError as error:
            print(error, file=sys.stderr)
            return 2
    if name in _COMMANDS and rest == ["--version"]:
        return _no_command(rest)
    if name == "help":
        return _command([*rest, "--help"])
    if name == "run":
        return _run(rest)
    if name == "report":
        return _report(rest)
    if name == "ckpt":
        from phalanx.checkpoint.command import main as ckpt  # brings torch

        return ckpt(rest)
    if name == "doctor":
        from phalanx.doctor.command import main as doctor  # not where a job is started

        return doctor(rest)
    if name == "tune":
        from phalanx.tune.command import main as tune

        return tune(rest)
    if name == "verify-resume":
        return _verify_resume(rest)
    return _no_command(args)


def _no_command(args: list[str]) -> int:
    parser = Parser(
        "phalanx",
        "phalanx COMMAND [args]",
        "Train one PyTorch model on many processes as if they were one. phalanx help COMMAND lists a command's flags.",
        RIGHT_CALL,
    )
    parser.add_argument(
        "--version", action="version", version=f"phalanx {phalanx.__version__}", help="show the version"
    )
    parser.add_commands(dict(_COMMANDS.values()))
    try:
        if not args:
            raise UsageError("no command given")
        if args[0].endswith(".py"):
            raise UsageError(f"{args[0]} is a script, not a command", f"phalanx run {' '.join(args)}")
        if not args[0].startswith("-"):
            near = nearest(args[0], _COMMANDS)
            raise UsageError(
                f"unknown command {args[0]!r}{near and f', did you mean {near}?'}",
                parser.call(args, {args[0]: near}) if near else "phalanx --help",
            )
        parser.parse_args(args)
    except UsageError as error:
        return parser.refuse(error)
    return 0


def _print_any_name() -> None:
    """Make every path and name printable, whatever the encoding of the output."""
    codecs.register_error("phalanx.name", _encode_name)
    with contextlib.suppress(AttributeError):  # no stream, or a replacement for one
        sys.stdout.reconfigure(errors="phalanx.name")  # type: ignore[union-attr]


def _encode_name(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode a path as its original bytes, for the program that reads it; escape what the output can't encode."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _run(args: list[str]) -> int:
    parser = run_parser()
    try:
        plan = make_plan(args, _env.environment(), parser)
    except UsageError as error:
        return parser.refuse(error)
    if plan.is_dry:
        print(plan.describe())
        return 0
    if plan.settings["replace-gloo"].value:
        _env.update({_env.REPLACE_VARIABLE: "gloo"})  # the ranks inherit it
    return run(plan.job)


def _report(args: list[str]) -> int:
    from phalanx.train.report import write_report  # not where a job is started

    about = "Write FOLDER/report.html: one page with the state, curves, timings and restarts of a run."
    parser = Parser("phalanx report", "phalanx report FOLDER", about, "phalanx report runs/train")
    parser.add_argument("folder", metavar="FOLDER", help="folder of the run, such as runs/train")
    try:
        page = write_report(parser.parse_args(args).folder)
    except UsageError as error:
        return parser.refuse(error)
    except (OSError, ValueError) as error:
        print(f"phalanx report: {error}", file=sys.stderr)
        return 2
    print(page)
    return 0


def _verify_resume(args: list[str]) -> int:
    right, _ = _COMMANDS["verify-resume"]
    parser = Parser(
        "phalanx verify-resume",
        right,
        "Run a script that trains with a Trainer three times: whole, with a rank killed, and preempted and resumed. "
        "Compare the results bit for bit; the exit code is 1 if they differ. Every flag of phalanx run is accepted.",
    )
    add_flags(parser, {})
    try:
        make_plan(args, _env.environment(), parser)
    except UsageError as error:
        return parser.refuse(error)
    from phalanx.train.verification import verify_resume  # brings torch

    return verify_resume(args)
