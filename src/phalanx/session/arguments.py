"""A decorator for functions: a call with an unknown argument raises an error that suggests the right name."""

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
    """Return a decorator: a call of the decorated function with an unknown argument raises the error from `unknown`.

    Args:
        unknown: Function that is passed the decorated function's name, the unknown argument and all known arguments,
            and returns the error.
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
