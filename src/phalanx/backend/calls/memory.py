"""The memory that the core reads and writes: a call's tensors if they are plain, otherwise copies.

A tensor is plain if it is dense (`phalanx._torch.tensors`) and contiguous, and its memory holds its values themselves
rather than their negatives or conjugates. ``csrc/python/tensors.h`` explains how the core checks this in 0.45 us.

This module also defines, for all operations, what happens if tensors of a call overlap: all inputs are read before any
output is written, and outputs are written in the order of their list. Gloo does the same wherever it defines a result.
Copies are made only where memory overlaps, so a call without overlap pays only for a comparison of addresses in the
core.
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
    except NotImplementedError:  # torch can't copy integers smaller than a byte
        return found.view(torch.uint8).clone().view(found.dtype)


def addresses_of(tensors: Tensors) -> Addresses:
    return [tensor.data_ptr() for tensor in tensors]


def do_overlap(writes: Tensors, reads: Tensors) -> bool:
    """Whether any tensor in `writes` shares memory with another tensor in `writes` or with a tensor in `reads`."""
    sizes = [span_bytes(t) for t in writes], [span_bytes(t) for t in reads]
    return _core.overlap(addresses_of(writes), sizes[0], addresses_of(reads), sizes[1])


class Buffers:
    """The memory on which the core works in one call: the call's tensors, or stand-ins that are copied back at the end.

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
        """Return the start of messages, such as ``rank 3: all_reduce at train.py:31``."""
        site = call_site()
        return f"rank {self.ranks.global_ranks[self.ranks.rank]}: {self.op}" + f" at {site}" * bool(site)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if the core can read its memory, otherwise a plain copy."""
        return tensor if self.are_simple else plain(tensor)

    def update(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if the core can read and write its memory, otherwise a copy that is copied back."""
        return tensor if self.are_simple or is_plain(tensor) else self._stand_in(tensor, plain)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain copy of a tensor; at the end, the copy is copied back to the tensor."""
        return self._stand_in(tensor, lambda tensor: plain(tensor).clone())

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if the core can write its memory, else an empty stand-in that is copied back."""
        return tensor if self.are_simple or is_plain(tensor) else self._stand_in(tensor)

    def move(
        self, sources: Tensors, targets: Tensors, own: tuple[int, int, int] | None = None
    ) -> tuple[tuple[Tensors, Tensors], Addresses, Addresses]:
        """Return the memory that one call reads for `sources` and writes for `targets`, with copies where they overlap.

        Args:
            sources: Tensors to read.
            targets: Tensors to write.
            own: Index of a source, index of a target, and an offset in bytes. If the source begins at this offset from
                the target, both hold this rank's own block in the same memory, and their overlap is harmless. None:
                no overlap is harmless.

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
            # The core can write into parameters and inference tensors; torch lets this copy do so only in these modes.
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(buffer)
