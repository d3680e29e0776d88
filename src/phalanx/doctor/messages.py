"""What hosts tell each other, read with distrust: another version, another program, or half a message may have come."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from phalanx.doctor.finding import LEVELS, Finding

T = TypeVar("T")
Reader = Callable[[Any], T]
"""Returns what was told, checked; raises `GarbledError`."""

_MOST_TEXT = 2000
_MOST_HOSTS = 100_000
_TOKEN_DIGITS = 32


class GarbledError(ValueError):
    """What a host told is not what the doctor tells."""


def read(data: bytes | str, reader: Reader[T]) -> T:
    """Return a message of JSON as its reader returns it.

    Raises:
        GarbledError: It is something else.
    """
    try:
        return reader(json.loads(data))
    except GarbledError:
        raise
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"no JSON: {type(error).__name__}") from None


def text(told: Any) -> str:
    """Return a text that can be printed: without what moves a terminal's cursor, and not without end."""
    _must(isinstance(told, str), "a text", told)
    return "".join(letter if letter.isprintable() else "?" for letter in told[:_MOST_TEXT])


def number(told: Any, least: float = -1e15, most: float = 1e15) -> float:
    _must(isinstance(told, (int, float)) and not isinstance(told, bool) and least <= told <= most, "a number", told)
    return float(told)


def whole(told: Any, least: int = 0, most: int = _MOST_HOSTS) -> int:
    _must(isinstance(told, int) and not isinstance(told, bool) and least <= told <= most, "a whole number", told)
    return int(told)


def level(told: Any) -> str:
    _must(isinstance(told, str) and told in LEVELS, f"one of {', '.join(LEVELS)}", told)
    return str(told)


def members(told: Any) -> list[int]:
    """Read the ranks of the hosts that have come."""
    return sorted({whole(rank) for rank in _list(told)})


def finding(told: Any) -> Finding:
    told = _dict(told)
    host = told.get("host")
    return Finding(
        topic=text(told.get("topic")),
        level=level(told.get("level")),
        found=text(told.get("found")),
        todo=text(told.get("todo", "")),
        facts=_dict(told.get("facts", {})),
        host=None if host is None else whole(host),
    )


def facts(told: Any) -> dict[str, Any]:
    """Read what a host says of itself; its findings as they are told, each checked."""
    told = _dict(told)
    address, token = text(told.get("address")), text(told.get("token"))
    try:
        _ = address and ipaddress.ip_address(address)
        bytes.fromhex(token)
    except ValueError:
        raise GarbledError(f"{address!r} or {token!r} is no address or token") from None
    _must(len(token) == _TOKEN_DIGITS, "a token", token)
    return {
        "name": text(told.get("name")),
        "versions": {
            text(name): text(version)
            for name, version in _dict(told.get("versions")).items()
            if isinstance(version, str)
        },
        "host": whole(told.get("host")),
        "address": address,
        "interface": text(told.get("interface")),
        "port": whole(told.get("port"), 1, 0xFFFF),
        "token": token,
        "findings": [finding(one).as_dict() for one in _list(told.get("findings", []))],
    }


def all_facts(told: Any) -> list[dict[str, Any]]:
    return [facts(one) for one in _list(told)]


def measured(told: Any, ranks: Collection[int]) -> dict[str, Any]:
    """Read what a host has measured towards the others, which are `ranks`."""
    told, links = _dict(told), {}
    for rank, link in _dict(told.get("links", {})).items():
        _must(rank.isascii() and rank.isdigit() and int(rank[:9]) in ranks, "a host's rank", rank)
        links[str(int(rank[:9]))] = _link(_dict(link))
    return {"links": links, "gloo": [_try(_dict(one)) for one in _list(told.get("gloo", []))]}


def _link(told: dict[str, Any]) -> dict[str, Any]:
    if "error" in told:
        return {"error": text(told["error"]), "todo": text(told.get("todo", ""))}
    link: dict[str, Any] = {
        "round_trip_s": number(told.get("round_trip_s"), 0),
        "clock_ahead_s": number(told.get("clock_ahead_s")),
    }
    if "stream_error" in told:
        link["stream_error"] = text(told["stream_error"])
    elif "bytes_per_s" in told:
        link["bytes_per_s"] = number(told["bytes_per_s"], 0)
    return link


def _try(told: dict[str, Any]) -> dict[str, Any]:
    what = {"error": text(told["error"])} if "error" in told else {"seconds": number(told.get("seconds"), 0)}
    return {"interface": text(told.get("interface", "")), **what}


def _list(told: Any) -> list[Any]:
    _must(isinstance(told, list), "a list", told)
    return list(told)


def _dict(told: Any) -> dict[str, Any]:
    _must(isinstance(told, dict), "a table", told)
    return dict(told)


def _must(is_so: bool, what: str, told: Any) -> None:
    if not is_so:
        raise GarbledError(f"{repr(told)[:80]} is not {what}")
