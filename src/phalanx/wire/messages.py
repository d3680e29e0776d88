"""Converts data from other processes to values of a declared form, or raises an error that says what is wrong.

Data from outside this process (an agent's line, the value of a key in a store, a file in a run's folder) may be from
another version or another program, may be cut short, or may be made up. So no code picks fields out of parsed JSON.
Instead, a reader declares a form, most often a dataclass, and `read_value` returns an object of that form or raises a
`GarbledError` that says what is wrong. Bounds are part of the form::

    @dataclass(frozen=True)
    class Node:
        host: Annotated[str, cropped(300)]
        port: Annotated[int, between(1, 65535)]

pydantic and msgspec offer the same, but they would be a dependency that saves only a hundred lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Shape = Any
"""Form of a value.

A shape is a type hint (a plain type; a dataclass; ``list``, ``tuple``, ``dict`` or ``Literal`` with arguments; a union;
``Annotated`` with functions that check a value and return it) or one of: ``{"key": shape}``, a table with at least
these keys; ``[shape]``, a list of any length; ``(shape, shape)``, a list of exactly these items; a function that takes
the JSON value and returns the value to use, or raises ValueError.
"""

LOCAL = types.MappingProxyType({"local": True})
"""Metadata that marks a dataclass's field as local: the field is neither written nor read."""

_MOST = 2**63
_MOST_DIGITS = 20
_SHOWN = 80  # number of characters of a rejected value that the error shows
_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


class GarbledError(ValueError):
    """Data from another process does not have the form in which this library writes it."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text whose numbers are safe to compute with: finite, and within 64 bits.

    Raises:
        ValueError: The text is not JSON, contains a number outside these bounds, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _int(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS and -_MOST <= int(text) < _MOST else _refuse_number(text)


def _float(text: str) -> float:
    value = float(text)  # may be NaN, which the comparison below rejects
    return value if -_MOST <= value < _MOST else _refuse_number(text)


def _refuse_number(number: str) -> NoReturn:
    raise ValueError(f"{number[:_MOST_DIGITS]} is not a 64-bit number")


def as_facts(value: Any) -> Any:
    """Return `value` with each dataclass in it converted to a dict of the fields that are not local."""
    if dataclasses.is_dataclass(value):
        told = (field.name for field in dataclasses.fields(value) if not field.metadata.get("local"))
        return {name: as_facts(getattr(value, name)) for name in told}
    if isinstance(value, dict):
        return {key: as_facts(one) for key, one in value.items()}
    return [as_facts(one) for one in value] if isinstance(value, (list, tuple)) else value


def understand(text: bytes | bytearray | str, shape: Shape) -> Any:
    """Return the value of the JSON in `text`, read as `shape`.

    Raises:
        GarbledError: The text is not JSON, or its value does not have the shape.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise GarbledError(f"it is not JSON: {error}") from None
    return read_value(value, shape)


def read_value(value: Any, shape: Shape) -> Any:
    """Return a parsed JSON value, read as `shape`.

    Raises:
        GarbledError: The value does not have the shape.
    """
    if shape is Any or type(value) is shape:
        return value
    if isinstance(shape, dict):
        require(isinstance(value, dict) and shape.keys() <= value.keys(), f"a table with {', '.join(shape)}", value)
        return {**value, **{key: read_value(value[key], one) for key, one in shape.items()}}
    if isinstance(shape, list):
        require(isinstance(value, list), "a list", value)
        return [read_value(one, shape[0]) for one in value]
    if isinstance(shape, tuple):
        return list(_items(value, shape))
    if dataclasses.is_dataclass(shape):
        return _read_dataclass(value, shape)
    if (origin := typing.get_origin(shape)) is not None:
        return _read_generic(value, origin, typing.get_args(shape))
    if shape is None or shape is types.NoneType:
        require(value is None, "nothing", value)
        return None
    if isinstance(shape, type):
        # Subclasses are rejected, because True, whose class is a subclass of int, is not a number.
        require(type(value) is shape or (shape is float and type(value) is int), _NAMES.get(shape, str(shape)), value)
        return value
    return _apply(shape, value)


def _read_dataclass(value: Any, shape: Any) -> Any:
    require(isinstance(value, dict), "a table", value)
    hints = _hints(shape)
    given = {name: _read_field(name, value[name], hint) for name, hint in hints.items() if name in value}
    try:
        return _apply(lambda fields: shape(**fields), given)  # the dataclass's __post_init__ may reject the fields
    except TypeError:
        has_default = {one.name for one in dataclasses.fields(shape) if _has_default(one)}
        missing = [name for name in hints if name not in given and name not in has_default]
        raise GarbledError(f"{_shown(value)} has no {' or '.join(missing)}") from None


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not (field.default is field.default_factory is dataclasses.MISSING)


def _read_field(name: str, value: Any, shape: Shape) -> Any:
    try:
        return read_value(value, shape)
    except GarbledError as error:
        raise GarbledError(f"{name}: {error}") from None


@functools.cache
def _hints(shape: Any) -> dict[str, Any]:
    """Return the forms of the fields that are read, by name.

    Fields marked `LOCAL` are left out, and so are fields that the dataclass's constructor does not take.
    """
    hints = typing.get_type_hints(shape, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(shape)
        if field.init and not field.metadata.get("local")
    }


def _read_generic(value: Any, origin: Any, options: tuple[Any, ...]) -> Any:
    if origin in (types.UnionType, typing.Union):
        return _first_that_fits(value, options)
    if origin is typing.Annotated:
        return functools.reduce(lambda read, check: _apply(check, read), options[1:], read_value(value, options[0]))
    if origin is typing.Literal:
        return one_of(*options)(value)
    if origin is tuple and options[1:] != (...,):
        return tuple(_items(value, options))
    if origin in (list, tuple):
        require(isinstance(value, (list, tuple)), "a list", value)
        return origin(read_value(one, options[0]) for one in value)
    require(origin in (dict, Mapping) and isinstance(value, dict), "a table", value)
    return {_read_key(key, options[0]): read_value(one, options[1]) for key, one in value.items()}


def _items(value: Any, shapes: tuple[Shape, ...]) -> typing.Iterator[Any]:
    """Return an iterator over the items of a list of a fixed length, each read as the shape at its place."""
    is_so = isinstance(value, (list, tuple)) and len(value) == len(shapes)
    require(is_so, f"a list of {len(shapes)}", value)
    return (read_value(one, shape) for one, shape in zip(value, shapes, strict=True))


def _read_key(key: Any, shape: Shape) -> Any:
    """Return a key of a table, read as `shape`; JSON writes even keys that are numbers as text."""
    if shape is not int or type(key) is int:
        return read_value(key, shape)
    require(key.isascii() and key.isdecimal() and len(key) < _MOST_DIGITS, "a whole number", key)
    return int(key)


def _first_that_fits(value: Any, options: tuple[Shape, ...]) -> Any:
    if value is None and types.NoneType in options:
        return None
    *others, last = (option for option in options if option is not types.NoneType)
    for option in others:
        with contextlib.suppress(GarbledError):
            return read_value(value, option)
    return read_value(value, last)  # outside of `suppress`, so that the error of the last option is raised


def _apply(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except GarbledError:
        raise
    except ValueError as error:
        raise GarbledError(str(error)) from None


def fits(value: Any, shape: Shape) -> bool:
    """Whether a value can be read as `shape`."""
    with contextlib.suppress(GarbledError):
        read_value(value, shape)
        return True
    return False


def require(is_so: bool, what: str, value: Any) -> None:
    """Unless `is_so`, raise a `GarbledError` that says what the value should be."""
    if not is_so:
        raise GarbledError(f"{_shown(value)} is not {what}")


def _shown(value: Any) -> str:
    with contextlib.suppress(RecursionError):
        return repr(value)[:_SHOWN]
    return "a value that is nested too deeply"


# ---------------------------------------------------------------- bounds, for Annotated


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Return a check that a value is one of `values`."""

    def check(value: Any) -> Any:
        require(value in values, f"one of {', '.join(map(str, values))}", value)
        return value

    return check


def between(least: float, most: float) -> Callable[[Any], Any]:
    """Return a check that a number lies in ``[least, most]``."""

    def check(value: Any) -> Any:
        require(least <= value <= most, f"a number from {least} to {most}", value)
        return value

    return check


def cropped(most: int) -> Callable[[Any], Any]:
    """Return a function for `Annotated` that cuts a text or a list after `most` characters or items."""
    return lambda value: value[:most]
