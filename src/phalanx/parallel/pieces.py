"""Pieces: the parts of parameters that each rank of a ZeroRedundancyOptimizer steps, and the places of the cuts.

Parameters are cut at multiples of 128 elements from their start: kernels round the elements after the last full vector
differently, and the result must have the same bits as with the plain optimizer. Optimizers that look at a whole
parameter get whole parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from phalanx.parallel.layout import flat, laid_out_like, packed, shaped
from phalanx.parallel.shared_memory import shared_tensor

# A kernel may round differently in the elements after the last full vector. So shards are cut where a vector ends,
# whatever the vector width and element size.
CUT_ELEMS = 128
ELEMENTWISE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
}
"""Optimizers that treat each element separately, so a parameter may be cut anywhere."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a parameter that one rank steps: all of it, or a range of its elements in memory order.

    Attributes:
        parameter: Parameter of the model.
        owner: Rank in the group that steps the piece.
        start: First element of the piece.
        stop: End of the piece, in elements.
    """

    parameter: nn.Parameter
    owner: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole parameter."""
        return self.stop - self.start == self.parameter.numel()

    def memory_of(self, tensor: Tensor) -> Tensor:
        """View this piece of a tensor as a flat tensor; the tensor must be laid out like the parameter."""
        return flat(tensor)[self.start : self.stop]

    def of(self, tensor: Tensor) -> Tensor:
        """View this piece of a tensor that is laid out like the parameter; a whole piece keeps its shape."""
        return tensor.detach() if self.is_whole else self.memory_of(tensor)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Copy this piece of a tensor of the parameter's shape, in any layout."""
        return self.of(laid_out_like(self.parameter, tensor)).clone()

    def gradient(self) -> Tensor | None:
        """Return this piece of the parameter's gradient; None without a gradient.

        Raises:
            ValueError: The gradient is sparse, and the parameter is cut.
        """
        grad = self.parameter.grad
        if grad is None or self.is_whole:
            return grad
        if grad.layout is not torch.strided:
            raise ValueError(
                f"rank {dist.get_rank()}: ZeroRedundancyOptimizer: step() takes dense gradients, got a sparse one; "
                "make the embedding with sparse=False"
            )
        return self.of(laid_out_like(self.parameter, grad))


def elementwise(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a parameter's optimizer state that have one element for each element of the parameter.

    The step counter is left out, even if the parameter has a single element.
    """
    return {
        name: v for name, v in values.items() if isinstance(v, Tensor) and name != "step" and v.shape == parameter.shape
    }


@torch.no_grad()
def move_into_buffer(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, share: bool
) -> tuple[Tensor, list[int]]:
    """Move parameters of one dtype and device into one buffer, with rank 0's values. Every rank must call this.

    Args:
        parameters: Parameters to move.
        group: Ranks that have the same parameters.
        share: Whether all ranks share the buffer's memory, on the CPU.

    Returns:
        The buffer, and the offset of each parameter in it, in elements.

    Raises:
        RuntimeError: The ranks cannot share memory.
    """
    begins, num_elems = packed([p.numel() for p in parameters])
    first = parameters[0]
    if share:
        buffer = shared_tensor(num_elems, first.dtype, group)
    else:
        buffer = torch.zeros(num_elems, dtype=first.dtype, device=first.device)
    views = [shaped(buffer[begin : begin + p.numel()], p) for p, begin in zip(parameters, begins, strict=True)]
    if dist.get_rank(group) == 0 or not share:
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter)
    if share:
        dist.barrier(group=group)
    else:
        dist.broadcast(buffer, group=group, group_src=0)
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return buffer, begins


def cut_into_pieces(parameters: Sequence[nn.Parameter], begins: Sequence[int], bounds: Sequence[int]) -> list[Piece]:
    """Return the pieces of parameters in a buffer that is divided among the ranks.

    Args:
        parameters: Parameters in the buffer.
        begins: Offset of each parameter in the buffer, in elements.
        bounds: Boundaries between the ranks' ranges of the buffer, from 0 to its length.
    """
    pieces = []
    for owner, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        for parameter, begin in zip(parameters, begins, strict=True):
            start, stop = max(lo - begin, 0), min(hi - begin, parameter.numel())
            if start < stop:
                pieces.append(Piece(parameter, owner, start, stop))
    return pieces


def cuts(begins: Sequence[int], numels: Sequence[int], num_shards: int, cut: int) -> list[int]:
    """Return the offsets at which a buffer of tensors is cut into shards of sizes that are as equal as possible.

    Args:
        begins: Offsets of the tensors in the buffer, in elements.
        numels: Numbers of elements of the tensors.
        num_shards: Number of shards, at least 1; the result has ``num_shards - 1`` offsets.
        cut: Granularity in elements: a tensor may be cut at multiples of `cut` from its start. 0: cut only between
            tensors.
    """
    total = sum(numels)
    places: list[int] = []
    for shard in range(1, num_shards):
        want = total * shard // num_shards
        at, place = 0, 0
        for begin, numel in zip(begins, numels, strict=True):
            inside = want - at
            if inside <= numel:
                whole = numel if 2 * inside >= numel else 0
                place = begin + (min(round(inside / cut) * cut, numel) if cut else whole)
                break
            at += numel
        places.append(max(place, places[-1] if places else 0))
    return places
