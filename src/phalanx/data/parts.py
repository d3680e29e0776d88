"""Finds out whether all ranks have the same dataset or each rank has its own part."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import Subset

from phalanx.wire.rank_group import RankGroup


def refuse_different(data: Any, ranks: RankGroup) -> None:
    """Refuse to divide a dataset if the ranks' datasets differ, because each rank may already have its own part.

    Raises:
        ValueError: The ranks' datasets differ; every rank raises the error.
    """
    described = ranks.gather((len(data), _digest(_chosen(data)[0])))
    if len({*described}) > 1:
        raise ValueError(
            "Trainer: ranks have different datasets, and it divides one that all of them have. Pass the whole "
            "dataset, or phalanx.DataLoader(part, is_own_part=True) to fit() on this rank's own; samples by rank: "
            + ", ".join(str(length) for length, _ in described)
        )


def have_the_same(value: Any, ranks: RankGroup) -> bool:
    """Return whether a value, such as lists of indices, is the same on every rank; every rank must call this."""
    return len({*ranks.gather(_digest(value))}) == 1


def have_own_parts(data: Any, ranks: RankGroup) -> bool:
    """Return whether each rank has its own part of the data, judging by lengths and by the indices of subsets.

    Raises:
        ValueError: The ranks' parts differ but have samples in common; every rank raises the error.
    """
    indices, whole = _chosen(data)
    num = len(whole) if hasattr(whole, "__len__") else 0
    described = ranks.gather((num, _digest(indices)))
    if len({*described}) == 1:
        return False
    if len({length for length, _ in described}) == 1:
        every = [index for of_rank in ranks.gather({*indices}) for index in of_rank]
        if len(set(every)) < len(every):
            raise ValueError(
                "Trainer: ranks have different parts of a dataset, and some samples are in several of them: was it "
                "split with another seed on each rank? Give all ranks the same dataset, or each a part of its own; "
                "parts that overlap on purpose: phalanx.DataLoader(part, is_own_part=True)"
            )
    return True


def _chosen(data: Any) -> tuple[list[Any], Any]:
    """Return the indices of a subset (or of a subset of a subset) in the whole dataset, and that dataset."""
    if not isinstance(data, Subset):
        return [], data
    inner, whole = _chosen(data.dataset)
    indices = data.indices.tolist() if hasattr(data.indices, "tolist") else list(data.indices)
    return [inner[index] for index in indices] if inner else indices, whole


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode()).digest()
