"""What others say, taken apart: JSON of a known shape, or an error; nothing that anybody may write raises another."""

from __future__ import annotations

import json
from typing import Any

Shape = Any
"""A type; a dict of shapes by key, where more keys may be; ``[shape]``, a list of such; a tuple of the shapes of a
list; or a function that says whether a value fits."""


def understand(text: bytes | str, shape: Shape) -> Any:
    """Return the JSON in `text`.

    Raises:
        ValueError: It is none, or does not have the shape.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not fits(value, shape):
        raise ValueError(f"it is not of the expected form: {str(text)[:80]}")
    return value


def fits(value: Any, shape: Shape) -> bool:
    """Whether a value has a shape."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], one) for key, one in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
    if isinstance(shape, type):
        return type(value) is shape  # true is no number
    return bool(shape(value))
