"""The command ``phalanx``: reads the command line and calls the part that does the work.

Imports no torch; a subcommand that needs it imports it itself.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

from phalanx.launch.cpus import Share
from phalanx.launch.job import Job
from phalanx.launch.supervisor import run


def num_usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


_RIGHT_CALL = "phalanx run --nproc-per-node 2 train.py [args]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 for a mistake in the command line."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["run"]:
        return run(_parse_run(args[1:]))
    if args[:1] in (["-h"], ["--help"]):
        print(f"usage: {_RIGHT_CALL}\n\nphalanx run --help lists the flags.")
        return 0
    said = f"unknown command {args[0]!r}" if args else "no command given"
    _refuse("phalanx", said)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong and what the right call is."""

    def error(self, message: str) -> NoReturn:
        _refuse("phalanx run", message)


def _run_parser() -> tuple[_Parser, list[argparse.Action]]:
    parser = _Parser(
        prog="phalanx run",
        usage="phalanx run [flags] [-m] script.py [args]",
        description="Run a script on several ranks of this machine, with torchrun's environment.",
        allow_abbrev=False,
    )

    def flag(*names: str, **options: object) -> argparse.Action:
        twins = [name.replace("-", "_").replace("__", "--", 1) for name in names]
        spellings = dict.fromkeys([*names, *(n for n in twins if n.startswith("--"))])
        return parser.add_argument(*spellings, **options)  # type: ignore[arg-type]

    whole = _number(int, 1, "a whole number of at least 1")
    actions = [
        flag(
            "--nproc-per-node",
            type=lambda text: num_usable_cpus() if text in ("auto", "cpu") else whole(text),
            default=1,
            metavar="N",
            help="ranks to start; auto or cpu: one per usable CPU (default: 1)",
        ),
        flag("--nnodes", type=_one_node, default=1, metavar="1", help="only 1 for now"),
        flag("--node-rank", type=_number(int, 0, "0", 0), default=0, metavar="0", help="only 0"),
        flag("--no-preload", action="store_true"),
        flag("--no-use-env", action="store_true"),
        flag("--max-restarts", type=int, default=0),
        flag("--standalone", action="store_true", help="accepted; a job of one node always is"),
        flag("--master-addr", default="127.0.0.1", help="where rank 0 listens"),
        flag(
            "--master-port",
            type=_number(int, 0, "a port from 0 to 65535", 65535),
            default=0,
            help="its port (default: a free one)",
        ),
        flag("--rdzv-id", default="none", help="name of the job, TORCHELASTIC_RUN_ID"),
        flag(
            "--shutdown-timeout",
            type=_number(float, 0, "seconds of at least 0"),
            default=30.0,
            help="seconds from SIGTERM to SIGKILL when a job ends early (default: 30)",
        ),
        flag("-m", "--module", action="store_true", help="run a module, as python -m does"),
        flag("--no-python", action="store_true", help="run a program instead of a Python script"),
    ]
    return parser, actions


def _parse_run(argv: list[str]) -> Job:
    """Return the job; our flags stand before the script, the rest is the script's."""
    parser, actions = _run_parser()
    takes_value = {name: a.nargs != 0 for a in actions for name in a.option_strings}
    split = 0
    while split < len(argv) and argv[split].startswith("-") and argv[split] != "--":
        name, has_value = argv[split].split("=", 1)[0], "=" in argv[split]
        if name in ("-h", "--help"):
            parser.print_help()
            sys.exit(0)
        if name not in takes_value:
            near = difflib.get_close_matches(name, [n for n in takes_value if "_" not in n], n=1)
            parser.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))
        split += 2 if takes_value[name] and not has_value else 1
    flags = parser.parse_args(argv[:split])
    target = argv[split:]
    if target[:1] == ["--"]:
        target = target[1:]
    return Job(
        command=tuple(_command(parser, target, module=flags.module, no_python=flags.no_python)),
        preload=not (flags.no_python or flags.no_preload),
        local_rank_argument=flags.no_use_env,
        max_restarts=flags.max_restarts,
        num_local_ranks=flags.nproc_per_node,
        shares=tuple(
            Share(num_threads=max(1, num_usable_cpus() // flags.nproc_per_node)) for _ in range(flags.nproc_per_node)
        ),
        shares_note=f"{flags.nproc_per_node} ranks",
        master_addr=flags.master_addr,
        master_port=flags.master_port,
        run_id=flags.rdzv_id,
        grace_s=flags.shutdown_timeout,
    )


def _command(parser: _Parser, target: list[str], *, module: bool, no_python: bool) -> list[str]:
    if module and no_python:
        parser.error("-m and --no-python exclude each other")
    if not target:
        parser.error("no script given")
    if no_python:
        if not any(os.access(path, os.X_OK) for path in _candidates(target[0])):
            parser.error(f"no program {target[0]!r}")
        return target
    if module:
        package = target[0].split(".")[0]
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            parser.error(f"no module named {package!r}")
        return [sys.executable, "-m", *target]
    if not os.path.exists(target[0]):
        parser.error(f"no script {target[0]!r}")
    return [sys.executable, *target]


def _candidates(program: str) -> list[str]:
    if os.sep in program:
        return [program]
    return [os.path.join(folder, program) for folder in os.get_exec_path()]


def _number(kind: Callable[[str], float], least: float, what: str, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser of one argument that lies in [least, most]."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return parse


def _one_node(text: str) -> int:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(f"must be 1: several nodes come later, got {text!r}")
    return 1


def _refuse(who: str, what: str) -> NoReturn:
    print(f"{who}: {what}; right: {_RIGHT_CALL}", file=sys.stderr)
    sys.exit(2)
