"""Checks messages from other hosts, which may come from another version or program, or be incomplete."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Collection
from typing import Any

from phalanx.doctor.finding import LEVELS, Finding
from phalanx.wire.messages import GarbledError, one_of, read_value, require

_MOST_TEXT = 2000
_MOST_HOSTS = 100_000
_TOKEN_DIGITS = 32

level = one_of(*LEVELS)


def text(told: Any) -> str:
    """Return a printable text of limited length, without terminal control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in read_value(told, str)[:_MOST_TEXT])


def number(told: Any, least: float = -1e15, most: float = 1e15) -> float:
    require(type(told) in (int, float) and least <= told <= most, "a number", told)
    return float(told)


def whole(told: Any, least: int = 0, most: int = _MOST_HOSTS) -> int:
    require(least <= read_value(told, int) <= most, f"a whole number from {least} to {most}", told)
    return int(told)


def members(told: Any) -> list[int]:
    """Read the ranks of the hosts that came."""
    return sorted(set(read_value(told, [whole])))


def _address(told: Any) -> str:
    told = text(told)
    try:
        _ = told and ipaddress.ip_address(told)
    except ValueError:
        raise GarbledError(f"{told!r} is not an address") from None
    return told


def _token(told: Any) -> str:
    told = text(told)
    is_hexadecimal = len(told) == _TOKEN_DIGITS and set(told) <= set("0123456789abcdef")
    require(is_hexadecimal, "a token", told)
    return told


def _versions(told: Any) -> dict[str, str]:
    return {text(name): text(version) for name, version in read_value(told, dict).items() if isinstance(version, str)}


_FINDING = {
    "topic": text,
    "level": level,
    "found": text,
    "todo": text,
    "facts": dict,
    "host": lambda told: None if told is None else whole(told),
}
_TRIP = {"round_trip_s": functools.partial(number, least=0), "clock_ahead_s": number}


def finding(told: Any) -> Finding:
    return Finding(**_read(told, _FINDING))


_FACTS = {
    "name": text,
    "versions": _versions,
    "host": whole,
    "address": _address,
    "interface": text,
    "port": functools.partial(whole, least=1, most=0xFFFF),
    "token": _token,
    "findings": [lambda told: finding(told).as_dict()],
}


def facts(told: Any) -> dict[str, Any]:
    """Read the facts of a host, with its findings, each checked."""
    return _read(told, _FACTS)


def hosts(told: Any) -> list[dict[str, Any]]:
    """Read the facts of the hosts that came, without their findings."""
    of_host = {name: shape for name, shape in _FACTS.items() if name != "findings"}
    return [_read(one, of_host) for one in read_value(told, list)]


def measured(told: Any, ranks: Collection[int]) -> dict[str, Any]:
    """Read a host's measurements of its links to `ranks`, and its tries of Gloo."""
    told, links = read_value(told, {"links": dict, "gloo": [_try]}), {}
    for rank, link in told["links"].items():
        require(rank.isascii() and rank.isdigit() and int(rank[:9]) in ranks, "a host's rank", rank)
        links[str(int(rank[:9]))] = _link(link)
    return {"links": links, "gloo": told["gloo"]}


def _link(told: Any) -> dict[str, Any]:
    if "error" in read_value(told, dict):
        return _read(told, {"error": text, "todo": text})
    if "stream_error" in told:
        return _read(told, {**_TRIP, "stream_error": text})
    return _read(told, {**_TRIP, "bytes_per_s": functools.partial(number, least=0)} if "bytes_per_s" in told else _TRIP)


def _try(told: Any) -> dict[str, Any]:
    is_error = "error" in read_value(told, dict)
    outcome = {"error": text} if is_error else {"seconds": functools.partial(number, least=0)}
    return _read(told, {"interface": text, **outcome})


def _read(told: Any, shape: dict[str, Any]) -> dict[str, Any]:
    """Read a table, and return only the keys that the shape names."""
    read: dict[str, Any] = read_value(told, shape)
    return {name: read[name] for name in shape}
