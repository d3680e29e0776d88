"""`DataPartitioner`: the tutorials' exercise of dividing a dataset by hand, without losing a sample."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset


class Partition(Dataset[Any]):
    """Part of a dataset: ``partition[i]`` is ``data[indices[i]]``."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data = data
        self.indices: list[int] = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]


class DataPartitioner:
    """Shuffles a dataset once and cuts it into parts, the same on every rank.

    Args:
        data: Anything with a length and items.
        sizes: Fractions, each at least 0, together at most 1. If they make 1, every sample is in exactly one part;
            each part is at most one sample off its fraction.
        seed: Of the shuffle.

    Raises:
        ValueError: `sizes` are negative, or more than the whole.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        total = math.fsum(sizes)
        if any(size < 0 for size in sizes) or total > 1 + 1e-9:
            raise ValueError(f"sizes must be fractions of at least 0 that make at most 1, got {list(sizes)}")
        order = list(range(len(data)))
        random.Random(seed).shuffle(order)
        # Cut where the fractions add up to, not after rounding each: what one part lacks the next one has.
        ends = [round(len(order) * math.fsum(sizes[: number + 1])) for number in range(len(sizes))]
        starts = [0, *ends][: len(ends)]
        self.data = data
        self.partitions: list[list[int]] = [order[start:end] for start, end in zip(starts, ends, strict=True)]

    def use(self, partition: int) -> Partition:
        """Return part number `partition`."""
        return Partition(self.data, self.partitions[partition])
