"""Makes torch's `shrink_group` return the group that a backend provides.

torch wraps the backend that `shrink` returns in a plain group named gloo. This group would lack the methods of our
groups, and the logger of torch's DDP would cast our backend to Gloo's class. So a backend may provide its own group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MAKER = "_create_shrunk_process_group"


def can_shrink() -> bool:
    """Whether this torch shrinks groups in the way that `return_own_groups` expects; 2.14 does."""
    from torch.distributed import distributed_c10d as c10d

    from phalanx._torch import C10dBackend

    return hasattr(C10dBackend, "reconfigure") and hasattr(c10d, _MAKER)


def return_own_groups(group_of: Callable[[Any], Any]) -> None:
    """Make `dist.shrink_group` return the group that a backend provides.

    Args:
        group_of: Function that returns the group for a backend that `shrink` made, or None for other backends.
    """
    from torch.distributed import distributed_c10d as c10d

    from phalanx import _torch

    torchs = getattr(c10d, _MAKER)

    @functools.wraps(torchs)
    def create(new_backend: Any, remaining_ranks: list[int], metadata: Any, is_default_group: bool) -> Any:
        group = group_of(new_backend)
        if group is None:
            return torchs(new_backend, remaining_ranks, metadata, is_default_group)
        # torch passes ranks within the group here, although its caller needs global ranks, which shrinking the world
        # does not renumber.
        remaining_ranks[:] = group.global_ranks
        _torch.set_group_name(group, metadata["new_group_name"])
        _torch.set_group_desc(
            group, "default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk"
        )
        return group

    setattr(c10d, _MAKER, create)
