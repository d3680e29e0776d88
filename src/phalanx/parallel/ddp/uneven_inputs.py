"""Ranks with different numbers of batches: which still have data, a hint for those that wait in vain, and `Shadow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from phalanx._errors import RankFailed
from phalanx.wire.rank_group import RankGroup

if TYPE_CHECKING:
    from phalanx.parallel.ddp.reducer import Reducer
    from phalanx.parallel.ddp.replica import Replica


def active_ranks(group: dist.ProcessGroup, *, active: bool) -> list[int]:
    """Return the ranks of the group that passed True, in order. Every rank calls it."""
    return [rank for rank, [is_active] in enumerate(RankGroup(group).gather_numbers([active])) if is_active]


def add_hint(error: Exception, doing: str) -> None:
    """Add a note to an error that another rank may have run out of data, unless the error names a rank that failed.

    Args:
        error: Error that a rank met while it waited for others.
        doing: Action of the rank, which completes "rank 0 was".
    """
    if hasattr(error, "add_note") and not isinstance(error, RankFailed):  # Python 3.11
        error.add_note(
            f"rank {dist.get_rank()} was {doing}. If another rank ran out of data earlier: give all ranks the same "
            "number of batches (DistributedSampler does, with pad=True or drop_last=True), or run the loop within: "
            "with model.join():"
        )


class Shadow(JoinHook):
    """Contributes zeros on a rank that has run out of data, within ``join()``, while other ranks continue.

    Args:
        replica: Model that the rank has trained until then.
        reducer: Reducer of the model's gradients.
        follow_forward: Function that takes part in a forward pass of the other ranks, and returns whether any of them
            averages gradients.
        with_buffers: Whether the model ends up with the buffers of the last rank that had data.
    """

    def __init__(
        self, replica: Replica, reducer: Reducer, follow_forward: Callable[[], bool], *, with_buffers: bool
    ) -> None:
        self._replica = replica
        self._reducer = reducer
        self._follow_forward = follow_forward
        self._with_buffers = with_buffers
        self._own: dict[nn.Parameter, Tensor | None] = {}  # this rank's gradients, restored at the end

    def main_hook(self) -> None:
        self._own = self._own or {parameter: parameter.grad for parameter in self._reducer.averaged}
        if self._follow_forward():
            self._reducer.average_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        for parameter, grad in self._own.items():
            parameter.grad = grad
        [*_, src] = active_ranks(self._replica.group, active=is_last_joiner)
        self._replica.broadcast(src, with_buffers=self._with_buffers)
        self._reducer.scale(1.0)
