"""A random program: groups and the calls of their ranks, as data that can be drawn, printed, shrunk and run again.

Every choice is drawn from a seed, so a seed determines a program. Sizes are chosen near the limits of the core's
algorithms, and near fractions of these limits: 48 bytes fit into a cache line with a flag; from 32 KiB on, peers read
each other's memory; stages, slots and fragments have 64 KiB; rings have 256 KiB.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from phalanx._torch import version
from phalanx.testing.fuzz.calls import CALLS, MORE_CALLS, REDUCING, Call
from phalanx.testing.fuzz.memory import COMPLEX, FLOATS, LAYOUTS, Room

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_STORED = (torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2)
REDUCED_DTYPES = (*FLOATS, *FLOATS, *COMPLEX, *_SIGNED, *_UNSIGNED, torch.bool)
MOVED_DTYPES = (*REDUCED_DTYPES, *_STORED)

_REDUCING = (*REDUCING, "reduce_scatter_uneven", "reduce_scatter_coalesced", "functional_all_reduce",
             "functional_reduce_scatter")  # fmt: skip
# Sizes of a block in bytes, each with its weight. Most sizes are small, so that many calls run in little time.
_EDGES = (
    (0, 1), (1, 3), (8, 4), (48, 4), (63, 2), (64, 2), (65, 2), (1000, 4), (4096, 3), (16_384, 3), (32_768, 4),
    (65_536, 5), (98_304, 2), (131_072, 3), (196_608, 2), (262_144, 3), (524_288, 1), (1_048_576, 1), (1_300_000, 1),
)  # fmt: skip
_MOST_OF_ALL = 6 << 20  # largest total size of a rank's blocks in one call, in bytes
_MULTIPLIED = {
    "all_to_all_single_split": 12, "functional_all_to_all": 12, "all_reduce_coalesced": 2, "all_gather_coalesced": 2,
    "reduce_scatter_coalesced": 2, "all_gather_lists": 2, "messages": 3, "batched_messages": 3, "blocking_messages": 3,
    "reordered_messages": 3,
}  # fmt: skip
_WEIGHTS = {
    "all_reduce": 5, "messages": 4, "reordered_messages": 3, "batched_messages": 2, "reduce_scatter_tensor": 2,
    "all_gather_into_tensor": 2, "broadcast": 2,
}  # fmt: skip
# in bytes: from one fragment to several, and more than a ring can hold
_LARGE_MESSAGES = (40_000, 65_536, 100_000, 262_144, 600_000)
_OBJECTS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
)  # fmt: skip
_IN_PLACE = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
# Before torch 2.14, torch's dispatcher does not call Python backends for functional collectives.
_KINDS = [name for name in (*CALLS, *MORE_CALLS) if not name.startswith("functional") or version() >= (2, 14)]
_MOST_GROUPS = 4
IN_ORDER: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
"""Arguments of ``new_group`` for a group whose ranks keep the given order; empty if this torch always sorts them."""
_MOST_LAG = 6


@dataclass(frozen=True)
class GroupPlan:
    """A group: its global ranks, in the group's order, and the way in which it is made: world, new, local or split."""

    ranks: tuple[int, ...]
    how: str = "new"


@dataclass(frozen=True)
class Step:
    """One call that all ranks of a group make: a `Call` without a rank and without memory; other fields as in `Call`.

    Attributes:
        group: Index of the group in the program.
        dtype: Name of the dtype, without ``torch.``.
        reduce_op: Name of the reduction.
        lag: Number of later steps that begin before the program waits for this call, if it is asynchronous.
    """

    name: str
    group: int = 0
    shape: tuple[int, ...] = (7,)
    dtype: str = "float32"
    reduce_op: str = "SUM"
    root: int = 0
    seed: int = 0
    async_op: bool = False
    lag: int = 0
    in_place: bool = False
    factor: float | None = None
    values: str = "small"
    source_layout: str = "plain"
    target_layout: str = "plain"

    def call(self, group: dist.ProcessGroup) -> Call:
        """Return this rank's call, on a group of any backend; its memory has the layouts that the step names."""
        return Call(
            self.name,
            group,
            self.shape,
            getattr(torch, self.dtype),
            getattr(dist.ReduceOp, self.reduce_op),
            self.root,
            self.seed,
            self.async_op,
            self.in_place,
            self.factor,
            self.values,
            Room(self.source_layout, self.target_layout),
        )

    @property
    def is_reduction(self) -> bool:
        return self.name in _REDUCING

    def __str__(self) -> str:
        words = [self.name]
        if self.name not in _OBJECTS and "barrier" not in self.name:
            words.append(f"of {'x'.join(map(str, self.shape))} {self.dtype}")
        if self.is_reduction:
            words.append(self.reduce_op)
        words += ["in place"] * self.in_place + [f"waited for {self.lag} steps later"] * self.async_op
        return " ".join(words)


@dataclass(frozen=True)
class Program:
    """A program that all ranks run.

    Attributes:
        world_size: Number of ranks.
        hosts: Number of ranks on each simulated host; empty if all ranks are on one host.
        groups: Groups; the first is the world.
        steps: Calls, in the order in which each rank makes those of its groups.
        environ: Environment variables that set the backend's settings.
        seed: Seed for the delays between calls.
        num_rounds: Number of times that the program runs on phalanx, each time with different delays.
    """

    world_size: int
    hosts: tuple[int, ...] = ()
    groups: tuple[GroupPlan, ...] = ()
    steps: tuple[Step, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    num_rounds: int = 2

    def with_steps(self, steps: Sequence[Step]) -> Program:
        return replace(self, steps=tuple(steps))

    @property
    def place(self) -> str:
        """Description of the ranks and hosts on which the program runs."""
        hosts = f" on {len(self.hosts)} hosts ({' + '.join(map(str, self.hosts))})" if self.hosts else ""
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}{hosts}"


# ---- drawing --------------------------------------------------------------------------------------------------------


def draw_place(draw: random.Random, world_sizes: Sequence[int], num_hosts: int | None) -> Program:
    """Return a program without steps, with a random number of ranks, hosts and settings.

    Args:
        draw: Source of choices.
        world_sizes: Numbers of ranks from which to choose.
        num_hosts: Number of hosts over which the ranks are divided; None for a random number, usually 1.
    """
    size = draw.choice(list(world_sizes))
    hosts: tuple[int, ...] = ()
    if num_hosts is None and size > 1 and draw.random() < 0.3:
        num_hosts = draw.randint(2, min(size, 3))
        cuts = sorted(draw.sample(range(1, size), num_hosts - 1))
        hosts = tuple(high - low for low, high in zip([0, *cuts], [*cuts, size], strict=True))
    elif num_hosts is not None and num_hosts > 1:
        hosts = tuple(size // num_hosts + (h < size % num_hosts) for h in range(num_hosts))
    environ = {}
    if draw.random() < 0.4:
        environ["PHALANX_CHUNK_BYTES"] = str(draw.choice((4096, 5000, 16_384, 40_000)))
    if draw.random() < 0.3:
        environ["PHALANX_ONE_SHOT_BYTES"] = str(draw.choice((0, 1000, 16_384)))
    if draw.random() < 0.3:
        environ["PHALANX_SPIN_US"] = str(draw.choice((0, 5, 500)))
    return Program(size, hosts, (GroupPlan(tuple(range(size)), "world"),), environ=environ)


def draw_groups(draw: random.Random, world_size: int) -> tuple[GroupPlan, ...]:
    """Return the world and some other groups, which may overlap, have a single rank, or have another order of ranks."""
    everyone = list(range(world_size))
    groups = [GroupPlan(tuple(everyone), "world")]
    for _ in range(draw.randint(0, _MOST_GROUPS - 1)):
        ranks = draw.sample(everyone, draw.choice((1, *2 * everyone[1:], world_size)))
        how = draw.choice(("new", "new", "local", "split") if version() >= (2, 15) else ("new", "new", "local"))
        if how != "new" or not IN_ORDER:
            ranks.sort()
        groups.append(GroupPlan(tuple(ranks), how))
    return tuple(groups)


def draw_program(draw: random.Random, place: Program, num_steps: int) -> Program:
    """Return a program of `num_steps` random steps, with the ranks, hosts and settings of `place`."""
    groups = draw_groups(draw, place.world_size)
    names = draw.choices(_KINDS, [_WEIGHTS.get(name, 1) for name in _KINDS], k=num_steps)
    steps = [draw_step(draw, name, groups) for name in names]
    return replace(place, groups=groups, steps=tuple(steps), seed=draw.randrange(1 << 30))


def draw_step(draw: random.Random, name: str, groups: Sequence[GroupPlan]) -> Step:
    """Return a step of one kind."""
    group = draw.randrange(len(groups)) if draw.random() < 0.6 else 0
    size = len(groups[group].ranks)
    reduces = name in _REDUCING
    dtype = draw.choice(REDUCED_DTYPES if reduces or name.startswith("functional") else MOVED_DTYPES)
    reduce_op, factor = draw_reduction(draw, name, dtype) if reduces else ("SUM", None)
    values = "bits"
    if reduces:
        values = "small" if reduce_op == "PRODUCT" else draw.choice(("small", "real", "real", "rare"))
    return Step(
        name,
        group,
        draw_shape(draw, name, dtype, size),
        str(dtype).removeprefix("torch."),
        reduce_op,
        draw.randrange(size),
        draw.randrange(1 << 40),
        draw.random() < 0.5,
        draw.randrange(_MOST_LAG),
        name in _IN_PLACE and draw.random() < 0.3,
        factor,
        values,
        draw.choice(LAYOUTS) if draw.random() < 0.4 else "plain",
        draw.choice(LAYOUTS) if draw.random() < 0.4 else "plain",
    )


def draw_reduction(draw: random.Random, name: str, dtype: torch.dtype) -> tuple[str, float | None]:
    """Return the name of a reduction that the dtype supports, and the factor if the reduction is ``PREMUL_SUM``."""
    if dtype.is_complex:
        return draw.choice(("SUM", "SUM", "AVG")), None
    if dtype.is_floating_point:
        op = draw.choice(("SUM", "SUM", "SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM"))
        if op == "PREMUL_SUM" and not name.startswith("functional"):
            return op, draw.choice((0.5, 2.0, -1.5))
        return (op, None) if op != "PREMUL_SUM" else ("SUM", None)
    ops = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    return draw.choice(ops if dtype is torch.bool else [*ops, "AVG"]), None


def draw_shape(draw: random.Random, name: str, dtype: torch.dtype, size: int) -> tuple[int, ...]:
    """Return the shape of a block. Its size, alone or with its peers' blocks, is near a limit of an algorithm."""
    num_bytes = draw.choices([edge for edge, _ in _EDGES], [weight for _, weight in _EDGES])[0]
    sharers = draw.choice((1, 1, max(size - 1, 1), size))
    if "messages" in name and draw.random() < 0.5:
        num_bytes, sharers = draw.choice(_LARGE_MESSAGES), 1
    most = _MOST_OF_ALL // (size * _MULTIPLIED.get(name, 1))
    num = min(num_bytes // sharers, most) // dtype.itemsize + draw.choice((0, 0, -1, 1, 2, 7))
    num = max(num, 0)
    if draw.random() < 0.3 and num > 1:
        columns = draw.choice((1, 2, 3, 5, size))
        return (max(num // columns, 1), columns)
    return (num,)


def describe(program: Program) -> list[str]:
    """Return a line for each step."""
    return [f"{step} among ranks {list(program.groups[step.group].ranks)}" for step in program.steps]


def as_source(value: Any, indent: str = "") -> str:
    """Return the Python source of a program, one step per line, without default values."""
    if not isinstance(value, Program):
        given = {name: getattr(value, name) for name in value.__dataclass_fields__}
        default = {name: one.default for name, one in value.__dataclass_fields__.items()}
        return f"{type(value).__name__}({', '.join(f'{n}={v!r}' for n, v in given.items() if v != default[n])})"
    lines = [
        f"world_size={value.world_size},",
        f"hosts={value.hosts!r},",
        f"environ={value.environ!r},",
        f"seed={value.seed},",
        f"num_rounds={value.num_rounds},",
        "groups=(",
        *(f"    {as_source(group)}," for group in value.groups),
        "),",
        "steps=(",
        *(f"    {as_source(step)}," for step in value.steps),
        "),",
    ]
    return "Program(\n" + "".join(f"    {line}\n" for line in lines) + ")"
