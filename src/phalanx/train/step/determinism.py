"""Gradients whose bits do not depend on the number of ranks: a fixed tree of additions over virtual shards.

With ``deterministic="world"`` the batch is cut into V shards, a power of two. Each shard has its own backward pass and
its own random numbers. Gradients are added pairwise in a binary tree. The tree's upper levels add the ranks' sums after
an all_gather, so the tree is the same for every number of ranks that is a power of two. More threads would add in
another order within a shard, so torch uses one thread. Models with running statistics are refused, because these
statistics depend on which rank sees which samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from phalanx._torch import BatchNorm, foreach_add_
from phalanx.data.seeds import derive_seed, seed_process
from phalanx.train.wrapper import is_sharded
from phalanx.wire.rank_group import RankGroup


def prepare(model: nn.Module) -> None:
    """Refuse a model whose result depends on more than its weights and one shard; set torch to one thread.

    Raises:
        ValueError: The model has running statistics, or is sharded.
    """
    if is_sharded(model):
        raise ValueError('Trainer: deterministic="world" adds whole gradients: it can\'t have a model of fully_shard')
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.track_running_stats:
            raise ValueError(
                f'Trainer: deterministic="world" can\'t have {name}, a {type(module).__name__}: its running statistics '
                "depend on which rank sees what. Use GroupNorm or LayerNorm, or track_running_stats=False"
            )
    torch.set_num_threads(1)  # more threads would add in another order


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    ranks: RankGroup,
    num_shards: int,
    backward: Callable[[int], Tensor],
    seed: tuple[int, int],
) -> Tensor:
    """Store the sum over all ranks' shards in ``.grad``, and return the sum of the losses.

    A binary tree adds neighbors: first the shards of a rank, then the sums of ranks. If the numbers of ranks and of
    shards are powers of two, the tree over all shards is the same for any number of ranks.

    Args:
        parameters: Parameters under training.
        ranks: All ranks of the job.
        num_shards: Number of this rank's shards.
        backward: Function that runs one of this rank's shards forward and backward, and returns its loss.
        seed: Seed and step, from which the random numbers of a shard are derived.
    """
    pending: list[tuple[int, list[Tensor]]] = []  # sums of 1, 2, 4, ... shards that wait for their neighbors
    for shard in range(num_shards):
        seed_process(derive_seed(seed[0], "shard", seed[1], ranks.rank * num_shards + shard))
        for parameter in parameters:
            parameter.grad = None
        loss = backward(shard)
        total = [loss.reshape(1), *(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)]
        size = 1
        while pending and pending[-1][0] == size:
            foreach_add_(pending[-1][1], total)
            total, size = pending.pop()[1], 2 * size
        pending.append((size, total))
    [(_, own)] = pending
    sums = ranks.gather_tensor(torch.cat([tensor.reshape(-1) for tensor in own]))
    while len(sums) > 1:
        sums = [left.add_(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    parts = sums[0].split([tensor.numel() for tensor in own])
    for parameter, part in zip(parameters, parts[1:], strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    return parts[0]
