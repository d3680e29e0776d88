"""`DataPartitioner`: divides a dataset by hand, as in torch's distributed tutorial, without losing a sample."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset


class Partition(Subset[Any]):
    """Part of a dataset, a torch ``Subset``: ``partition[i]`` is ``data[indices[i]]``.

    Args:
        data: Whole dataset.
        indices: Indices of the samples in this part.

    Example:
        >>> part = phalanx.data.Partition("abcd", [3, 1])
        >>> list(part)
        ['d', 'b']
    """

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        super().__init__(data, list(indices))
        self.data = data


class DataPartitioner:
    """Shuffles a dataset once and cuts it into parts, which are the same on every rank.

    Args:
        data: Dataset with ``__len__`` and ``__getitem__``.
        sizes: Fraction of the dataset for each part: each at least 0, together at most 1. If they add up to 1, every
            sample is in exactly one part. A part's length differs from its fraction of the dataset by at most one
            sample.
        seed: Seed of the shuffle.

    Raises:
        ValueError: A size is negative, or the sizes add up to more than 1.

    Example:
        >>> partitioner = phalanx.DataPartitioner(range(10), sizes=(0.7, 0.3))
        >>> train, test = partitioner.use(0), partitioner.use(1)
        >>> len(train), len(test)
        (7, 3)
        >>> sorted([*train, *test]) == list(range(10))
        True
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        total = math.fsum(sizes)
        if any(size < 0 for size in sizes) or total > 1 + 1e-9:
            raise ValueError(f"sizes must be fractions of at least 0 that add up to at most 1, got {list(sizes)}")
        order = list(range(len(data)))
        random.Random(seed).shuffle(order)
        # Rounding each part's length could lose samples. Rounding the ends loses none: each part begins where one ends.
        ends = [round(len(order) * math.fsum(sizes[: number + 1])) for number in range(len(sizes))]
        starts = [0, *ends][: len(ends)]
        self.data = data
        self.partitions: list[list[int]] = [order[start:end] for start, end in zip(starts, ends, strict=True)]

    def use(self, partition: int) -> Partition:
        """Return a part.

        Args:
            partition: Number of the part, from 0; often the rank.
        """
        return Partition(self.data, self.partitions[partition])
