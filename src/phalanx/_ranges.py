"""Divides a length into nearly equal parts, for ranks, processors or pieces.

All users rely on exactly this division: data batches, blocks of checkpoints, rails between hosts, and the CPUs of
ranks. Ranks compute it independently and must agree, and files of checkpoints that exist are divided in this way."""

from __future__ import annotations


def share(length: int, part: int, num_parts: int) -> range:
    """Return the indices of one part. Parts tile ``[0, length)`` in order, and their sizes differ by at most one."""
    return range(length * part // num_parts, length * (part + 1) // num_parts)
