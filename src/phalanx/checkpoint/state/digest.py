"""Digests of tensors: a few bytes that ranks compare to see whether they hold the same bits.

All bits are digested. A sample of elements could not tell apart two experts that have hardly been trained, and if two
different tensors seemed the same, one of them would silently not be saved. So each rank computes the 128-bit XXH3 of
each large tensor, which reads the tensor once, at the speed of memory. With two ranks, a save of 256 MiB that digested
all bits took 1.4 times as long as a memcpy; with a sample, it took 0.8 times as long (``python -m bench.checkpoint
--ranks 2``). XXH3 is not cryptographic, and need not be: ranks do not attack each other. Files on disk have SHA-256.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

if sys.platform == "linux":
    from phalanx import _core

_LEAST_BYTES = 241  # shorter pieces get a BLAKE2 digest, because the core refuses them (csrc/memory/digest.h)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bits of a strided tensor as bytes, in the order of its elements: a view if possible, else a copy."""
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return elements.as_strided((elements.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def digests(pieces: Sequence[Tensor], num_threads: int = 1) -> bytes:
    """Return 16 bytes for each piece, one after the other.

    Args:
        pieces: Contiguous bytes on the CPU.
        num_threads: Number of threads that share the pieces.
    """
    long = [piece for piece in pieces if len(piece) >= _LEAST_BYTES]
    if sys.platform != "linux":  # without Linux, there is no core
        found = b"".join(_blake(piece.numpy()) for piece in long)
    else:
        found = _core.digests([piece.data_ptr() for piece in long], [len(piece) for piece in long], num_threads)
    of_long = (found[at : at + 16] for at in range(0, len(found), 16))
    return b"".join(next(of_long) if len(p) >= _LEAST_BYTES else _blake(bytes(p.tolist())) for p in pieces)


def _blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
