"""Divides a length into nearly equal parts, for ranks, processors or pieces.

The division must not change, because ranks compute it independently and must agree, and because existing checkpoints
are divided in this way. It is used for data batches, blocks of checkpoints, rails between hosts, and ranks' CPUs."""

from __future__ import annotations


def share(length: int, part: int, num_parts: int) -> range:
    """Return the indices of one part. Parts tile ``[0, length)`` in order, and their sizes differ by at most one."""
    return range(length * part // num_parts, length * (part + 1) // num_parts)
