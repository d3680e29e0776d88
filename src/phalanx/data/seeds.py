"""`seed_everything`: one number from which Python, NumPy and torch draw, on every rank and in every worker."""

from __future__ import annotations

import hashlib
import random
import sys

import torch

from phalanx.data.replica import rank_and_size


def seed_everything(seed: int, *, per_rank: bool = False) -> int:
    """Seed Python, torch on all devices, and NumPy if it is in use; return the seed that was set.

    Workers of a `phalanx.DataLoader` are seeded from it too, each differently.

    Args:
        seed: At least 0.
        per_rank: Give each rank a seed of its own, derived from `seed`: for dropout and augmentation. Otherwise all
            have the same: for the weights of a model that nothing makes equal afterwards.

    Raises:
        ValueError: `seed` is negative.
        RuntimeError: `per_rank` with several ranks, and no process group yet.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    own = derive_seed(seed, "rank", rank_and_size()[0]) if per_rank else seed
    seed_process(own)
    return own


def seed_process(seed: int) -> None:
    """Seed all that this process draws from."""
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's generators as well
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def derive_seed(seed: int, *path: str | int) -> int:
    """Return a seed in [0, 2^63) that no other path from `seed`, nor a neighbour of `seed`, is likely to share."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
