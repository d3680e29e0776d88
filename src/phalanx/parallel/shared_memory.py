"""Memory that all ranks of one host read and write, whatever the backend.

The memory is a block of `phalanx.host.shared_blocks` rather than a part of the backend's segment, so it works with any
backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.host.shared_blocks import Address, Block
from phalanx.wire.rank_group import RankGroup

_PURPOSE = "parameters"


def shared_tensor(num_elems: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return a zeroed CPU tensor whose memory all ranks of the group share. Every rank must call this.

    The memory has no name. The kernel frees the memory once the last process that maps it has ended, in whatever way.

    Args:
        num_elems: Length of the tensor, of shape ``(num_elems,)``.
        dtype: Dtype of the tensor.
        group: Ranks that share the tensor.

    Raises:
        RuntimeError: The ranks are not processes of one user on one host, or memory is short; every rank raises the
            error.
    """
    num_bytes = max(1, num_elems * dtype.itemsize)
    rank = dist.get_rank(group)
    offer: list[Address | None] = [None]
    block: Block | None = None
    error = ""
    try:
        if rank == 0:
            try:
                block = Block.create(num_bytes, _PURPOSE)
                offer[0] = block.address
            except OSError as failure:
                error = f"no shared memory of {num_bytes >> 20} MiB: {failure}"
        dist.broadcast_object_list(offer, group=group, group_src=0)
        if rank > 0 and offer[0] is not None:
            try:
                block = Block.open(offer[0], _PURPOSE)
            except OSError as failure:
                error = f"cannot map the memory of rank {dist.get_global_rank(group, 0)}: {failure}"
        errors = RankGroup(group).gather(error)
    finally:
        if block is not None:
            block.close()
    failed = {dist.get_global_rank(group, r): text for r, text in enumerate(errors) if text}
    if failed:
        raise RuntimeError(
            f"rank {dist.get_rank()}: parameters cannot be shared: "
            + "; ".join(f"rank {r}: {text}" for r, text in failed.items())
            + ". All ranks must run on one host, as one user; otherwise leave out share_parameters"
        )
    assert block is not None
    return torch.frombuffer(block.memory, dtype=dtype, count=num_elems)
