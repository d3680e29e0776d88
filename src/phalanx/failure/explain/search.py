"""Finds the entry of a message that a user has pasted, in part or with other text around it."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import signal
from collections.abc import Iterable

from phalanx._errors import addressed
from phalanx.failure.explain.entries import entries

_PLACE = re.compile(r"<[^<>\n]+>")
_WORD = re.compile(r"[^\W\d_](?:[^\W\d]|['./-](?=\w))+")
_LEAST_SHARE = 0.55
"""Least share of the message's weight, or of the text's weight, that their common features have in a sure match."""
_NEAR_SHARE = 0.2
_GENERAL = frozenset({"rank-exited", "rank-failed", "rank-error", "error"})
"""Entries that say only that something has gone wrong; an entry that says what went wrong takes precedence."""


_CODE = re.compile(r"(?:exit(?:ed)?|code|status|exitcode)[^\w-]+(?:with )?(-?\d+)\b|^\W*(-?\d+)\W*$")
_SIGNAL = re.compile(r"signal\W+(\d+)\b|\b(sig[a-z]{3,6})\b")
_ABOUT_ENDS = frozenset({
    "a", "by", "code", "command", "container", "exit", "exitcode", "exited", "failed", "finished", "got", "has", "job",
    "kill", "killed", "pid", "process", "program", "python", "received", "returned", "script", "signal", "status",
    "task", "terminated", "the", "was", "with",
})  # fmt: skip
"""Words that may surround the number or the name in a text that is only an exit code or a signal."""


def find(text: str) -> tuple[str, list[str]]:
    """Return the name of the entry that surely explains a message, or "", and the nearest entries, best first."""
    known = entries()
    if (name := addressed(text)) in known:
        return name, []
    if name := of_exit(text):
        return name, []
    asked = _features(text)
    is_enough = len(asked) > 1 or any(len(str(word)) > 5 for word in asked)
    patterns, weights = _patterns()
    unknown = max(weights.values())
    total = sum(weights.get(feature, unknown) for feature in asked)
    shares: dict[str, tuple[float, float]] = {}
    for name, pattern in patterns:
        common = sum(weights[feature] for feature in pattern & asked)
        of_message = common / sum(map(weights.__getitem__, pattern))
        share = max(of_message, common / total if is_enough else 0.0)
        score = (share + 0.1 * of_message) * math.log1p(common) * (0.5 if name in _GENERAL else 1.0)
        shares[name] = max(shares.get(name, (0.0, 0.0)), (score, share))
    ordered = sorted(shares, key=lambda name: shares[name], reverse=True)
    near = [name for name in ordered[:4] if shares[name][1] >= _NEAR_SHARE]
    if near and shares[near[0]][1] >= _LEAST_SHARE:
        return near[0], [name for name in near[1:] if shares[name][1] >= _LEAST_SHARE]
    return "", near


def of_exit(text: str) -> str:
    """Return the entry for a text that is only an exit code or a signal; empty if the text says anything else."""
    text = text.strip().lower()
    words = {word for word in re.findall(r"[a-z]+", text) if not _SIGNAL.fullmatch(word)}
    code = 0
    if not words <= _ABOUT_ENDS:
        return ""
    if found := _CODE.search(text):
        code = int(found[1] or found[2])
    elif found := _SIGNAL.search(text):
        known = signal.Signals.__members__.get((found[2] or "").upper(), 0)
        code = -int(found[1] or known)
    name = f"exit-{128 - code if code < 0 else code}"  # Python gives a signal as a negative code
    return name if name in entries() else ""


@functools.cache
def _patterns() -> tuple[list[tuple[str, frozenset[object]]], dict[object, float]]:
    """Return the features of every message with the name of its entry, and the weight of each feature."""
    found = [(name, _of_message(message)) for name, entry in entries().items() for message in entry.messages]
    return found, _weights(pattern for _, pattern in found)


def _of_message(message: str) -> frozenset[object]:
    """Return the features of a message: its words, and pairs of neighboring words with no varying part in between."""
    return frozenset().union(*(_features(part) for part in _PLACE.split(message)))


def _features(text: str) -> frozenset[object]:
    words = [word.lower() for word in _WORD.findall(text)]
    return frozenset([*words, *itertools.pairwise(words)])


def _weights(patterns: Iterable[frozenset[object]]) -> dict[object, float]:
    """Return the weight of each feature: the fewer messages have it, the greater its weight."""
    counts = collections.Counter(feature for pattern in patterns for feature in pattern)
    return {feature: 1.0 / math.sqrt(count) for feature, count in counts.items()}
