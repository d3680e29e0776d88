"""Memory that all ranks of one host read and write, whatever the backend.

It is an unnamed memfd that the other ranks open through ``/proc/<pid>/fd``, rather than a part of the backend's
segment, so it works with any backend. A nonce proves that a rank has mapped the right memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.wire.rank_group import RankGroup

_HEADER_BYTES = mmap.PAGESIZE  # begins with a nonce, which shows a rank that it has mapped the right memory


def shared_tensor(num_elems: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return a zeroed CPU tensor whose memory all ranks of the group share. Every rank calls it.

    The memory has no name. The kernel frees it once the last process that maps it has ended, however it ended.

    Args:
        num_elems: Length of the tensor, of shape ``(num_elems,)``.
        dtype: Dtype of the tensor.
        group: Ranks that share the tensor.

    Raises:
        RuntimeError: The ranks are not processes of one user on one host, or memory is short; on every rank.
    """
    num_bytes = _HEADER_BYTES + num_elems * dtype.itemsize
    rank = dist.get_rank(group)
    offer: list[Any] = [None]
    memory: mmap.mmap | None = None
    error = ""
    with contextlib.ExitStack() as opened:
        if rank == 0:
            try:
                memory, offer[0] = _create(num_bytes, opened)
            except OSError as failure:
                error = f"no shared memory of {num_bytes >> 20} MiB: {failure}"
        dist.broadcast_object_list(offer, group=group, group_src=0)
        if rank > 0 and offer[0] is not None:
            try:
                memory = _attach(offer[0], num_bytes)
            except OSError as failure:
                error = f"cannot map the memory of rank {dist.get_global_rank(group, 0)}: {failure}"
        errors = RankGroup(group).gather(error)
    failed = {dist.get_global_rank(group, r): text for r, text in enumerate(errors) if text}
    if failed:
        raise RuntimeError(
            f"rank {dist.get_rank()}: parameters cannot be shared: "
            + "; ".join(f"rank {r}: {text}" for r, text in failed.items())
            + ". All ranks must run on one host, as one user; else leave out share_parameters"
        )
    assert memory is not None
    return torch.frombuffer(memory, dtype=dtype, count=num_elems, offset=_HEADER_BYTES)


def _create(num_bytes: int, opened: contextlib.ExitStack) -> tuple[mmap.mmap, tuple[int, int, bytes]]:
    """Return new memory, and the values with which a peer can map it until `opened` is closed."""
    fd = os.memfd_create("phalanx-parameters", os.MFD_CLOEXEC)
    opened.callback(os.close, fd)
    os.posix_fallocate(fd, 0, num_bytes)  # fails now if memory is short, instead of a SIGBUS later
    memory = mmap.mmap(fd, num_bytes)
    nonce = secrets.token_bytes(16)
    memory[: len(nonce)] = nonce
    return memory, (os.getpid(), fd, nonce)


def _attach(offer: tuple[int, int, bytes], num_bytes: int) -> mmap.mmap:
    pid, fd, nonce = offer
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(own, num_bytes)
    except ValueError as error:  # shorter: a process of another host or container
        raise OSError(str(error)) from error
    finally:
        os.close(own)
    if memory[: len(nonce)] != nonce:
        raise OSError("another process has that number here")
    return memory
