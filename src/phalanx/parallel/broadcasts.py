"""Broadcasts many tensors at once, each from a rank of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def broadcast_each(parts: Iterable[tuple[int, Tensor]], group: dist.ProcessGroup) -> None:
    """Send each tensor from its rank to all ranks of the group, and wait. Every rank calls it.

    Args:
        parts: Tensors to send or to receive into, each with its source, a rank in the group; empty ones are skipped.
        group: Ranks that exchange the tensors.
    """
    works = [dist.broadcast(part, group=group, group_src=src, async_op=True) for src, part in parts if part.numel()]
    for work in works:
        work.wait()  # type: ignore[union-attr]
