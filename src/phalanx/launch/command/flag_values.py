"""Parsers for the values of flags. Each raises a `ValueError` that says which form the value must have."""

from __future__ import annotations

import math
import signal
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from phalanx._env import is_off, is_on, replaces_gloo, verifies_every
from phalanx.wire.web_server import split_address

PROVIDERS = ("aws", "gcp", "azure")
"""Cloud providers whose preemption notices `launch.nodes.notices` can read."""
_FORBIDDEN_SIGNALS = {"SIGKILL", "SIGSTOP"}  # they can't be handled


def number(
    kind: Callable[[str], float], least: float, what: str, *, most: float = math.inf, words: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return a parser for a number from `least` to `most`, or one of `words`; an error says that it must be `what`."""

    def parse(text: str) -> float | str:
        if text in words:
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            raise ValueError(f"must be {what}")
        return value

    return parse


def switch(text: str) -> bool:
    if not (is_on(text) or is_off(text)):
        raise ValueError("must be 1 or 0")
    return is_on(text)


def gloo(text: str) -> bool:
    return text == "1" or replaces_gloo(text)  # --replace-gloo gives 1; PHALANX_REPLACE can have other values


def verification(text: str) -> str:
    """Check a value of PHALANX_VERIFY, and return it."""
    verifies_every(text)
    return text


def choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return text

    return parse


def nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes."""
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise ValueError("must be N or MIN:MAX with 1 <= MIN <= MAX")
    return int(least), int(most or least)


def hosts(text: str) -> str:
    """Return one host or address, or several separated by commas, without duplicates."""
    hosts = [part.strip() for part in text.split(",")]
    if text and not all(hosts):
        raise ValueError("must be one host, or several as HOST,HOST")
    return ",".join(dict.fromkeys(hosts))


def notice_url(text: str) -> str:
    if text and text not in PROVIDERS and not _is_url(text):
        raise ValueError(f"must be a URL of http, or {', '.join(PROVIDERS)}")
    return text


def _is_url(text: str) -> bool:
    """Return whether `text` is a valid URL. Without this check, a wrong URL would silently never give a notice."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:  # a malformed address in brackets, or a malformed port
        return False


_COUNTS = ("auto", "cpu", "gpu")
_RANKS = "a whole number of at least 1, auto, cpu or gpu, or MIN:MAX with MIN <= MAX"


def num_ranks(text: str) -> int | str | tuple[int, int | str]:
    """Return the number of ranks, or a word such as ``auto``; for MIN:MAX, a pair of MIN and MAX."""
    least_text, colon, most_text = text.rpartition(":")
    most = number(int, 1, _RANKS, words=_COUNTS)(most_text)
    if not colon:
        return most
    least = number(int, 1, _RANKS, most=math.inf if most in _COUNTS else most)(least_text)
    return least, most


def port_or_nothing(text: str) -> int:
    return int(number(int, 0, "a port from 0 to 65535", most=65535)(text)) if text else 0


def address_or_nothing(text: str) -> str:
    if text:
        split_address(text)
    return text


_SECONDS = {"timeout", "join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and is_pair and value for key, is_pair, value in pairs):
        raise ValueError("must be KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def rendezvous_settings(text: str) -> dict[str, str]:
    """Return the settings of the rendezvous. Known settings are checked; unknown ones are accepted as they are."""
    pairs = _pairs(text)
    for name in _SECONDS & pairs.keys():
        try:
            is_right = 0 <= float(pairs[name]) < float("inf")
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must be a number that is not negative, got {pairs[name]!r}")
    if pairs.get("is_host", "true").lower() not in (*YES, *_NO):
        raise ValueError(f"is_host must be true or false, got {pairs['is_host']!r}")
    return pairs


def streams(text: str) -> int | dict[int, int]:
    """Return the streams (1 is stdout, 2 stderr, 3 both) of all local ranks, or a dict from local rank to streams."""
    try:
        pairs = [tuple(map(int, part.split(":"))) for part in text.split(",")]
    except ValueError:
        pairs = []
    if len(pairs) == 1 and len(pairs[0]) == 1 and 0 <= pairs[0][0] <= 3:
        return pairs[0][0]
    if not pairs or not all(len(pair) == 2 and pair[0] >= 0 and 0 <= pair[1] <= 3 for pair in pairs):
        raise ValueError("must be 0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:STREAMS,RANK:STREAMS")
    return {pair[0]: pair[1] for pair in pairs}


def local_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        ranks = (-1,)
    if any(rank < 0 for rank in ranks):
        raise ValueError("must be local ranks like 0,2")
    return ranks


def signals(text: str) -> tuple[int, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = {sig.name: sig for sig in signal.Signals}
    for name in names:
        if name not in known or name in _FORBIDDEN_SIGNALS:
            raise ValueError("must be names of signals that can be handled, like SIGTERM,SIGUSR1")
    return tuple(known[name] for name in names)


at_least_0 = number(int, 0, "a whole number of at least 0")
seconds = number(float, 0, "seconds of at least 0")
