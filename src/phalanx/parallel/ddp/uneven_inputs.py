"""Finds the ranks that still have data; adds a hint about ``join()`` to errors that ranks without data may cause."""

from __future__ import annotations

import torch.distributed as dist

from phalanx._errors import RankFailed
from phalanx.wire.rank_group import RankGroup


def active_ranks(group: dist.ProcessGroup, *, active: bool) -> list[int]:
    """Return the ranks of the group that pass a true `active`, in order. Every rank must call this."""
    return [rank for rank, [is_active] in enumerate(RankGroup(group).gather_numbers([active])) if is_active]


def add_hint(error: Exception, doing: str) -> None:
    """Add a note to an error, saying that another rank may have run out of data, unless the error names a failed rank.

    Args:
        error: Error that this rank got while it waited for other ranks.
        doing: Phrase for the rank's action, which completes "rank 0 was".
    """
    if hasattr(error, "add_note") and not isinstance(error, RankFailed):  # from Python 3.11 on
        error.add_note(
            f"rank {dist.get_rank()} was {doing}. If another rank ran out of data earlier: give all ranks the same "
            "number of batches (DistributedSampler does, with pad=True or drop_last=True), or run the loop within: "
            "with model.join():"
        )
