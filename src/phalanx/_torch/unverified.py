"""Prints a line if PHALANX_VERIFY asks for verification but a group is torch's own Gloo, which is not verified.

Without that line, the user of a script on Gloo would believe that all results had been compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from phalanx import _env, _torch
from phalanx._torch.replace import say_once


def watch() -> None:
    """Check each group that this process makes from now on."""
    from torch.distributed import is_available

    if is_available():
        _torch.wrap_making_of_groups(_noted)


def _noted(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new_process_group_helper(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        with contextlib.suppress(Exception):  # an error here must not fail the job
            if _is_gloos(made[0]) and made[0].rank() == 0:
                say_once(f"{_env.VERIFY_VARIABLE}: {_why_nothing_is_verified()}")
        return made

    return new_process_group_helper


def _is_gloos(group: Any) -> bool:
    import torch.distributed as dist

    return type(group) is dist.ProcessGroup and "gloo" in str(dist.get_backend_config(group))


def _why_nothing_is_verified() -> str:
    word = _env.environment().get(_env.VERIFY_VARIABLE, "")
    try:
        _env.verifies_every(word)
    except ValueError as error:
        return f"{error}, got {word!r}; nothing is verified"
    what = "a group of torch's own Gloo is not verified, only those of phalanx are"
    if _env.environment().get(_env.REPLACE_VARIABLE):
        return f"{what}; this one stays on Gloo"
    return (
        f"{what}. To verify this script, let them take Gloo's place: {_env.REPLACE_VARIABLE}=gloo "
        "(phalanx run --replace-gloo)"
    )
