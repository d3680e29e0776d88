"""What stands in place of a loader's indices while torch iterates them, so that an epoch can continue.

torch asks for indices ahead of the batches that it hands over, if there are workers.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterator
from typing import Any


def pass_over(items: Iterator[Any], number: int) -> None:
    """Take so many items of an iterator, and forget them."""
    collections.deque(itertools.islice(items, number), maxlen=0)


class Noting:
    """The indices of a loader; notes of each the state of its sampler behind it."""

    def __init__(self, indices: Any, sampler: Any, notes: collections.deque[Any]) -> None:
        self._indices, self._sampler, self._notes = indices, sampler, notes

    def __iter__(self) -> Iterator[Any]:
        for index in self._indices:
            self._notes.append(copy.deepcopy(self._sampler.state_dict()))
            yield index

    def __len__(self) -> int:
        return len(self._indices)


class Rest:
    """The indices of a loader, in the first iteration without those at its beginning.

    torch draws the workers' seed before it asks for an index, and a sampler may draw its order when it is asked. So
    indices are passed over not when the iteration begins, but when the first index is asked for or afterwards.
    """

    def __init__(self, indices: Any, num_passed: int) -> None:
        self._indices, self._num_passed = indices, num_passed
        self._left: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._left = iter(self._indices)
        return self._walk()

    def __len__(self) -> int:
        return len(self._indices)

    def _walk(self) -> Iterator[Any]:
        self.pass_over()
        yield from self._left

    def pass_over(self) -> None:
        number, self._num_passed = self._num_passed, 0
        pass_over(self._left, number)

    def end(self) -> None:
        """Let the indices end, all of which were yielded: torch's ``RandomSampler`` draws once more at its end."""
        pass_over(self._left, 1)
