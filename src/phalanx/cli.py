"""The command ``phalanx``: reads the command line and calls the part that does the work.

Imports no torch; a subcommand that needs it imports it itself.
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
from phalanx.launch.flags import RIGHT_CALL, UsageError
from phalanx.launch.plan import make_plan
from phalanx.launch.run import run

_DOCTOR = "phalanx doctor [the flags of phalanx run]"
_REPORT = "phalanx report FOLDER"
_CKPT = "phalanx ckpt ls|show|verify|diff|export FOLDER"
_VERIFY_RESUME = "phalanx verify-resume --nproc-per-node 2 train.py [args]"

_HELP = {
    RIGHT_CALL: "start a script on several ranks, with torchrun's flags",
    _DOCTOR: "try whether this machine can train, and hosts reach each other",
    _REPORT: "write the report of a run, finished or not",
    _CKPT: "look at checkpoints, verify, compare and export them",
    _VERIFY_RESUME: "prove that a script with a Trainer resumes to the same bits",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 for a mistake in the command line.

    Where whoever reads our output goes before its end, as ``head`` does, it is that of a program that SIGPIPE ends;
    after Ctrl-C, of one that SIGINT ends.
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
    """Let what is left for a reader who has gone vanish, so that Python does not try it again; whether there is one."""
    waiting = select.poll()
    for fd in (1, 2):
        waiting.register(fd, 0)
    gone = [fd for fd, event in waiting.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for fd in gone:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), fd)
    return bool(gone)


def _command(args: list[str]) -> int:
    if args[:1] == ["run"]:
        return _run(args[1:])
    if args[:1] == ["report"]:
        return _report(args[1:])
    if args[:1] == ["ckpt"]:
        from phalanx.checkpoint.command import main as ckpt  # brings torch

        return ckpt(args[1:])
    if args[:1] == ["doctor"]:
        from phalanx.doctor.command import main as doctor  # not where a job is started

        return doctor(args[1:])
    if args[:1] == ["verify-resume"]:
        return _verify_resume(args[1:])
    if args[:1] in (["-h"], ["--help"]):
        lines = "\n".join(f"  {call}\n      {what}" for call, what in _HELP.items())
        print(f"usage:\n{lines}\n\nEach lists its flags with --help.")
        return 0
    if args[:1] == ["--version"]:
        print(f"phalanx {phalanx.__version__}")
        return 0
    if not args:
        return _refuse("phalanx", "no command given")
    if args[0].endswith(".py"):
        return _refuse("phalanx", f"{args[0]} is a script, not a command", f"phalanx run {' '.join(args)}")
    near = _env.did_you_mean(args[0], ("run", "doctor", "report", "ckpt", "verify-resume"))
    return _refuse("phalanx", f"unknown command {args[0]!r}{near}")


def _print_any_name() -> None:
    """Let every command print any path and any name, whatever the encoding of the output."""
    codecs.register_error("phalanx.name", _encode_name)
    with contextlib.suppress(AttributeError):  # no stream, or a stand-in for one
        sys.stdout.reconfigure(errors="phalanx.name")  # type: ignore[union-attr]


def _encode_name(error: UnicodeError) -> tuple[str | bytes, int]:
    """Give a path its own bytes, for the program that reads it; what the output can't encode becomes an escape."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _run(args: list[str]) -> int:
    try:
        plan = make_plan(args, _env.environment())
    except UsageError as error:
        return _refuse("phalanx run", str(error), error.right)
    if plan.is_dry:
        print(plan.describe())
        return 0
    return run(plan.job)


def _report(args: list[str]) -> int:
    from phalanx.train.report import write_report  # not where a job is started

    if args in (["-h"], ["--help"]):
        print(f"usage: {_REPORT}\n\nWrites FOLDER/report.html: what became of the run whose folder this is.")
        return 0
    if len(args) != 1:
        return _refuse("phalanx report", f"one folder is needed, got {len(args)}", right=_REPORT)
    try:
        page = write_report(args[0])
    except (OSError, ValueError) as error:
        return _refuse("phalanx report", str(error), right=_REPORT)
    print(page)
    return 0


def _verify_resume(args: list[str]) -> int:
    if args in (["-h"], ["--help"]):
        print(
            f"usage: {_VERIFY_RESUME}\n\nRuns a script that trains with a Trainer whole, with a rank killed, and\n"
            "preempted and started again; says whether all end with the same bits.\nTakes the flags of phalanx run."
        )
        return 0
    try:
        make_plan(args, _env.environment())
    except UsageError as error:
        return _refuse("phalanx verify-resume", str(error), right=_VERIFY_RESUME)
    from phalanx.train.verification import verify_resume  # brings torch

    return verify_resume(args)


def _refuse(who: str, what: str, right: str = RIGHT_CALL) -> int:
    print(f"{who}: {what}; right: {right}", file=sys.stderr)
    return 2
