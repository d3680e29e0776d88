"""What a function would build: its code and what it can read, by which one key tells two functions apart.

A function that is called under a key is known by its place in the source and by the values that its code refers to:
arguments of a ``functools.partial``, defaults, closures, global variables and the object of a method. Functions of the
script that it refers to are followed, and so are its classes and modules. Of most objects of libraries, only the class
counts, because they may hold what differs in each attempt, such as the session. What is too deep or too long to be
looked at in whole gets a digest that no other call gets: to build anew is better than to give other data. Files and
settings that the function reads are not known.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import hashlib
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.data.sharing.marks import marks
from phalanx.failure.last_words import owner_of

_DEPTH = 24
_MOST = 20_000  # facts about one function
_PLAIN = (argparse.Namespace, types.SimpleNamespace)  # holders of settings
_SHOWN = (
    pathlib.PurePath, range, slice, bytearray, torch.dtype, torch.device, datetime.date, datetime.time,
    datetime.timedelta, decimal.Decimal, fractions.Fraction,
)  # fmt: skip  # types whose text is the value


def digest_of_inputs(function: Any) -> str:
    """Return a digest that differs if a function's place, or something that its code refers to, differs."""
    digest = hashlib.blake2b(digest_size=16)
    for number, fact in enumerate(_facts(function, _DEPTH, set())):
        digest.update(fact.encode("utf-8", "surrogatepass") + b"\0")
        if number == _MOST:
            digest.update(os.urandom(16))
            break
    return digest.hexdigest()


def _facts(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    yield type(value).__qualname__
    if id(value) in seen:
        return
    if not depth:
        yield os.urandom(16).hex()
        return
    if isinstance(value, (Tensor, bool, int, float, complex, str, bytes)) or type(value).__module__ == "numpy":
        yield repr(marks(value))
    elif isinstance(value, _SHOWN):
        yield repr(value)
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
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # as of functools.lru_cache
        return [wrapped]
    if isinstance(value, type):
        return [value.__module__, value.__qualname__, *(_members(value) if _is_of_script(value) else [])]
    if isinstance(value, types.ModuleType):
        return [value.__name__, *(_members(value) if _is_script(getattr(value, "__file__", None)) else [])]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple, collections.deque)):
        return [len(value), *value, getattr(value, "__dict__", {})]
    if isinstance(value, Mapping):
        return [len(value), *value.items()]
    if isinstance(value, _PLAIN) or dataclasses.is_dataclass(value) or _is_of_script(type(value)):
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        return [type(value), getattr(value, "__dict__", {}), slots]
    return []


def _members(owner: Any) -> list[Any]:
    """Return what a class or a module of the script defines, but not what it has imported or what Python adds."""
    return [
        (name, getattr(value, "__func__", value))
        for name, value in sorted(vars(owner).items())
        if (callable(value) or not name.startswith("__")) and not isinstance(value, types.ModuleType)
    ]


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    code = function.__code__
    if not _is_script(code.co_filename):  # such as torch.no_grad() around a function
        return [function.__module__, function.__qualname__, getattr(function, "__wrapped__", None)]
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
    return _is_script(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _is_script(file: str | None) -> bool:
    """Whether a file belongs to the script, rather than to Python or to a library."""
    return bool(file) and not owner_of(os.path.abspath(str(file)))
