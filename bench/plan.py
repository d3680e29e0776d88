"""The points to measure, and the targets."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

KiB, MiB = 1024, 1024 * 1024

LABELS = {
    "phalanx": "phalanx",
    "phalanx_no_recorder": "phalanx, no recorder",
    "core": "core alone",
    "core_unchecked": "core, calls not compared",
    "gloo": "Gloo",
    "mpi": "Open MPI",
    "memcpy": "memcpy",
    "direct": "direct way",
    "front_end": "torch's front end",
}
"""Names of the engines in reports. `phalanx_no_recorder` is `phalanx` with torch's Flight Recorder turned off."""
COLUMNS = ("phalanx", "gloo", "mpi", "core", "memcpy")

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
CALL_CHECK = "call_check"
"""Name of the point that compares the core's all_reduce with and without comparing calls, in many short turns."""
CALL_CHECK_SIZES = (4, KiB)
CALL_CHECK_ROUNDS = 300
CALL_CHECK_TURN_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The operations, sizes and rounds to measure."""

    ops: tuple[str, ...] = OPS
    world_sizes: tuple[int, ...] = (2, 4, 8)
    all_reduce_sizes: tuple[int, ...] = tuple(4**i for i in range(1, 15))  # 4 B to 256 MiB
    sizes: tuple[int, ...] = (4, 64, KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB)
    max_oversubscribed_bytes: int = MiB  # largest size with more than 4 ranks
    rounds: int = 11
    turn_s: float = 0.01  # duration of one engine's turn in a round; three times as long if ranks share cores
    point_s: float = 3.0  # approximate time limit for a point: slow operations get fewer rounds, but at least 3
    mpi: bool = True


QUICK = {
    "world_sizes": (2, 4),
    "all_reduce_sizes": (4, KiB, 64 * KiB, MiB, 16 * MiB),
    "sizes": (4, KiB, 64 * KiB, MiB, 16 * MiB),
    "rounds": 5,
    "turn_s": 0.004,
    "point_s": 0.5,
}


@dataclass(frozen=True)
class Point:
    """One operation, size and world size, measured on several engines in turns.

    `size_bytes` is the size of a rank's larger buffer, which contains all data that is scattered, gathered or
    exchanged. The buffer has at least one element per rank. For a barrier, `size_bytes` is 0.
    """

    op: str
    size_bytes: int
    world_size: int
    engines: tuple[str, ...]
    rounds: int
    turn_s: float


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def plan(settings: Settings, world_size: int) -> Iterator[Point]:
    """Yield the points to measure with `world_size` ranks."""
    turn_s = settings.turn_s * (3 if world_size > usable_cpus() else 1)
    base = ("phalanx", "gloo", "mpi") if settings.mpi else ("phalanx", "gloo")
    for op in settings.ops:
        sizes = settings.all_reduce_sizes if op == "all_reduce" else (0,) if op == "barrier" else settings.sizes
        for size in sizes:
            if world_size > 4 and size > settings.max_oversubscribed_bytes:
                continue
            engines = base
            if op == "all_reduce" and world_size == 2:
                recorder = ("phalanx_no_recorder",) if size == 4 else ()
                engines = ("phalanx", *recorder, "core", *base[1:], "memcpy")
            yield Point(op, size, world_size, engines, settings.rounds, turn_s)
    if "all_reduce" in settings.ops and world_size == 2:
        for size in CALL_CHECK_SIZES:
            rounds = max(settings.rounds, CALL_CHECK_ROUNDS * settings.rounds // Settings.rounds)
            yield Point(CALL_CHECK, size, 2, ("core", "core_unchecked"), rounds, CALL_CHECK_TURN_S)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target for every measured size from `low` to `high`.

    ``at_least`` says how many times faster than `baseline` the `engine` must be. ``at_most`` limits the engine's time:
    as a multiple of the time of `baseline`, or in seconds if there is no baseline.
    """

    op: str
    low: int
    high: int
    engine: str = "phalanx"
    baseline: str | None = "gloo"
    world_size: int = 2
    at_least: float | None = None
    at_most: float | None = None

    def covers(self, op: str, size_bytes: int, world_size: int) -> bool:
        return op == self.op and self.low <= size_bytes <= self.high and world_size == self.world_size

    def reached(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= self.at_most

    def bound_text(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}x {LABELS[self.baseline]}"
        if self.baseline is None:
            return f"at most {self.at_most * 1e6:g} us"
        return f"at most {self.at_most:g} of {LABELS[self.baseline]}'s time"

    def text(self) -> str:
        """Return the target in words, as "2 ranks: all_reduce 4 B to 256 KiB at least 30x Gloo"."""
        sizes = size_text(self.low) if self.low == self.high else f"{size_text(self.low)} to {size_text(self.high)}"
        if self.low % 2:  # `low` is one byte more than a round number
            sizes = f"above {size_text(self.low - 1)}"
        subject = self.op if self.engine == "phalanx" else f"{self.op} ({LABELS[self.engine]})"
        return f"{self.world_size} ranks: {subject}{f' {sizes}' if self.high else ''} {self.bound_text()}"


def _targets() -> Iterator[Target]:
    largest = 256 * MiB
    yield Target(op="all_reduce", low=4, high=256 * KiB, at_least=30)
    yield Target(op="all_reduce", low=MiB, high=MiB, at_least=10)
    yield Target(op="all_reduce", low=16 * MiB, high=16 * MiB, at_least=8)
    yield Target(op="all_reduce", low=64 * MiB, high=largest, at_least=5)
    yield Target(op="reduce_scatter", low=4, high=largest, at_least=8)
    for op in OPS:
        if op == "barrier":
            yield Target(op=op, low=0, high=0, at_least=5)
        elif op not in ("all_reduce", "reduce_scatter"):
            yield Target(op=op, low=4, high=MiB, at_least=5)
            yield Target(op=op, low=MiB + 1, high=largest, at_least=2.5)
    yield Target(op="all_reduce", low=4, high=4, baseline=None, at_most=8e-6)
    yield Target(op="all_reduce", low=4, high=4, engine="phalanx_no_recorder", baseline=None, at_most=8e-6)
    yield Target(op="all_reduce", low=4, high=256 * KiB, world_size=4, at_least=10)
    yield Target(op="all_reduce", low=256 * KiB + 1, high=largest, world_size=4, at_least=3)
    yield Target(op="all_reduce", low=4, high=4, world_size=8, at_least=20)
    yield Target(op="all_reduce", low=4, high=KiB, engine="core", baseline=None, at_most=1e-6)
    yield Target(op="all_reduce", low=16 * KiB, high=largest, engine="core", baseline="mpi", at_least=2)
    yield Target(op="all_reduce", low=largest, high=largest, baseline="memcpy", at_most=1.5)
    yield Target(op="all_reduce", low=largest, high=largest, baseline="memcpy", at_most=1.25)
    yield Target(op=CALL_CHECK, low=4, high=KiB, engine="core", baseline="core_unchecked", at_most=1.02)


TARGETS = tuple(_targets())


def size_text(size_bytes: int) -> str:
    """Return the size in units, such as "4 B" or "256 KiB"."""
    for unit, factor in (("MiB", MiB), ("KiB", KiB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def parse_names(only: str, known: Collection[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the comma-separated names in the value of ``--only``; for an unknown name, exit with a usage error."""
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            parser.error(f"--only takes {', '.join(known)}; got {name}")
    return names


def parse_size(text: str) -> int:
    """Return the number of bytes for a text such as "4", "4B", "16K", "16KiB" or "1M".

    Raises:
        ValueError: `text` has another form.
    """
    number = text.strip().removesuffix("iB").removesuffix("B")
    factor = {"K": KiB, "M": MiB}.get(number[-1:], 1)
    return int(number.rstrip("KM")) * factor
