"""What a function would build: its code and what it can read, by which one key tells two functions apart.

A function that is called under a key is known by its place in the source and by the values that its code refers to:
arguments of a ``functools.partial``, defaults, closures, global variables and the object of a method. Functions of the
script that it refers to are followed. Of values that belong to libraries, only the class counts, because they may hold
what differs in each attempt, such as the session. Files and settings that the function reads are not known.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from phalanx.data.sharing.marks import marks, spread
from phalanx.failure.last_words import owner_of

_DEPTH = 8
_MOST = 20_000  # facts about one function
_PLAIN = (argparse.Namespace, types.SimpleNamespace)  # holders of settings


def digest_of_inputs(function: Any) -> str:
    """Return a digest that differs if a function's place, or something that its code refers to, differs."""
    digest = hashlib.blake2b(digest_size=16)
    for fact in islice(_facts(function, _DEPTH, set()), _MOST):
        digest.update(fact.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _facts(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    yield type(value).__qualname__
    if not depth or id(value) in seen:
        return
    if isinstance(value, (Tensor, bool, int, float, complex, str, bytes)) or type(value).__module__ == "numpy":
        yield repr(marks(value))
    elif isinstance(value, pathlib.PurePath):
        yield str(value)
    else:
        for part in _parts(value):
            yield from _facts(part, depth - 1, seen | {id(value)})


def _parts(value: Any) -> list[Any]:
    """Return what tells a value from others of its type."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    if isinstance(value, (list, tuple)):
        return [len(value), *(value[number] for number in spread(len(value)))]
    if isinstance(value, Mapping):
        return [len(value), *islice(value.items(), len(spread(len(value))))]
    if isinstance(value, _PLAIN) or dataclasses.is_dataclass(value) or _is_of_script(type(value)):
        return [getattr(value, "__dict__", {})]
    return []


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    code = function.__code__
    if owner_of(os.path.abspath(code.co_filename)):
        return [function.__module__, function.__qualname__]
    named = {name: function.__globals__[name] for name in sorted(_names(code)) if name in function.__globals__}
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [*_source(code), cells, function.__defaults__, function.__kwdefaults__, named]


def _source(code: types.CodeType) -> list[Any]:
    """Return where a function's code is, and the code: there may be two functions on a line."""
    inner = [_source(constant) if isinstance(constant, types.CodeType) else constant for constant in code.co_consts]
    return [code.co_filename, code.co_firstlineno, code.co_name, code.co_code, *inner]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function's code refers to, with those of the functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_of_script(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return bool(file) and not owner_of(os.path.abspath(file))
