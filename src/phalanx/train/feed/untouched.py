"""`untouched`: a copy of a dataset, for samples that this process loads although forked processes load the others.

A rank without a part of a batch goes along with a sample that weighs nothing. Many datasets open a file when they are
first asked for a sample, and processes that inherit an open file move one position together and read each other's
samples. So that one sample comes from a copy of the dataset, and of the datasets within, which shares everything else.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from torch.utils.data import Dataset, IterableDataset


def untouched(dataset: Any) -> Any:
    """Return a dataset to load from here, before processes are forked that load from the given one.

    Many datasets open a file when they are first asked for a sample. Forked processes would share that file's position
    and read each other's samples, so it must not be open in what they inherit. Everything but the datasets themselves
    is shared.
    """
    return _apart(dataset, {})


def _apart(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        try:
            twin = known[id(value)] = _twin(value)
        except Exception:  # of a class that is more than Python's own
            return value
        for name, held in [*getattr(twin, "__dict__", {}).items()]:
            twin.__dict__[name] = _apart(held, known)
        return twin
    if type(value) is dict and any(isinstance(held, Dataset) for held in itertools.islice(value.values(), 1)):
        return {key: _apart(held, known) for key, held in value.items()}
    if type(value) in (list, tuple) and any(isinstance(held, Dataset) for held in value[:1]):
        return type(value)(_apart(held, known) for held in value)
    return value


def _twin(value: Any) -> Any:
    """Return another object with the same attributes: not a copy as by pickling, for which a class may drop some."""
    kind = type(value)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return copy.copy(value)
    twin = object.__new__(kind)
    twin.__dict__.update(value.__dict__)
    return twin
