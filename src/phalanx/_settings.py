"""Settings from the environment and from a group's options: typed, each with its range.

An unknown ``PHALANX_*`` variable is an error, because a misspelled variable would otherwise silently have no effect.
Variables that begin with ``PHALANX_TEST_`` belong to the project's own tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from phalanx._env import (
    LAUNCH_VARIABLES,
    LONGEST_S,
    MISTAKEN_FOR_REPLACE,
    REPLACE_VARIABLE,
    did_you_mean,
    environment,
    is_service_link,
    verifies_every,
)

BRIDGES = ("gloo", "mpi")


def _ranged(default: Any, least: float, most: float) -> Any:
    return field(default=default, metadata={"range": (least, most)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from the environment: ``PHALANX_STALL_S`` sets `stall_s`, and so on for every field."""

    stall_s: float = _ranged(10.0, 0.1, LONGEST_S)
    """Seconds after which a waiting rank reports which ranks are missing and what each is doing."""
    spin_us: float = _ranged(50.0, 0, 1e6)
    """Microseconds for which a waiting rank spins, or yields if ranks share CPUs, before it sleeps; 0 to sleep at once.
    """
    one_shot_bytes: int = _ranged(64 * 1024, 0, 64 * 1024)
    """Largest all_reduce in which every rank reads the data of all ranks after one synchronization. Must be equal on
    all ranks."""
    chunk_bytes: int = _ranged(64 * 1024, 4096, 64 * 1024)
    """Size of the chunks in which larger messages are pipelined. Must be equal on all ranks."""
    silence_s: float = _ranged(1.0, 0.1, 86400)
    """Seconds without a sign of life from another host's kernel after which the connection to it counts as lost."""
    bridge: str = "gloo"
    """Engine between hosts: ``gloo`` or ``mpi`` (mpi4py, started by mpirun)."""
    verify: str = ""
    """Engine that repeats operations to compare results: ``gloo``, or ``gloo:K`` for every K-th operation; empty for
    none. Must be equal on all ranks."""
    host: str = ""
    """Name of a simulated host. Ranks with different names share no memory, so one machine simulates several hosts."""


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"PHALANX_{name.upper()}"


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Settings of one group: the ``pg_options`` of ``init_process_group`` or ``new_group``; must be equal on all ranks.

    Attributes:
        bridge: Engine between hosts, "gloo" or "mpi"; None for the value of PHALANX_BRIDGE.
        silence_s: Seconds without a sign of life after which a connection to another host counts as lost; None for the
            value of PHALANX_SILENCE_S.

    Example:
        >>> options = phalanx.GroupOptions(silence_s=5)
        >>> group = dist.new_group(backend="phalanx", pg_options=options)
    """

    bridge: str | None = None
    silence_s: float | None = None

    def over(self, settings: Settings) -> Settings:
        """Return `settings`, with each option that is not None in place of the setting of the same name.

        Raises:
            ValueError: The engine does not exist, or a number is out of range.
            TypeError: A value is not a number.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        for one in fields(Settings):
            if one.name not in given:
                continue
            if one.type != "str" and (
                isinstance(given[one.name], bool) or not isinstance(given[one.name], (int, float))
            ):
                raise TypeError(f"GroupOptions: {one.name} must be a number, got {given[one.name]!r}")
            _check(f"GroupOptions: {one.name}", one, given[one.name])
        return replace(settings, **given)


def _check(name: str, setting: Field[Any], value: Any, shown: object = None) -> None:
    """Raise ValueError if a setting can't have this value."""
    shown = value if shown is None else shown
    if setting.name == "bridge" and value not in BRIDGES:
        raise ValueError(f"{name} must be one of {', '.join(BRIDGES)}, got {shown!r}")
    if setting.name == "verify":
        try:
            verifies_every(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}, got {shown!r}") from None
    if "range" in setting.metadata:
        least, most = setting.metadata["range"]
        if not least <= value <= most:  # also rejects NaN
            kind = "a whole number" if setting.type == "int" else "a number"
            raise ValueError(f"{name} must be {kind} in [{least:.12g}, {most:.12g}], got {shown!r}")


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in `environ`; by default, in this process's environment.

    Raises:
        ValueError: A ``PHALANX_*`` variable is unknown, is not a number, is out of range or names no engine.
    """
    environ = environment() if environ is None else environ
    known = {variable_of(setting.name): setting for setting in fields(Settings)}
    for name in sorted(environ):
        is_ours = name.startswith("PHALANX_") and not name.startswith("PHALANX_TEST_")
        if is_service_link(name, environ):
            continue
        if name == MISTAKEN_FOR_REPLACE:
            raise ValueError(f"unknown environment variable {name}: set {REPLACE_VARIABLE}=gloo")
        if is_ours and name not in known and name not in LAUNCH_VARIABLES:
            raise ValueError(f"unknown environment variable {name}{did_you_mean(name, {*known, *LAUNCH_VARIABLES})}")
    values: dict[str, Any] = {}
    for name, setting in known.items():
        text = environ.get(name)
        if text is None:
            continue
        value: Any = text
        if setting.type != "str":
            try:
                value = (int if setting.type == "int" else float)(text)
            except ValueError:
                value = math.nan
        _check(name, setting, value, shown=text)
        values[setting.name] = value
    return Settings(**values)
