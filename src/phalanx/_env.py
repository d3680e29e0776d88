"""The environment variables of phalanx: declared once, and read only here.

If phalanx is installed, every ``import torch`` runs this module, so it contains only names and plain functions;
`_settings` interprets the values of settings.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping

TYPE_CHECKING = False  # not from typing: a command that only passes a job on should import neither typing nor datetime
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any

_GOOD_GUESS = 0.8  # least similarity of a name that an error suggests, because a bad guess is worse than none
_MOST_DIGITS = 9  # further digits of K in gloo:K are ignored
_MAX_LISTED = 8  # maximum number of arguments that a message lists

LONGEST_S = 1e9
"""Longest timeout: some 30 years, which means forever. Longer timeouts could overflow torch's clocks (292 years)."""


def seconds(name: str, timeout: timedelta | float) -> float:
    """Return a timeout in seconds, at most `LONGEST_S`.

    Raises:
        ValueError: `timeout` is not more than 0, or is not a number.
    """
    from datetime import timedelta

    try:
        value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{name} must be a number of seconds or a timedelta, got {timeout!r:.80}") from None
    if value < -LONGEST_S:  # timedelta.max has overflowed in torch and become a large negative time
        return LONGEST_S
    if not value > 0:
        raise ValueError(f"{name} must be more than 0 s, got {value:g} s")
    return min(value, LONGEST_S)


# Flags of ``phalanx run`` that variables may set; the command reads these variables itself.
_FLAGS = """
    DRAIN DRAIN_FILE DRAIN_URL DRY_RUN HOST_LABEL LOCAL_ADDR LOCAL_RANKS_FILTER LOG_DIR MASTER_ADDR MASTER_PORT
    MAX_RESTARTS MEMORY METRICS MODULE MONITOR_INTERVAL NNODES NODE_RANK NO_KEEP NO_PIN NO_PRELOAD NO_PYTHON
    NO_USE_ENV NPROC_PER_NODE RDZV_BACKEND RDZV_CONF RDZV_ENDPOINT RDZV_ID REDIRECTS REGROW_AFTER REPLACE REPLICAS ROLE
    SHUTDOWN_TIMEOUT SIGNALS_TO_HANDLE SPARES STANDALONE START_METHOD TEE USE_ENV VERIFY WARM WARM_FOR
"""
SNAPSHOT_VARIABLE = "PHALANX_SNAPSHOTS"
"""Set by ``phalanx run`` for its ranks: the file in which ranks keep snapshots of their state."""
SHARED_VARIABLE = "PHALANX_SHARED"
"""Set by ``phalanx run`` for its ranks: the file in which data of `phalanx.share` outlives them, see `sharing.kept`."""
RECORD_VARIABLE = "PHALANX_RECORD"
"""Set by ``phalanx run`` and `phalanx.spawn` for their ranks: the file with the ranks' black boxes, see `record`."""
LAUNCH_VARIABLE = "PHALANX_LAUNCH"
"""Set by ``phalanx run`` and `phalanx.spawn` for their ranks: the facts of the launch, see `rendezvous.launched`."""
MEMORY_VARIABLE = "PHALANX_MEMORY"
"""Sets a flag of ``phalanx run`` that `phalanx.spawn` reads, too: whether ranks keep the memory that they free."""
EPOCH_VARIABLE = "PHALANX_EPOCH"
"""Set by ``phalanx run`` for its ranks: the job and the attempt, see `checkpoint.disk.claim`."""
REPLACE_VARIABLE = "PHALANX_REPLACE"
"""Backend that phalanx replaces, see `_torch.replace`: ``gloo``, or empty for none."""
VERIFY_VARIABLE = "PHALANX_VERIFY"
"""Asks phalanx groups to repeat operations on Gloo, see `backend.verify`: ``gloo``, ``gloo:K``, or empty for none."""
MISTAKEN_FOR_REPLACE = "PHALANX_REPLACE_GLOO"
"""Name easily mistaken for the variable of ``--replace-gloo``, which is PHALANX_REPLACE."""
OBEYED_BY_RANKS = (REPLACE_VARIABLE, MISTAKEN_FOR_REPLACE)
"""Variables that take effect at ``import torch``. A rank's script may set these variables, so if a launcher imports
torch before the script runs, they are unset during that import."""
ALLOCATION_VARIABLE = "PHALANX_ALLOCATION"
"""Set by ``phalanx run`` and `phalanx.spawn` for their ranks: how the ranks handle freed memory."""
COMMAND_VARIABLE = "PHALANX_COMMAND"
"""Set by ``phalanx run`` for its ranks: the command line of ``phalanx run``, for the report on the run."""
FOLDER_VARIABLE = "PHALANX_RUN_FOLDER"
"""Folder in which a `Trainer` keeps its run, instead of the folder that was passed to the `Trainer`."""
TRIAL_VARIABLE = "PHALANX_TRIAL"
"""Set by ``phalanx tune`` for the ranks of its trials, see `launch.rank_trial`."""
PROMPT_VARIABLE = "PHALANX_PROMPTS"
"""Set by ``phalanx run`` for its ranks: the socket at which the command lends its terminal to debuggers, or ""."""
SURVIVORS_VARIABLE = "PHALANX_SURVIVORS"
"""Set by ``phalanx run`` for its ranks: the socket at which ranks ask to be kept when another rank fails, or ""."""
COLUMNS_VARIABLE = "PHALANX_COLUMNS"
"""Set by ``phalanx run`` for its ranks: the columns that its terminal leaves beside the prefix of each line, or ""."""
PROCESS_VARIABLE = "PHALANX_PROCESS"
"""Set by ``phalanx run`` and `phalanx.spawn` for their ranks: the rank's own pid, see `is_rank`."""
WARM_VARIABLE = "PHALANX_WARM"
"""Asks ``phalanx run``, `phalanx.spawn` and `phalanx.testing` to start ranks from a warm process, see `launch.warm`."""
WARM_SERVER_VARIABLE = "PHALANX_WARM_SERVER"
"""Set only for a warm process: the path of the socket at which it accepts jobs."""
FAST_RANKS_VARIABLE = "PHALANX_FAST_RANKS"
"""Set only for the server of `phalanx.testing.fast_ranks`: the folder of its requests and answers."""
PREEMPTED_CODE = 75
"""Exit code of a rank that saved its state after it was preempted: EX_TEMPFAIL, try again later."""
_OF_LAUNCHES = frozenset(
    {
        *(SNAPSHOT_VARIABLE, LAUNCH_VARIABLE, ALLOCATION_VARIABLE, COMMAND_VARIABLE, FOLDER_VARIABLE, TRIAL_VARIABLE),
        *(
            WARM_SERVER_VARIABLE,
            FAST_RANKS_VARIABLE,
            RECORD_VARIABLE,
            SHARED_VARIABLE,
            PROMPT_VARIABLE,
            EPOCH_VARIABLE,
            SURVIVORS_VARIABLE,
        ),
        *(PROCESS_VARIABLE, COLUMNS_VARIABLE),
    }
)
LAUNCH_VARIABLES = _OF_LAUNCHES | {f"PHALANX_{flag}" for flag in _FLAGS.split()}


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def raw() -> Mapping[bytes, bytes]:
    """Return a live view of this process's environment in bytes, for quick comparisons."""
    return os.environ._data  # type: ignore[attr-defined]


def is_rank() -> bool:
    """Whether one of our launchers started this process as a rank.

    A process that a rank starts, such as a data loader's worker or a rank of torchrun, inherits `PROCESS_VARIABLE`,
    but has another pid. The variable is read from a copy of the environment, because `watch_reads` would treat a direct
    read as torch's.
    """
    return environment().get(PROCESS_VARIABLE) == str(os.getpid())


def host_name() -> str:
    """Return the name of this host for messages: PHALANX_HOST, or if that is not set, the machine's name."""
    import socket

    return os.environ.get("PHALANX_HOST", "") or socket.gethostname()


def is_on(word: str) -> bool:
    """Return whether the value of a switch turns the switch on."""
    return word.lower() in ("1", "true", "yes", "on")


def is_off(word: str) -> bool:
    """Return whether the value of a switch turns the switch off. For unknown words, both this and `is_on` are False."""
    return word.lower() in ("", "0", "false", "no", "off")


def replaces_gloo(word: str) -> bool:
    """Return whether a value of PHALANX_REPLACE asks for phalanx in place of Gloo.

    Raises:
        ValueError: The value is neither ``gloo`` nor empty.
    """
    if word not in ("", "gloo"):
        raise ValueError(f"must be gloo, or empty{did_you_mean(word, ['gloo'])}")
    return word == "gloo"


def verifies_every(word: str) -> int:
    """Return K if a value of PHALANX_VERIFY asks to verify every K-th call; 0 if no call is to be verified.

    Raises:
        ValueError: The value is not ``gloo``, ``gloo:K`` or empty.
    """
    if word in ("", "gloo"):
        return int(bool(word))
    engine, _, every = word.partition(":")
    if engine == "gloo" and every.isascii() and every.isdecimal() and int(every[:_MOST_DIGITS]) > 0:
        return int(every[:_MOST_DIGITS])
    raise ValueError("must be gloo, or gloo:K for every K-th call with K at least 1, or empty")


def update(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children."""
    os.environ.update(variables)


def change(variables: Mapping[str, str | None]) -> None:
    """Set variables for this process and its children; unset those whose value is None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def replace_all(variables: Mapping[str, str]) -> None:
    """Replace the whole environment of this process."""
    os.environ.clear()
    os.environ.update(variables)


def take(name: str) -> str:
    """Unset a variable that was meant only for this process, not for its children; return the variable's value."""
    return os.environ.pop(name)


def watch_reads(note: Callable[[str, str | None], None]) -> Callable[[], None]:
    """Call `note` with the name of each variable that Python code reads, and its value, or None if it is not set.

    A copy of the whole environment does not count as a read.

    Returns:
        Function that ends the watch.
    """
    environ: Any = os.environ
    encode, decode = environ.encodekey, environ.decodekey
    listed: deque[str] = deque()  # names that a copy of the environment has listed, and will read next, in this order

    def note_listed(key: bytes) -> str:
        listed.append(decode(key))
        return listed[-1]

    def note_read(name: str) -> bytes:
        key: bytes = encode(name)
        if listed and name == listed[0]:
            listed.popleft()
            return key
        listed.clear()
        value = raw().get(key)
        note(name, None if value is None else os.fsdecode(value))
        return key

    def stop() -> None:
        environ.encodekey, environ.decodekey = encode, decode

    environ.encodekey, environ.decodekey = note_read, note_listed
    return stop


def export(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Set those of the variables that are not set in this process, and return their names."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    return tuple(missing)


def withdraw(names: Iterable[str]) -> None:
    """Unset variables that `export` set."""
    for name in names:
        os.environ.pop(name, None)


def may_use_torchcomms() -> bool:
    """Return whether torch may use torchcomms for groups: a quick check, because asking torch loads more of phalanx."""
    return bool(environment().get("TORCH_DISTRIBUTED_USE_TORCHCOMMS"))


def wants_torchs_records() -> bool:
    """Whether the user has asked torch to record every operation, or to check the values of its tensors.

    The Flight Recorder, which torch enables by default, counts only if the user has set the size of its buffer, because
    recording costs 8 us a call.
    """
    sizes = [os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    return next((int(size) > 0 for size in sizes if size), False) or os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"


def is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes has set this variable because a service in the namespace is named ``phalanx``."""
    if name.endswith("_SERVICE_HOST") or "_SERVICE_PORT" in name:
        return True
    return "_PORT" in name and (environ.get(name, "").startswith(("tcp://", "udp://", "sctp://")) or "_TCP" in name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``, did you mean X?`` with the known name closest to a misspelled name; empty if no name is close."""
    near = nearest(name, known)
    return f", did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name closest to a misspelled name; empty if no known name is close.

    Args:
        cutoff: Least similarity at which a name counts as close, from 0 to 1; equal names have similarity 1.
    """
    import difflib  # imported here, because only errors need it

    known = sorted(known)
    near = [other for other in known if other.startswith(name)] or difflib.get_close_matches(name, known, 1, cutoff)
    return near[0] if near else ""


def unknown_argument(
    call: str, name: str, known: Iterable[str], meant: str | None = None, *, right: str = ""
) -> TypeError:
    """Return the error for a keyword argument that `call` does not accept.

    The message lists all arguments only if there is no better hint and if there are few arguments.

    Args:
        meant: Correct name, if `name` is another library's word for it.
        right: Code to write instead of the argument, if no other argument of this call replaces it.
    """
    known = list(known)
    meant = meant or ("" if right else nearest(name, known, cutoff=_GOOD_GUESS))
    if meant or right:
        hint = f", did you mean {meant}?" if meant else f"; right: {right}"
    elif len(known) > _MAX_LISTED:
        hint = f"; help(phalanx.{call.removeprefix('phalanx.')}) lists all"
    else:
        hint = f". It takes {', '.join(known)}"
    return TypeError(f"{call}: there is no argument {name}{hint}")
