"""Ranks that agree on a checkpoint before any of them touches it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx._errors import CheckpointError, GroupUnusable, printable

_MEETING_S = 60.0


def place() -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 of 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def meet(op: str) -> None:
    """Return when every rank has called this.

    Raises:
        CheckpointError: Another rank does something else, or nothing for a minute.
    """
    rank, world_size = place()
    backend = str(dist.get_backend_config()) if world_size > 1 else ""
    if "phalanx" not in backend and "gloo" not in backend:  # only these can tell who is missing
        return
    world: Any = dist.group.WORLD
    try:
        # Not dist.monitored_barrier, which before torch 2.14 refuses a Gloo that stands beside NCCL.
        world.monitored_barrier(timedelta(seconds=_MEETING_S), True)
    except GroupUnusable:
        raise  # no rank is late: this one cannot call anything
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {rank}: checkpoint.{op}: not every rank has called it. All must, not only rank 0: take the call "
            f"out of `if rank == 0:`. {error}",
            op=op,
            ranks=getattr(error, "ranks", ()),
        ) from error


def gather(op: str, message: Any) -> list[Any]:
    """Return the messages of all ranks, in rank order.

    Raises:
        CheckpointError: As in `meet`.
    """
    _, world_size = place()
    if world_size == 1:
        return [message]
    meet(op)
    messages: list[Any] = [None] * world_size
    dist.all_gather_object(messages, message)
    return messages


def largest(numbers: Sequence[int]) -> list[int]:
    """Return the largest of each number over all ranks."""
    _, world_size = place()
    if world_size == 1:
        return [*numbers]
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, [*numbers])
    return [max(column) for column in zip(*every, strict=True)]


def raise_problems(op: str, problems: Sequence[str], cause: Exception | None = None, about: str = "") -> None:
    """Raise on every rank what any rank has found wrong, each rank's in a line; once if all say the same.

    Args:
        about: Words for step and folder, which follow the operation's name.
    """
    found = {rank: printable(problem, keep="\n\t") for rank, problem in enumerate(problems) if problem}
    if found:
        lines = "".join(f"\nrank {rank}: {problem}" for rank, problem in found.items())
        if len(found) == 1:
            lines = f" {lines[1:]}"
        elif len(found) == len(problems) and len({*found.values()}) == 1:
            lines = f" ranks 0 to {len(found) - 1}: {found[0]}"
        about = printable(f" {about}" if about else "")
        raise CheckpointError(f"checkpoint.{op}{about}:{lines}", op=op, ranks=tuple(found)) from cause
