"""Turns the command line, the environment and the scheduler's values into settings.

The flags are declared in a table (`flags`), from which argparse is set up. argparse gets no defaults, so it returns
only what the user has typed, and ``--dry-run`` can show the origin of each value. The script and its arguments follow
the flags. The parser is that of all commands (`_command_line`); it adds 1.6 ms to a start.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx._command_line import Parser, UsageError
from phalanx._env import is_service_link
from phalanx.launch.command.flags import FLAGS, GROUPS, Flag, Setting

_REFUSED = re.compile(r"(?:unrecognized arguments|[Nn]o such option|Unknown command line flag)\b(.*)")


def read_flags(
    argv: Sequence[str],
    environ: Mapping[str, str],
    scheduled: Mapping[str, str],
    scheduler: str,
    *,
    parser: Parser | None = None,
    also: Sequence[Flag] = (),
) -> tuple[dict[str, Setting], list[str]]:
    """Return every flag's setting, and the script with its arguments.

    The order of precedence is: the command line, PHALANX_*, PET_*, the scheduler's value, the default.

    Args:
        argv: Words after ``phalanx run``.
        environ: Environment variables.
        scheduled: Values from the scheduler, by flag.
        scheduler: Name of the scheduler, for messages.
        parser: Parser of another command that accepts these flags, see `add_flags`; default: the parser of ``phalanx
            run``.
        also: Further flags of that command; they have no environment variables.

    Raises:
        UsageError: A flag is unknown, lacks its value or has a wrong value.
        SystemExit: The user asked for the help, which has been printed.
    """
    parser = parser or run_parser()
    given, target = _parse(parser, argv)
    settings = {}
    for name, flag in (FLAGS | {flag.name: flag for flag in also}).items():
        variables = () if flag in also else flag.variables
        sources = [(v, environ.get(v)) for v in variables if not is_service_link(v, environ)]
        if name in given:
            sources.insert(0, given[name])
        sources += [(scheduler, scheduled.get(name)), ("default", flag.default)]
        origin, text = next((origin, text) for origin, text in sources if text is not None)
        try:
            settings[name] = Setting(flag.parse(text), origin)
        except ValueError as error:
            if name in given and _is_script(text):
                raise _swallowed(parser, origin, text) from None
            raise UsageError(f"{origin} {error}, got {text!r}") from None
    return settings, target


# Flags of other launchers. The error for such a flag says what to use here instead.
_NUM_RANKS = "--nproc-per-node"
_NUM_RANKS_ELSEWHERE = [
    "-n",
    "-np",
    "--np",
    "--nprocs",
    "--procs",
    "--num-procs",
    "--processes",
    "--num-processes",
    "--gpus",
    "--ngpus",
    "--num-gpus",
    "--ranks",
    "--num-ranks",
    "--nranks",
    "--world-size",
    "--workers",
]
_HOSTS_ELSEWHERE = ["-H", "-hosts", "--host", "--hosts", "--hostfile", "-hostfile", "--machinefile"]
_ELSEWHERE = {
    **dict.fromkeys(_NUM_RANKS_ELSEWHERE, f"the number of ranks on this node is {_NUM_RANKS}"),
    **dict.fromkeys(
        _HOSTS_ELSEWHERE,
        "start phalanx run on every node, with --nnodes, --node-rank and --master-addr",
    ),
    "--run-path": "the script always runs as python runs it: leave it out",
    "--logs-specs": "logs are kept by --log-dir, --redirects and --tee: leave it out",
    "--event-log-handler": "no events of torchelastic are recorded: leave it out",
    "--virtual-local-rank": "every rank keeps its own LOCAL_RANK: leave it out",
    "--numa-binding": "ranks are bound to their NUMA node unless --no-pin is given: leave it out",
}


_TARGET = "target"


def _parse(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the spelling and the text of each given flag, and the rest: the script and its arguments."""
    found = next((word for word in argv if word.partition("=")[0] in _ELSEWHERE), "")
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except UsageError as error:
        # argparse parses -hosts as -h, and rejects the rest.
        if not found or f"{found[:2]} takes no value" not in str(error):
            raise
        unknown = [found]
    if unknown and (name := unknown[0].partition("=")[0].replace("_", "-")) in _ELSEWHERE:
        meant = [_NUM_RANKS] if name in _NUM_RANKS_ELSEWHERE else ()
        raise UsageError(
            f"unknown flag {name}: {_ELSEWHERE[name]}", unknown[0].partition("=")[0] if meant else "", meant
        )
    given = vars(namespace)
    target = given.pop(_TARGET)
    taken = next(((name, text) for name, text in given.values() if _is_script(text)), None)
    if taken is not None and (unknown or not target):
        raise _swallowed(parser, *taken)
    if unknown:
        raise parser.unknown(unknown[0], "a flag of the script comes after the script")
    return given, target[1:] if target[:1] == ["--"] else target


def _is_script(text: str) -> bool:
    return text.endswith(".py")


def _swallowed(parser: Parser, name: str, script: str) -> UsageError:
    """Return the error for a flag whose value was left out, so that the script counts as the value."""
    return UsageError(f"{parser.without_value(name)}, got the script {script!r}")


def _spellings(flags: Sequence[Flag]) -> dict[str, Flag]:
    return {f"--{flag.name}": flag for flag in flags} | {flag.short: flag for flag in flags if flag.short}


class _Given(argparse.Action):
    """Stores how a flag was spelled, and its text; stores nothing for a flag that is not given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, ((option or "").replace("_", "-"), "1" if self.nargs == 0 else values))


def split_off_flags(words: Sequence[str], also: Sequence[Flag] = ()) -> tuple[list[str], list[str]]:
    """Split a script's arguments into our own long flags, with their values, and all other arguments.

    Args:
        also: Flags of the command in addition to those of ``phalanx run``.
    """
    spellings = _spellings((*FLAGS.values(), *also))
    ours: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, _ = word.partition("=")
        flag = spellings.get(name.replace("_", "-")) if word.startswith("--") else None
        (others if flag is None else ours).append(word)
        if flag is not None and flag.placeholder and not has_value and rest:
            ours.append(rest.pop(0))
    return ours, others


def hint_for_flags(refusal: str, command: Sequence[str], typed: str) -> str:
    """If a script has rejected one of our flags, return a hint to put the flag before the script; otherwise "".

    Args:
        refusal: Last output of the script.
        command: Command of a rank: the interpreter, and its script or module with all arguments.
        typed: Command line that the user has typed, which ends in the script or module with all arguments.
    """
    refused = _REFUSED.search(refusal)
    if refused is None:
        return ""
    target = 3 if list(command[1:2]) == ["-m"] else 2  # number of words up to the script or the module
    ours, its = split_off_flags(command[target:])
    names = [word.partition("=")[0] for word in ours if word.startswith("-")]
    if not any(name in refused[1].replace("=", " ").split() for name in names):
        return ""
    before = shlex.split(typed)[: target - 1 - len(command)]
    before = before[:-1] if before[-1] == "--" else before
    program = next((at for at, word in enumerate(before) if word.replace("_", "-") == "--no-python"), len(before))
    right = shlex.join([*before[:program], *ours, *before[program:], command[target - 1], *its])
    return f"{names[0]} is a flag of phalanx run, and stands before the script: {right}"


def without_flags(
    names: Collection[str], argv: Sequence[str], target: Sequence[str], switches: Collection[str] = ()
) -> list[str]:
    """Return a command line that ends in `target`, without the named flags and their values.

    Args:
        switches: Names of the flags that take no value.
    """
    flags = list(argv[: len(argv) - len(target)])
    kept: list[str] = []
    while flags:
        word = flags.pop(0)
        name, has_value, _ = word.replace("_", "-").partition("=")
        if name not in names:
            kept.append(word)
        elif not has_value and name not in switches:
            flags.pop(0)
    return [*kept, *target]


def add_flags(parser: Parser, shown: Mapping[str, Sequence[Flag]]) -> None:
    """Let a command accept flags, followed by a script with arguments.

    Args:
        shown: Flags that the help lists, by title; all other flags of ``phalanx run`` are accepted, but not listed.
    """
    listed = {flag.name for flags in shown.values() for flag in flags}
    others = [flag for flag in FLAGS.values() if flag.name not in listed]
    for title, flags in [*shown.items(), (None, others)]:
        group = parser.add_argument_group(title) if title else parser
        for flag in flags:
            default = f" (default: {flag.default})" if flag.placeholder and flag.default else ""
            long = f"--{flag.name}"
            group.add_argument(
                *dict.fromkeys(filter(None, (flag.short, long, f"--{flag.name.replace('-', '_')}"))),
                dest=flag.name,
                action=_Given,
                default=argparse.SUPPRESS,
                help=f"{flag.help}{default}".replace("%", "%%") if title else argparse.SUPPRESS,
                **({"metavar": flag.placeholder} if flag.placeholder else {"nargs": 0}),
            )
    parser.add_argument(_TARGET, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_parser() -> Parser:
    """Return the parser of ``phalanx run``."""
    parser = Parser(
        "phalanx run",
        "phalanx run [flags] script.py | -m module | --no-python program  [args]",
        "Run a script on several ranks, on this machine or on several, with torchrun's flags and environment. Flags "
        "come before the script and may be written with - or _. Each can be set in the environment, too: "
        "--max-restarts as PHALANX_MAX_RESTARTS, or as torchrun's PET_MAX_RESTARTS.",
    )
    add_flags(parser, GROUPS)
    return parser
