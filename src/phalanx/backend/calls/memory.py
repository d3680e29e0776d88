"""The memory that the core reads and writes: a call's tensors if they are plain, otherwise copies.

A tensor is plain if it is dense (`phalanx._torch.tensors`) and its elements lie in one piece. ``csrc/python/tensors.h``
says how the core checks that in 0.45 us.

This module also defines, for all operations, what happens if tensors of a call overlap: all inputs are read before any
output is written, and outputs are written in the order of their list. Gloo does the same wherever it defines a result.
Copies are made only where memory overlaps, so a usual call pays one comparison of addresses in the core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx import _core
from phalanx._errors import ArgumentError
from phalanx._torch.tensors import is_expanded, span_bytes
from phalanx.backend.failures.members import Ranks
from phalanx.record.sites import call_site

Tensors = list[torch.Tensor]
Addresses = list[int]


class NotPlain(TypeError, RuntimeError):
    """The tensor has no memory of its own; torch's dispatcher may be able to unwrap it."""


class OtherDevice(ArgumentError):
    """The tensor lies on another device, for which the group may have another backend; carries the device's `type`."""

    def __init__(self, message: str, type: str = "") -> None:
        super().__init__(message)
        self.type = type


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the core can work directly on the memory of a dense tensor."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor itself if it is plain, else a plain copy."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of a dense tensor."""
    found = plain(tensor.detach())
    try:
        return found.clone()
    except NotImplementedError:  # torch does not copy integers of less than a byte
        return found.view(torch.uint8).clone().view(found.dtype)


def addresses_of(tensors: Tensors) -> Addresses:
    return [tensor.data_ptr() for tensor in tensors]


def do_overlap(writes: Tensors, reads: Tensors) -> bool:
    """Whether the memory of a tensor in `writes` overlaps that of another tensor in `writes` or of one in `reads`."""
    sizes = [span_bytes(t) for t in writes], [span_bytes(t) for t in reads]
    return _core.overlap(addresses_of(writes), sizes[0], addresses_of(reads), sizes[1])


class Buffers:
    """The memory on which the core works in one call: its tensors, or stand-ins that are copied back at the end.

    Args:
        ranks: Ranks of the group.
        op: Name of the operation, for messages.

    Attributes:
        are_simple: Whether the core itself found all tensors plain, so that they need no further check.
    """

    are_simple = True

    def __init__(self, ranks: Ranks, op: str) -> None:
        self.ranks, self.op = ranks, op
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def where(self) -> str:
        """Return ``rank 3: all_reduce at train.py:31``."""
        site = call_site()
        return f"rank {self.ranks.global_ranks[self.ranks.rank]}: {self.op}" + f" at {site}" * bool(site)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory in which a tensor is read."""
        return tensor if self.are_simple else plain(tensor)

    def update(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory in which a tensor is read and written."""
        return tensor if self.are_simple or is_plain(tensor) else self._stand_in(tensor, plain)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is copied back at the end."""
        return self._stand_in(tensor, lambda tensor: plain(tensor).clone())

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory in which a tensor is written."""
        return tensor if self.are_simple or is_plain(tensor) else self._stand_in(tensor)

    def move(
        self, sources: Tensors, targets: Tensors, own: tuple[int, int, int] | None = None
    ) -> tuple[tuple[Tensors, Tensors], Addresses, Addresses]:
        """Return the memory in which `sources` are read and `targets` are written in one call, even if they overlap.

        Args:
            sources: Tensors to read.
            targets: Tensors to write.
            own: Indices of the source and the target that hold this rank's own block, and the number of bytes from
                the target to the source if both blocks are the same memory. That overlap is harmless.

        Returns:
            The tensors to keep until the call is over, the addresses to read, and the addresses to write.
        """
        reads, writes = sources, targets
        if not self.are_simple:
            reads, writes = [self.read(t) for t in sources], [self.write(t) for t in targets]
        read_at, write_at = addresses_of(reads), addresses_of(writes)
        at, sizes = read_at, [t.nbytes for t in reads]
        if own is not None and read_at[own[0]] == write_at[own[1]] + own[2]:
            at, sizes = read_at.copy(), sizes.copy()
            del at[own[0]], sizes[own[0]]
        is_clear = not _core.overlap(write_at, [t.nbytes for t in writes], at, sizes)
        if is_clear and not self._copies:
            return (reads, writes), read_at, write_at
        if do_overlap(targets, []):
            self._copies = []
            writes = [self._stand_in(t) for t in targets]
        elif not is_clear:
            stays = own[0] if own is not None and len(at) < len(reads) else None
            reads = [t.clone() if t is sources[i] and i != stays else t for i, t in enumerate(reads)]
        return (reads, writes), addresses_of(reads), addresses_of(writes)

    def _stand_in(
        self, tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        if is_expanded(tensor):
            raise ArgumentError(
                f"{self.where()} can't write to a tensor of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}: more than one of its elements refers to a single memory location; "
                "pass tensor.clone()"
            )
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype) if copy is None else copy(tensor)
        self._copies.append((tensor, buffer))
        return buffer

    def settle(self) -> None:
        """Copy the results in stand-ins to the call's tensors."""
        for tensor, buffer in self._copies:
            # The core may write into parameters and inference tensors; so may this copy.
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(buffer)
