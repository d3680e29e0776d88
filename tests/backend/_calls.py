"""Every collective of ``torch.distributed`` as one kind of call, and exact comparisons of what it gives.

The calls are those of the fuzzer, so what a test tries by itself the fuzzer tries at random.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.testing.fuzz.calls import CALLS, REDUCING, ROOTED, Call, splits
from phalanx.testing.fuzz.memory import small_numbers as values

__all__ = ["CALLS", "REDUCING", "ROOTED", "Call", "as_bytes", "check_equal", "gloo_group", "splits", "values"]


def gloo_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a Gloo group of `ranks` (all by default), in the order given."""
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=False, sort_ranks=ranks is None)


def check_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Demand the same shape, dtype and bits."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    ours, theirs = (as_bytes(t) for t in (got, want))
    if not torch.equal(ours, theirs):
        differ = (ours != theirs).any(1).nonzero().flatten()
        first = int(differ[0])
        raise AssertionError(
            f"{what}: {len(differ)} of {got.numel()} elements differ, the first at {first}: "
            f"{got.reshape(-1)[first]} is not {want.reshape(-1)[first]}"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements as rows of bytes."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.detach().reshape(-1))
    if plain.numel() == 0:
        return torch.empty(0, plain.itemsize, dtype=torch.uint8)
    return plain.view(torch.uint8).reshape(plain.numel(), plain.itemsize)
