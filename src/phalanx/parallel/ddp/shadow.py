"""Shadow: takes part in the collectives of others within ``join()`` once a rank has run out of data."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from phalanx.parallel.ddp.reducer import Reducer
from phalanx.parallel.ddp.replica import Replica
from phalanx.parallel.ddp.uneven_inputs import active_ranks


class Shadow(JoinHook):
    """Takes part with zeros, on a rank that has run out of data while others go on.

    Args:
        replica: Model that the rank has trained until then.
        reducer: Reducer of the model's gradients.
        follow_forward: Function that takes part in a forward pass of the other ranks, and returns whether any of them
            averages its gradients.
        with_buffers: Whether the model ends with the buffers of the last rank that had data.
    """

    def __init__(
        self, replica: Replica, reducer: Reducer, follow_forward: Callable[[], bool], *, with_buffers: bool
    ) -> None:
        self._replica = replica
        self._reducer = reducer
        self._follow_forward = follow_forward
        self._with_buffers = with_buffers
        self._own: dict[nn.Parameter, Tensor | None] = {}  # this rank's gradients, while it has those of the others

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
