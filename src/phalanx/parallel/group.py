"""The process group that data parallel training runs in."""

from __future__ import annotations

import torch.distributed as dist


def group_or_world(process_group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return the group as given, else of the whole world.

    Raises:
        ValueError: There is no process group yet.
    """
    group = process_group or dist.group.WORLD
    if group is None:
        raise ValueError(
            f"{caller}: there is no process group yet; call phalanx.init() or "
            'torch.distributed.init_process_group("phalanx") first'
        )
    return group
