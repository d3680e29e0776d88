"""The flags of ``phalanx run``: declared once, read from the command line, the environment or the scheduler.

Names and meanings are torchrun's; the last group is our own. Each flag is also an environment variable, ours before
torchrun's: ``--max-restarts``, ``PHALANX_MAX_RESTARTS``, ``PET_MAX_RESTARTS``. The parser leaves out what is not given,
so that each value is known with where it came from.

Source of the names: ``torch/distributed/run.py`` and ``torch/distributed/launch.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from phalanx._command_line import Parser, UsageError
from phalanx._env import REPLACE_VARIABLE, is_off, is_on, is_service_link, replaces_gloo
from phalanx._memory import CHOICES

RIGHT_CALL = "phalanx run --nproc-per-node 2 train.py [args]"
STATIC_CALL = "phalanx run --nnodes 2 --node-rank 0 --master-addr HOST train.py"
ELASTIC_CALL = "phalanx run --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py"
PROVIDERS = ("aws", "gcp", "azure")
"""Providers whose notices `notices` knows."""
_FORBIDDEN_SIGNALS = {"SIGKILL", "SIGSTOP"}  # nobody can handle them


@dataclasses.dataclass(frozen=True)
class Flag:
    """Flag of a command; without a `placeholder` it is a switch."""

    name: str
    help: str
    parse: Callable[[str], Any]
    placeholder: str = ""
    default: str = ""
    short: str = ""
    variable: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables of the flag, ours first."""
        if self.variable:
            return (self.variable,)
        word = self.name.upper().replace("-", "_")
        return f"PHALANX_{word}", f"PET_{word}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Value of a flag and its origin: ``--nnodes``, ``PET_NNODES``, ``Slurm`` or ``default``."""

    value: Any
    origin: str

    @property
    def is_given(self) -> bool:
        return self.origin != "default"


# ---------------------------------------------------------------- kinds of values


def number(
    kind: Callable[[str], float], least: float, what: str, *, most: float = math.inf, words: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return a function that parses a number from `least` to `most`, or one of some words; `what` names them."""

    def parse(text: str) -> float | str:
        if text in words:
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            raise ValueError(f"must be {what}")
        return value

    return parse


def _switch(text: str) -> bool:
    if not (is_on(text) or is_off(text)):
        raise ValueError("must be 1 or 0")
    return is_on(text)


def _gloo(text: str) -> bool:
    return text == "1" or replaces_gloo(text)  # the switch, or PHALANX_REPLACE


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return text

    return parse


def _nodes(text: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes."""
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise ValueError("must be N or MIN:MAX with 1 <= MIN <= MAX")
    return int(least), int(most or least)


def _hosts(text: str) -> str:
    """Return a host or an address, or several with commas between them."""
    hosts = [part.strip() for part in text.split(",")]
    if text and not all(hosts):
        raise ValueError("must be one host, or several as HOST,HOST")
    return ",".join(dict.fromkeys(hosts))


def _notice_url(text: str) -> str:
    if text and text not in PROVIDERS and not _is_url(text):
        raise ValueError(f"must be a URL of http, or {', '.join(PROVIDERS)}")
    return text


def _is_url(text: str) -> bool:
    """Return whether this can be asked: nobody would notice that a wrong address gives no notice."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:  # of an address in brackets, or a port
        return False


_COUNTS = ("auto", "cpu", "gpu")
_RANKS = "a whole number of at least 1, auto, cpu or gpu, or MIN:MAX with MIN <= MAX"


def _num_ranks(text: str) -> int | str | tuple[int, int | str]:
    """Return the number of ranks, or the word that stands for it, or the least and that."""
    least_text, colon, most_text = text.rpartition(":")
    most = number(int, 1, _RANKS, words=_COUNTS)(most_text)
    if not colon:
        return most
    least = number(int, 1, _RANKS, most=math.inf if most in _COUNTS else most)(least_text)
    return least, most


def _port_or_nothing(text: str) -> int:
    return int(number(int, 0, "a port from 0 to 65535", most=65535)(text)) if text else 0


_SECONDS = {"timeout", "join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and is_pair and value for key, is_pair, value in pairs):
        raise ValueError("must be KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _rendezvous_settings(text: str) -> dict[str, str]:
    """Return the settings of the rendezvous; those that are understood must make sense, others are left alone."""
    pairs = _pairs(text)
    for name in _SECONDS & pairs.keys():
        try:
            is_right = 0 <= float(pairs[name]) < float("inf")
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must be a number that is not negative, got {pairs[name]!r}")
    if pairs.get("is_host", "true").lower() not in (*_YES, *_NO):
        raise ValueError(f"is_host must be true or false, got {pairs['is_host']!r}")
    return pairs


def _streams(text: str) -> int | dict[int, int]:
    """Return the streams of every local rank, or those of some: 1 is stdout, 2 is stderr, 3 both."""
    try:
        pairs = [tuple(map(int, part.split(":"))) for part in text.split(",")]
    except ValueError:
        pairs = []
    if len(pairs) == 1 and len(pairs[0]) == 1 and 0 <= pairs[0][0] <= 3:
        return pairs[0][0]
    if not pairs or not all(len(pair) == 2 and pair[0] >= 0 and 0 <= pair[1] <= 3 for pair in pairs):
        raise ValueError("must be 0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:STREAMS,RANK:STREAMS")
    return {pair[0]: pair[1] for pair in pairs}


def _local_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        ranks = (-1,)
    if any(rank < 0 for rank in ranks):
        raise ValueError("must be local ranks like 0,2")
    return ranks


def _signals(text: str) -> tuple[int, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = {sig.name: sig for sig in signal.Signals}
    for name in names:
        if name not in known or name in _FORBIDDEN_SIGNALS:
            raise ValueError("must be names of signals that can be handled, like SIGTERM,SIGUSR1")
    return tuple(known[name] for name in names)


_at_least_0 = number(int, 0, "a whole number of at least 0")
_seconds = number(float, 0, "seconds of at least 0")

# ---------------------------------------------------------------- the table

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Ranks": (
        Flag(
            "nproc-per-node",
            "number of ranks on this node. auto: one per GPU, or without GPUs one per physical core or CPU of the "
            "cgroup's quota; cpu: one per CPU; gpu: one per GPU; MIN:MAX: MAX, or fewer after a failure if some ranks "
            "can't be restarted; on several nodes each has its own",
            _num_ranks,
            "N|MIN:MAX",
            "auto",
        ),
        Flag("max-restarts", "number of times that all ranks are restarted after a failure", _at_least_0, "N", "0"),
        Flag("module", "run a module, as python -m does", _switch, short="-m"),
        Flag("no-python", "run a program instead of a Python script", _switch),
        Flag("no-use-env", "pass --local-rank=N to the script, as torch.distributed.launch did", _switch),
        Flag("use-env", "let the script read LOCAL_RANK from the environment, which is the default", _switch),
        Flag("role", "role of the ranks, which they find in ROLE_NAME", str, "NAME", "default"),
        Flag(
            "start-method",
            "accepted without effect, since torchrun uses it for functions, not for scripts",
            _choice("spawn", "fork", "forkserver"),
            "NAME",
            "spawn",
        ),
    ),
    "Several nodes": (
        Flag("nnodes", "number of nodes, or the smallest and the largest number", _nodes, "N|MIN:MAX", "1:1"),
        Flag("node-rank", "number of this node, for the static rendezvous", _at_least_0, "N", "0"),
        Flag(
            "master-addr",
            "host of node 0; or hosts where nodes look for the job, in this order: HOST,HOST",
            _hosts,
            "HOST",
            "127.0.0.1",
        ),
        Flag(
            "master-port",
            "port on node 0 (default: a free one; with several nodes 29500)",
            _port_or_nothing,
            "PORT",
        ),
        Flag("local-addr", "address of this node (default: found automatically)", str, "HOST"),
        Flag("standalone", "run on this node only, whatever the environment says", _switch),
        Flag("rdzv-backend", "rendezvous of the nodes: static or c10d", _choice("static", "c10d"), "NAME", "static"),
        Flag(
            "rdzv-endpoint",
            "address of the rendezvous, or several in order: HOST:PORT,HOST:PORT (default: that of node 0)",
            _hosts,
            "HOST:PORT",
        ),
        Flag("rdzv-id", "name of the job, the same on all nodes", str, "NAME", "none"),
        Flag(
            "rdzv-conf",
            "further settings of the rendezvous, as torch's: last_call_timeout, join_timeout, is_host, "
            "keep_alive_interval, keep_alive_max_attempt",
            _rendezvous_settings,
            "KEY=VALUE,...",
        ),
        Flag(
            "monitor-interval",
            "taken as torchrun does, without effect: news come by themselves",
            _seconds,
            "SECONDS",
            "0.1",
        ),
    ),
    "Output": (
        Flag("log-dir", "folder in which the run's folder is made (default: runs/<script>)", str, "FOLDER"),
        Flag(
            "redirects",
            "streams to keep off the screen: 1 stdout, 2 stderr, 3 both; of all local ranks, or of some (0:1,1:3). The "
            "logs have them in any case",
            _streams,
            "STREAMS",
            "0",
            "-r",
        ),
        Flag("tee", "streams to show even if they are redirected", _streams, "STREAMS", "0", "-t"),
        Flag("local-ranks-filter", "local ranks whose output is shown (default: all)", _local_ranks, "N,N"),
    ),
    "Ending": (
        Flag(
            "signals-to-handle",
            "signals to pass on to the ranks; SIGUSR1 and SIGUSR2 do not end the job",
            _signals,
            "NAMES",
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        Flag("shutdown-timeout", "seconds between SIGTERM and SIGKILL", _seconds, "SECONDS", "30"),
    ),
    "Beyond torchrun": (
        Flag(
            "replace-gloo",
            "run on phalanx what asks for gloo, or for torch's default on the CPU, as PHALANX_REPLACE=gloo does",
            _gloo,
            variable=REPLACE_VARIABLE,
        ),
        Flag(
            "drain",
            "of several nodes: SIGTERM takes this one out of the job after the next snapshot, and the others go on",
            _switch,
        ),
        Flag(
            "no-keep",
            "with --max-restarts: start every rank anew, also those that could go on in the same process",
            _switch,
        ),
        Flag(
            "drain-file",
            "as --drain, and this node also leaves when the file appears, or is touched if it was there before",
            str,
            "FILE",
        ),
        Flag(
            "drain-url",
            "as --drain, and this node also leaves when the address answers 200; aws, gcp and azure stand for the "
            "notices of these providers",
            _notice_url,
            "URL|aws|gcp|azure",
        ),
        Flag(
            "spares",
            "nodes beyond the largest number of --nnodes, which wait to take the place of one that is lost",
            _at_least_0,
            "N",
            "0",
        ),
        Flag(
            "replicas",
            "of several nodes: number of other nodes that keep a copy of each node's part of a sharded state; as many "
            "nodes can be lost at once without going back to disk; 0: none",
            _at_least_0,
            "N",
            "1",
        ),
        Flag(
            "host-label",
            "failure domain of this node, such as its rack: replicas go to nodes with another label if there are any",
            str,
            "NAME",
        ),
        Flag("no-preload", "import torch in each rank, instead of once for all", _switch),
        Flag(
            "warm",
            "fork the job from a process that has torch imported and stays for the next job; it is started if there is "
            "none that fits (see phalanx warm)",
            _switch,
        ),
        Flag("warm-for", "seconds that this process stays after its last job", _seconds, "SECONDS", "600"),
        Flag("no-pin", "let ranks run on any CPU", _switch),
        Flag(
            "memory",
            "what becomes of memory that a rank frees. auto: kept for the next step, in huge pages, while memory is "
            "plentiful; default: as the C library does it",
            _choice(*CHOICES),
            "auto|default",
            "auto",
        ),
        Flag(
            "regrow-after",
            "seconds with fewer than MAX ranks on a node after which the job restarts with MAX, at the next snapshot; "
            "0: never",
            _seconds,
            "SECONDS",
            "60",
        ),
        Flag("dry-run", "print what would be done, and where each value comes from", _switch),
    ),
}

FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}

# ---------------------------------------------------------------- reading them


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

    The command line wins over PHALANX_*, that over PET_*, that over the scheduler, that over the default.

    Args:
        argv: Words after ``phalanx run``.
        environ: Environment variables.
        scheduled: Values from the scheduler, by flag.
        scheduler: Name of the scheduler, for messages.
        parser: Parser of another command that takes these flags, see `add_flags`; default: that of ``phalanx run``.
        also: Further flags of that command; they have no environment variables.

    Raises:
        UsageError: A flag is unknown, lacks its value or has a wrong one.
        SystemExit: The help was asked for, and has been printed.
    """
    given, target = _parse(parser or run_parser(), argv)
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
            right = ELASTIC_CALL if name == "nnodes" else ""
            raise UsageError(f"{origin} {error}, got {text!r}", right) from None
    return settings, target


# What other launchers call it, and what it is here.
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
    **dict.fromkeys(_NUM_RANKS_ELSEWHERE, ("the number of ranks on this node is --nproc-per-node", "")),
    **dict.fromkeys(
        _HOSTS_ELSEWHERE,
        (
            "phalanx run is started on each node, and told how many there are",
            STATIC_CALL,
        ),
    ),
    "--run-path": ("the script always runs as python runs it: leave it out", "phalanx run train.py [args]"),
    "--logs-specs": ("logs are kept by --log-dir, --redirects and --tee: leave it out", RIGHT_CALL),
    "--event-log-handler": ("no events of torchelastic are recorded: leave it out", RIGHT_CALL),
    "--virtual-local-rank": ("every rank keeps its own LOCAL_RANK: leave it out", RIGHT_CALL),
    "--numa-binding": ("ranks are bound to their NUMA node unless --no-pin is given: leave it out", RIGHT_CALL),
}


_TARGET = "target"
_NUM_RANKS = "--nproc-per-node"


def _parse(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return how each flag given was spelt and its text, and what follows: the script and its arguments."""
    found = next((word for word in argv if word.partition("=")[0] in _ELSEWHERE), "")
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except UsageError as error:
        # argparse takes -hosts for -h.
        if not found or f"{found[:2]} takes no value" not in str(error):
            raise
        unknown = [found]
    if unknown:
        name = unknown[0].partition("=")[0].replace("_", "-")
        if name not in _ELSEWHERE:
            raise parser.unknown(unknown[0], argv)
        what, right = _ELSEWHERE[name]
        raise UsageError(
            f"unknown flag {name}: {what}", right or parser.call(argv, {unknown[0].partition("=")[0]: _NUM_RANKS})
        )
    given = vars(namespace)
    target = given.pop(_TARGET)
    return given, target[1:] if target[:1] == ["--"] else target


def _spellings(flags: Sequence[Flag]) -> dict[str, Flag]:
    return {f"--{flag.name}": flag for flag in flags} | {flag.short: flag for flag in flags if flag.short}


class _Given(argparse.Action):
    """Keeps how a flag was spelt with its text; a flag that is not given leaves nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, ((option or "").replace("_", "-"), "1" if self.nargs == 0 else values))


def split_off_flags(words: Sequence[str], also: Sequence[Flag] = ()) -> tuple[list[str], list[str]]:
    """Return the long flags of ours among a script's arguments, with their values, and the other arguments.

    Args:
        also: Further flags of the command that is called.
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


def without_flags(
    names: Collection[str], argv: Sequence[str], target: Sequence[str], switches: Collection[str] = ()
) -> list[str]:
    """Return a command line that ends in `target`, without the flags of these names and their values.

    Args:
        switches: Those of the names that have no value.
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
    """Let a command take flags, and a script with arguments behind them.

    Args:
        shown: Flags that the help lists, by title; those of ``phalanx run`` beside them are taken, but not listed.
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
        RIGHT_CALL,
    )
    add_flags(parser, GROUPS)
    return parser
