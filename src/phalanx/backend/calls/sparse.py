"""all_reduce of sparse tensors, such as gradients of embeddings, which the core does not support."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.backend.calls.memory import Tensors

Gather = Callable[[Tensors, torch.Tensor], object]
"""Type of a blocking all_gather, called with its outputs and its input."""


def sum_sparse(tensor: torch.Tensor, world_size: int, gather: Gather) -> bool:
    """Sum sparse COO tensors in place: gather every rank's entries, then coalesce. All ranks get the same bits.

    Returns:
        Whether the ranks' tensors agree in shape and number of sparse dimensions; if not, nothing was done.
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
