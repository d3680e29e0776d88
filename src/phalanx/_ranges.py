"""Divides a length among ranks, processors or pieces."""

from __future__ import annotations


def share(length: int, part: int, num_parts: int) -> range:
    """Return the indices of one part: parts tile ``[0, length)`` in order, and their sizes differ by at most one."""
    return range(length * part // num_parts, length * (part + 1) // num_parts)
