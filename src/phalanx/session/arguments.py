"""A decorator whose functions reject unknown arguments and name the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def naming_arguments(
    unknown: Callable[[str, str, list[str]], TypeError],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: if a function is called with an unknown argument, it raises the error that `unknown` returns.

    Args:
        unknown: Function that takes the function's name, the argument's name and all known names; returns the error.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in known:
                    raise unknown(function.__name__, name, known)
            return function(*args, **kwargs)

        return checked

    return decorate
