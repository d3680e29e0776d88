"""The arguments of ``@pytest.mark.ranks``, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from phalanx import _env
from phalanx.testing.ranks import OPTIONS

_OF_FUNCTIONS = ("kwargs", "warm")
_RIGHT = "right: @pytest.mark.ranks(2), @pytest.mark.ranks(1, 2, 3), or @pytest.mark.ranks(2, backend='gloo')"


@dataclasses.dataclass(frozen=True)
class Options:
    """Keyword arguments of the mark: those of `spawn_ranks` that do not describe a function, and a time limit.

    Attributes:
        group: Keyword arguments of `group_in_folder`.
    """

    group: Mapping[str, Any]
    env: Mapping[str, str]
    timeout_s: float | None

    @classmethod
    def of(cls, mark: pytest.Mark) -> Options:
        """Return the options of a mark.

        Raises:
            ValueError: An option is invalid.
        """
        options = {name: default for name, default in OPTIONS.items() if name not in _OF_FUNCTIONS}
        options["timeout_s"] = None
        for name in mark.kwargs:
            if name == "start_method":
                raise ValueError(
                    "ranks() has no start_method: ranks are forked from the test's process; a function that needs an "
                    "interpreter of its own runs by phalanx.testing.run_ranks"
                )
            if name not in options:
                near = _env.did_you_mean(name, [*options])
                raise ValueError(f"ranks() has no option {name}{near}; it has {', '.join(options)}")
        options |= mark.kwargs
        for name in ("timeout_s", "group_timeout_s"):
            value = options[name]
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}")
        backend, init, init_method, hosts = (options[name] for name in ("backend", "init", "init_method", "hosts"))
        if backend is not None and not isinstance(backend, str):
            raise ValueError(f"backend must be a string such as 'phalanx' or 'gloo', or None, got {backend!r}")
        if not isinstance(init, bool):
            raise ValueError(f"init must be True or False, got {init!r}")
        if init_method is not None and not isinstance(init_method, str):
            raise ValueError(f"init_method must be 'file', 'tcp', 'env' or a URL, got {init_method!r}")
        env, timeout_s = options.pop("env"), options.pop("timeout_s")
        if env is not None and not _is_environment(env):
            raise ValueError(
                "env must be a dictionary of strings, with names that are not empty and hold no '=', and no zero "
                f"bytes; got {env!r}"
            )
        if not (isinstance(hosts, (list, tuple)) and all(map(_is_size, hosts))):
            raise ValueError(f"hosts must be a list with the number of ranks of each host, got {hosts!r}")
        return cls(options, env or {}, timeout_s)


def sizes_of(mark: pytest.Mark) -> tuple[Any, ...]:
    """Return the world sizes that a mark names, unchecked; a list stands for its elements."""
    return tuple(size for arg in mark.args for size in (arg if isinstance(arg, (list, tuple, range)) else [arg]))


def checked_sizes(mark: pytest.Mark, options: Options) -> tuple[int, ...]:
    """Return the world sizes that a mark names.

    Raises:
        ValueError: The mark names no world size, a world size is invalid, or the ranks of `hosts` do not add up to it.
    """
    sizes = sizes_of(mark)
    if not sizes:
        raise ValueError(f"a number of ranks is missing; {_RIGHT}")
    for size in sizes:
        if not _is_size(size):
            raise ValueError(f"a number of ranks must be a whole number of at least 1, got {size!r}; {_RIGHT}")
        hosts = options.group["hosts"]
        if hosts and sum(hosts) != size:
            raise ValueError(f"hosts must add up to the {size} ranks, got {list(hosts)}")
    return sizes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_environment(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    words = [word for pair in value.items() for word in pair]
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        return False
    return all(name and "=" not in name for name in value)
