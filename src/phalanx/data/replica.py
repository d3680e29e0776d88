"""This process's rank, for code that divides data; an error if the rank is not known yet."""

from __future__ import annotations

import torch.distributed as dist

from phalanx import _env
from phalanx.wire.rank_group import RankGroup


def lacks_group() -> bool:
    """Whether this process was started as one of several and has no process group yet."""
    is_initialized = dist.is_available() and dist.is_initialized()
    return not is_initialized and int(_env.environment().get("WORLD_SIZE") or 1) > 1


def rank_and_size(rank: int | None = None, num_replicas: int | None = None) -> tuple[int, int]:
    """Return the rank and the number of ranks: as given, else those of the default group, else 0 and 1.

    Raises:
        RuntimeError: This process was started as one of several and has no process group yet, so each rank would take
            all data.
        ValueError: `rank` is outside the group.
    """
    if rank is None or num_replicas is None:
        if lacks_group():
            raise RuntimeError(
                "data can't be divided among the ranks before there is a process group: call phalanx.init() or "
                "init_process_group() first, or pass num_replicas and rank"
            )
        world = RankGroup()
        rank = world.rank if rank is None else rank
        num_replicas = world.world_size if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank must lie in [0, {num_replicas}), got {rank}")
    return rank, num_replicas
