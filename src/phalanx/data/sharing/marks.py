"""Marks of data: facts that are the same for the same data, by which ranks compare what each of them has built.

Types, lengths and shapes are compared everywhere; of long lists and arrays, at most 64 places, spread over the whole.
Of objects whose content has no order or is unknown, only the type counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from phalanx.data.sharing.packing import Region
from phalanx.data.sharing.shared_list import SharedList

_COMPARED = 64  # items of each list, and elements of each row, that are compared
_MOST = 20_000  # marks of one object
_DEPTH = 6


def marks(data: Any) -> list[tuple[str, str]]:
    """Return the marks of data, each with the name of the part that it describes."""
    return [*islice(_marks(data, "the data", _DEPTH, set()), _MOST)]


def _marks(data: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    yield f"the type of {name}", type(data).__name__
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        text = repr(data)
        yield name, text if len(text) <= _COMPARED else f"{text[:20]}... ({_digest(text.encode())})"
    elif isinstance(data, Tensor):
        yield f"the shape of {name}", f"{data.dtype} {list(data.shape)}"
        if data.layout is torch.strided and data.numel():
            yield from _marks_of_rows(data.detach(), name)
    elif _is_array(data):
        yield f"the shape of {name}", f"{data.dtype} {list(data.shape)}"
        for number in spread(len(data)) if data.ndim else ():
            yield f"row {number} of {name}", _digest(data[number].reshape(-1)[:_COMPARED].tobytes())
    elif depth and id(data) not in seen:
        yield from _marks_of_parts(data, name, depth - 1, seen | {id(data)})


def _marks_of_parts(data: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(Exception):  # such as a `__len__` that raises
        yield f"the length of {name}", f"{len(data)}"
    if isinstance(data, (list, tuple, SharedList)):
        for number in spread(len(data)):
            yield from _marks(data[number], f"item {number} of {name}", depth, seen)
    elif isinstance(data, Mapping):
        for key in islice(sorted(key for key in data if isinstance(key, str)), _COMPARED):
            yield from _marks(data[key], f"{name}[{key!r}]", depth, seen)
    elif not isinstance(data, Region):  # whose place differs on each rank
        for key, value in sorted(getattr(data, "__dict__", {}).items()):
            yield from _marks(value, f"{key} of {name}", depth, seen)


def _marks_of_rows(data: Tensor, name: str) -> Iterator[tuple[str, str]]:
    for number in spread(len(data) if data.dim() else 1):
        with contextlib.suppress(RuntimeError):  # of some dtypes and devices, torch can't read the elements
            row = (data[number] if data.dim() else data).reshape(-1)[:_COMPARED].cpu().resolve_conj().resolve_neg()
            yield f"row {number} of {name}", _digest(bytes(row.contiguous().view(torch.uint8).tolist()))


def spread(length: int) -> list[int]:
    """Return at most 64 indices of a sequence: the first, the last, and some between them."""
    if length <= _COMPARED:
        return [*range(length)]
    return [number * (length - 1) // (_COMPARED - 1) for number in range(_COMPARED)]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # without it, there are no arrays
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _digest(data: bytes) -> str:
    return f"hash {hashlib.blake2b(data, digest_size=6).hexdigest()}"
