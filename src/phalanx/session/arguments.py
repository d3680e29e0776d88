"""Functions that reject unknown arguments and name the one that is meant."""

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
    """Make an unknown argument of a function an error that names the one that is meant.

    Args:
        unknown: Function that returns the error, of the function's name, the argument's, and those that exist.
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
