"""all_reduce of sparse tensors, such as the gradients of embeddings, which the core does not know."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.backend._memory import Tensors

Gather = Callable[[Tensors, torch.Tensor], object]
"""A blocking all_gather: the outputs, the input."""


def sum_sparse(tensor: torch.Tensor, world_size: int, gather: Gather) -> bool:
    """Sum sparse COO tensors in place: gather every rank's entries, then coalesce. Equal on all ranks.

    Returns:
        Whether the ranks' tensors have one shape and one number of sparse dimensions; nothing is done if not.
    """
    local = tensor.coalesce()
    meta = torch.tensor([local.indices().shape[1], local.sparse_dim(), *local.shape], dtype=torch.int64)
    metas = [torch.empty_like(meta) for _ in range(world_size)]
    gather(metas, meta)
    if any(not torch.equal(m[1:], meta[1:]) for m in metas):
        return False
    counts = [int(m[0]) for m in metas]
    parts = [_gather_padded(part, max(counts), world_size, gather) for part in (local.indices().t(), local.values())]
    indices, values = (torch.cat([p[:c] for p, c in zip(part, counts, strict=True)]) for part in parts)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
    tensor.copy_(total)
    return True


def _gather_padded(rows: torch.Tensor, most: int, world_size: int, gather: Gather) -> Tensors:
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    gather(gathered, padded)
    return gathered
