"""Replica: one rank's copy of a model, kept equal to the copies of the other ranks."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from phalanx import _torch
from phalanx.wire.rank_group import RankGroup

_BROADCAST_BYTES = 250 << 20

_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules of all replicas
_num_additions = 0  # number of parameters and modules added to `_parts`


class Replica:
    """This rank's copy of a model, without the parameters and buffers that DistributedDataParallel is told to ignore.

    Args:
        module: Module with the same parameters and buffers on every rank.
        group: Group of the ranks that each hold a copy.

    Attributes:
        group: Group of the ranks that each hold a copy.
        ignored: Names of the parameters and buffers that are left alone.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ignored: set[str] = set(getattr(module, _torch.MARK_IGNORED_BY_DDP, ()))
        self._module = module
        self._known = {p for _, p in self.parameters()}
        _watch_registrations()
        _parts.update(module.modules())
        self._num_seen = _num_additions

    def newcomers(self) -> list[str]:
        """Return the names of trained parameters that were added since the last call; fast if nothing was added."""
        if self._num_seen == _num_additions:
            return []
        self._num_seen = _num_additions
        _parts.update(self._module.modules())
        fresh = {p: name for name, p in self.parameters() if p.requires_grad and p not in self._known}
        self._known |= fresh.keys()
        return list(fresh.values())

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, with its name."""
        return ((name, p) for name, p in self._module.named_parameters() if name not in self.ignored)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each buffer once, with its name."""
        return ((name, b) for name, b in self._module.named_buffers() if name not in self.ignored)

    def sparse_parameters(self) -> set[Tensor]:
        """Return the weights of embeddings whose gradients are sparse."""
        embeddings = (m for m in self._module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        return {embedding.weight for embedding in embeddings if embedding.sparse}

    def verify(self, *, with_buffers: bool) -> None:
        """Compare the ranks' models. Every rank must call this.

        Args:
            with_buffers: Whether buffers must agree, too.

        Raises:
            ValueError: The models differ in a tensor's name, shape or dtype, or in whether the tensor is trained; every
                rank raises the error.
        """
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.parameters()]
        if with_buffers:
            own += [(name, tuple(b.shape), str(b.dtype), True) for name, b in self.buffers()]
        every = RankGroup(self.group).gather(own)
        for rank, other in enumerate(every):
            for mine, theirs in itertools.zip_longest(every[0], other):
                if mine != theirs:
                    ranks = [dist.get_global_rank(self.group, r) for r in (0, rank)]
                    raise ValueError(
                        f"rank {dist.get_rank()}: DistributedDataParallel: the model differs between ranks: "
                        f"{_describe(mine)} on rank {ranks[0]}, {_describe(theirs)} on rank {ranks[1]}. "
                        "Build the same model on every rank"
                    )

    def broadcast(self, src: int = 0, *, with_buffers: bool) -> None:
        """Copy the parameters of one rank to all ranks. Every rank must call this.

        Args:
            src: Rank in the group whose tensors are copied.
            with_buffers: Whether buffers are copied, too.
        """
        tensors = [p.detach() for _, p in self.parameters()]
        if with_buffers:
            tensors += [b.detach() for _, b in self.buffers()]
        self._broadcast(tensors, src)

    def broadcast_buffers(self, src: int = 0) -> None:
        """Copy the buffers of rank `src` of the group to all ranks, between passes. Every rank must call this."""
        # Not detach(): its result shares the buffer's version counter, so backward would fail if autograd has saved the
        # buffer.
        self._broadcast([b.data for _, b in self.buffers()], src)

    def _broadcast(self, tensors: list[Any], src: int) -> None:
        if tensors:
            _torch.broadcast_coalesced(self.group, tensors, _BROADCAST_BYTES, src)


@functools.cache
def _watch_registrations() -> None:
    nn.modules.module.register_module_parameter_registration_hook(_note_addition)
    nn.modules.module.register_module_module_registration_hook(_note_addition)


def _note_addition(module: nn.Module, _: str, added: nn.Parameter | nn.Module | None) -> None:
    global _num_additions
    if added is not None and module in _parts:
        _num_additions += 1


def _describe(tensor: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if tensor is None:
        return "no further parameter"
    name, shape, dtype, is_trained = tensor
    return f"{name!r} {list(shape)} {dtype.removeprefix('torch.')}{'' if is_trained else ' frozen'}"
