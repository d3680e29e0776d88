"""The environment variables of phalanx: declared once, typed, read here alone.

An unknown ``PHALANX_*`` variable is an error, since it is a misspelled one that would silently do nothing. Those that
begin with ``PHALANX_TEST_`` belong to the project's own tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

BRIDGES = ("gloo", "mpi")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from the environment; the variable of ``stall_s`` is ``PHALANX_STALL_S``, and so on."""

    stall_s: float = 10.0
    """Seconds after which a waiting rank prints who is missing and where each rank stands."""
    spin_us: float = 50.0
    """Microseconds that a waiting rank spins (yields, where ranks share CPUs) before it sleeps; 0 sleeps at once."""
    one_shot_bytes: int = 64 * 1024
    """all_reduce up to this size (at most 65536): every rank reads every rank's data, in one synchronisation."""
    chunk_bytes: int = 64 * 1024
    """Size of the chunks in which larger messages are pipelined, at most 65536."""
    silence_s: float = 1.0
    """Seconds without a sign of life of another host's kernel after which the connection to it counts as lost."""
    bridge: str = "gloo"
    """The engine between hosts: ``gloo`` or ``mpi`` (mpi4py, started by mpirun)."""
    host: str = ""
    """Ranks with different values never share memory: several hosts on one, to try what crosses them."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Settings of one group, given as its ``pg_options``; the same on all of its ranks.

    Attributes:
        bridge: The engine between hosts, instead of what PHALANX_BRIDGE says.
        silence_s: Instead of PHALANX_SILENCE_S.
    """

    bridge: str | None = None
    silence_s: float | None = None

    def over(self, settings: Settings) -> Settings:
        """Return the settings with these in their place.

        Raises:
            ValueError: There is no such engine.
        """
        if self.bridge is not None and self.bridge not in BRIDGES:
            raise ValueError(f"GroupOptions: bridge must be one of {', '.join(BRIDGES)}, got {self.bridge!r}")
        return replace(settings, **{name: value for name, value in vars(self).items() if value is not None})


# Flags of ``phalanx run``, which reads them itself.
_FLAGS = """
    DRY_RUN LOCAL_ADDR LOCAL_RANKS_FILTER LOG_DIR MASTER_ADDR MASTER_PORT MAX_RESTARTS MODULE MONITOR_INTERVAL NNODES
    NODE_RANK NO_PIN NO_PRELOAD NO_PYTHON NO_USE_ENV NPROC_PER_NODE RDZV_BACKEND RDZV_CONF RDZV_ENDPOINT RDZV_ID
    REDIRECTS REGROW_AFTER ROLE SHUTDOWN_TIMEOUT SIGNALS_TO_HANDLE STANDALONE START_METHOD TEE USE_ENV
"""
SNAPSHOT_VARIABLE = "PHALANX_SNAPSHOTS"
"""Set by ``phalanx run`` for its ranks: the file in which they keep snapshots of their state."""
FOLDER_VARIABLE = "PHALANX_RUN_FOLDER"
"""Where a `Trainer` keeps its run, whatever folder it was given."""
PREEMPTED_CODE = 75
"""Exit code of a rank that was asked to make room and has saved: EX_TEMPFAIL, try again later."""
LAUNCH_VARIABLES = frozenset((SNAPSHOT_VARIABLE, FOLDER_VARIABLE, *(f"PHALANX_{flag}" for flag in _FLAGS.split())))


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Set the variables that this process lacks, and return their names."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    return tuple(missing)


def withdraw(names: Iterable[str]) -> None:
    """Unset variables that `export` has set."""
    for name in names:
        os.environ.pop(name, None)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that `environ` gives, by default this process's environment.

    Raises:
        ValueError: A ``PHALANX_*`` variable is unknown, not a number, negative, or names no engine.
    """
    environ = os.environ if environ is None else environ
    known = {f"PHALANX_{field.name.upper()}": field for field in fields(Settings)}
    for name in sorted(environ):
        is_ours = name.startswith("PHALANX_") and not name.startswith("PHALANX_TEST_")
        if is_service_link(name, environ):
            continue
        if is_ours and name not in known and name not in LAUNCH_VARIABLES:
            raise ValueError(f"unknown environment variable {name}{did_you_mean(name, {*known, *LAUNCH_VARIABLES})}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        text = environ.get(name)
        if text is None:
            continue
        if field.type == "str":
            values[field.name] = text
            continue
        try:
            value = (int if field.type == "int" else float)(text)
        except ValueError:
            value = -1
        if not 0 <= value < math.inf:  # nor not-a-number
            raise ValueError(f"{name} must be a number, at least 0, got {text!r}")
        values[field.name] = value
    if values.get("bridge", BRIDGES[0]) not in BRIDGES:
        raise ValueError(f"PHALANX_BRIDGE must be one of {', '.join(BRIDGES)}, got {values['bridge']!r}")
    return Settings(**values)


def is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes has set this variable, because a service in the namespace is named like us."""
    if name.endswith("_SERVICE_HOST") or "_SERVICE_PORT" in name:
        return True
    return "_PORT" in name and (environ.get(name, "").startswith(("tcp://", "udp://", "sctp://")) or "_TCP" in name)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``, did you mean X?`` for the known name nearest to a misspelt one; empty if none is near."""
    import difflib  # only on the way to an error

    known = sorted(known)
    near = [other for other in known if other.startswith(name)] or difflib.get_close_matches(name, known, 1)
    return f", did you mean {near[0]}?" if near else ""
