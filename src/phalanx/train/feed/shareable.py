"""What a dataset holds that forked processes can't share: an open file, a connection, a thread that works for it."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import io
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset

_MOST_LOOKED_AT, _MOST_OF_EACH = 10_000, 100
_PLAIN = (
    str, bytes, bytearray, int, float, complex, type, ModuleType, torch.Tensor, torch.Generator, io.BytesIO, io.StringIO
)  # fmt: skip
# Whose objects can be had twice, whether or not they can be pickled; a lock that nobody holds is one of them.
_HARMLESS = ("builtins", "_thread", "_multiprocessing", "weakref", "mmap", "torch")


def unshareable(dataset: Any) -> str:
    """Return the class of the first thing in a dataset that processes forked from this one can't use side by side.

    They would move a file's position for each other, and take each other's answers from a connection; a thread is not
    there after a fork. Empty if there is nothing of the kind, as far as can be seen in a moment.
    """
    waiting, seen = collections.deque([dataset]), {id(dataset)}
    while waiting and len(seen) < _MOST_LOOKED_AT:
        value = waiting.popleft()
        if _is_bound_to_process(value):
            return f"{type(value).__module__}.{type(value).__qualname__}"
        for part in itertools.islice(_parts(value), _MOST_OF_EACH):
            if id(part) not in seen and not isinstance(part, _PLAIN):
                seen.add(id(part))
                waiting.append(part)
    return ""


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, threading.Thread):
        return ()  # one that has not begun, or has ended
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return value
    if isinstance(value, FunctionType):
        return _enclosed(value)
    return getattr(value, "__dict__", {}).values()


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _is_bound_to_process(value: Any) -> bool:
    if isinstance(value, threading.Thread):
        return value.is_alive()
    if isinstance(value, io.IOBase):
        is_standard = value in (sys.stdin, sys.stdout, sys.stderr)
        return not is_standard and not value.closed and value.readable()  # a log, to which all append, is not
    kind = type(value)
    # What has an array of its own would be copied; a dataset may drop for pickling what a fork would share.
    can_be_had_twice = kind.__module__.partition(".")[0] in _HARMLESS or kind in copyreg.dispatch_table
    if isinstance(value, Dataset) or can_be_had_twice or hasattr(kind, "__array__"):
        return False
    try:
        value.__reduce_ex__(2)
    except TypeError:  # from Python, and from extensions that follow it: "cannot pickle"
        return not hasattr(value, "__dict__")
    except Exception:  # user code
        return False
    return False
