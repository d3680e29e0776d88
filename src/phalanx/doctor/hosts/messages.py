"""Checks the form of messages from other hosts, which another version or program may have sent, or which may be cut."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Annotated, Any

from phalanx.doctor.finding import LEVELS, Finding
from phalanx.wire.messages import GarbledError, Shape, between, cropped, one_of, read_value, require

_TOKEN_DIGITS = 32


def _printable(text: str) -> str:
    """Replace characters that would control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


text = Annotated[str, cropped(2000), _printable]
number = Annotated[float, between(-1e15, 1e15)]
amount = Annotated[float, between(0, 1e15)]
whole = Annotated[int, between(0, 100_000)]
level = one_of(*LEVELS)


def members(told: Any) -> list[int]:
    """Return the checked ranks of the hosts that have arrived."""
    return sorted({*read_value(told, [whole])})


def _address(told: Any) -> Any:
    address = read_value(told, text)
    try:
        _ = address and ipaddress.ip_address(address)
    except ValueError:
        raise GarbledError(f"{address!r} is not an address") from None
    return address


def _token(told: str) -> str:
    require(len(told) == _TOKEN_DIGITS and {*told} <= {*"0123456789abcdef"}, "a token", told)
    return told


def _versions(told: dict[str, Any]) -> dict[str, str]:
    return read_value({name: one for name, one in told.items() if isinstance(one, str)}, dict[text, text])


_FINDING = {"topic": text, "level": level, "found": text, "todo": text, "facts": dict, "host": whole | None}
_TRIP = {"round_trip_s": amount, "clock_ahead_s": number}
_HOST = {
    "name": text,
    "versions": Annotated[dict, _versions],
    "host": whole,
    "address": _address,
    "interface": text,
    "port": Annotated[int, between(1, 0xFFFF)],
    "token": Annotated[str, _token],
}


def finding(told: Any) -> Finding:
    return Finding(**_read(told, _FINDING))


def facts(told: Any) -> dict[str, Any]:
    """Return the checked facts of a host, including its checked findings."""
    return _read(told, {**_HOST, "findings": [lambda one: _read(one, _FINDING)]})


def hosts(told: Any) -> list[dict[str, Any]]:
    """Return the checked facts of the hosts that have arrived, without their findings."""
    return [_read(one, _HOST) for one in read_value(told, list)]


def measured(told: Any, ranks: Collection[int]) -> dict[str, Any]:
    """Return a host's checked measurements: its links to the other hosts in `ranks`, and its tries of Gloo."""
    found: dict[str, Any] = read_value(told, {"links": dict[int, Annotated[dict, _link]], "gloo": [_try]})
    require(found["links"].keys() <= {*ranks}, "a table of links to the other hosts", told["links"])
    return {"links": {str(rank): link for rank, link in found["links"].items()}, "gloo": found["gloo"]}


def _link(told: dict[str, Any]) -> dict[str, Any]:
    if "error" in told:
        return _read(told, {"error": text, "todo": text})
    if "stream_error" in told:
        return _read(told, {**_TRIP, "stream_error": text})
    return _read(told, {**_TRIP, "bytes_per_s": amount} if "bytes_per_s" in told else _TRIP)


def _try(told: Any) -> dict[str, Any]:
    result = {"error": text} if "error" in read_value(told, dict) else {"seconds": amount}
    return _read(told, {"interface": text, **result})


def _read(told: Any, shape: dict[str, Shape]) -> dict[str, Any]:
    """Check a table, and return only the keys that the shape names."""
    read: dict[str, Any] = read_value(read_value(told, dict), shape)
    return {name: read[name] for name in shape}
