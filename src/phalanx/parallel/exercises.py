"""Functions that readers of the distributed tutorials write by hand: a gradient average, and a ring all_reduce.

Scripts call these functions in place of their own; nothing in Phalanx uses these functions. They work on any backend.
`average_gradients` uses the buckets of DistributedDataParallel, once backward has ended. `ring_all_reduce` shows the
algorithm with point-to-point messages only, and is for learning.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._torch.tensors import is_expanded
from phalanx.parallel.ddp.buckets import make_buckets
from phalanx.wire.rank_group import RankGroup, group_with_this_rank


def average_gradients(
    model: nn.Module | Iterable[nn.Parameter], process_group: dist.ProcessGroup | None = None
) -> None:
    """Replace every parameter's ``.grad`` by its mean over the ranks. Call this between ``backward()`` and ``step()``.

    The tutorials loop over the parameters, with one all_reduce for each parameter; this function calls one for each 25
    MiB of gradients. A gradient that is None on some ranks counts as zeros on these ranks; a gradient that is None on
    all ranks stays None. Sparse gradients stay sparse. For real training, DistributedDataParallel does the same during
    the backward pass.

    Args:
        model: Module, or its parameters in the same order on all ranks.
        process_group: Ranks to average over; by default all.

    Raises:
        ValueError: There is no process group yet, or this rank is not in the group.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> phalanx.average_gradients(model)
    """
    group = group_with_this_rank(process_group, "average_gradients")
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    trained = list(dict.fromkeys(p for p in parameters if p.requires_grad))  # without duplicates
    for parameter in trained:
        if parameter.grad is not None and is_expanded(parameter.grad):
            parameter.grad = parameter.grad.clone()  # expanded elements share memory, so the means can't be stored
    for bucket in make_buckets(trained, group, bucket_cap_mb=25, sparse=_sparse_anywhere(trained, group)):
        bucket.used = {parameter for parameter in bucket.parameters if parameter.grad is not None}
        bucket.load()
        bucket.start()
        bucket.store()


def ring_all_reduce(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its sum over the ranks, using only ``isend`` and ``irecv``; return `tensor`.

    The tensor is cut into n chunks, one for each of n ranks. In each of n - 1 rounds a rank receives a chunk from its
    left neighbor, adds its own and sends the sum on to the right. After these rounds each rank holds one chunk of the
    result, and in n - 1 more rounds these chunks travel around the ring. Each rank sends 2 (n - 1) / n times the
    tensor's size, and all ranks get the same bits. The function is meant for learning; ``dist.all_reduce`` is faster.

    Args:
        tensor: Tensor to sum in place, of the same shape and dtype on all ranks.
        process_group: Ranks to sum over; by default all.

    Raises:
        ValueError: There is no process group yet, or this rank is not in the group.

    Example:
        >>> phalanx.ring_all_reduce(torch.ones(3))
        tensor([1., 1., 1.])

    Source: Patarasuk & Yuan 2009; Baidu's ring all-reduce, 2017.
    """
    group = group_with_this_rank(process_group, "ring_all_reduce")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    flat = tensor.detach().contiguous().view(-1)
    chunks = flat.tensor_split(size)  # sizes differ by one at most

    def exchange(sent: int, received: int) -> Tensor:
        incoming = torch.empty_like(chunks[received % size])
        requests = [
            dist.isend(chunks[sent % size], right, group=group),
            dist.irecv(incoming, left, group=group),
        ]
        for request in requests:
            request.wait()  # type: ignore[union-attr]
        return incoming

    for step in range(size - 1):  # reduce-scatter: after it, chunk rank + 1 is complete on this rank
        incoming = exchange(rank - step, rank - step - 1)
        chunks[(rank - step - 1) % size].add_(incoming)
    for step in range(size - 1):  # all-gather
        incoming = exchange(rank - step + 1, rank - step)
        chunks[(rank - step) % size].copy_(incoming)
    with torch.no_grad():
        tensor.copy_(flat.view_as(tensor))
    return tensor


def _sparse_anywhere(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Return the parameters whose gradient is sparse on any rank; a rank without a gradient can't know that."""
    if not parameters:
        return []
    marks = RankGroup(group).largest_of_each([p.grad is not None and p.grad.is_sparse for p in parameters])
    return [parameter for parameter, mark in zip(parameters, marks, strict=True) if mark]
