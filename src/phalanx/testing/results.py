"""Decisions of a rank about the whole test: skip it, expect its failure, end the session. Imports no pytest."""

from __future__ import annotations

import copyreg
import importlib
import sys
import unittest
from collections.abc import Sequence
from typing import Any

from phalanx.failure.ending import Ending

_RESULTS = ("skip", "xfail", "exit")  # functions of pytest that decide; fail() is left out, as it only fails its rank


def make_portable(error: BaseException) -> None:
    """Make an exception that pytest's functions raise picklable; otherwise its class can't be found by name."""
    for name in (*_RESULTS, "fail"):
        if type(error) is _raised_by(name):
            copyreg.pickle(type(error), _reduce)


def result_of(outcomes: Sequence[Ending]) -> BaseException | None:
    """Return the exception by which a rank decided about the whole test; None if no rank did, or a rank has failed.

    Ranks that failed only because the deciding rank left, or that still wait for it, do not count as failed. The
    `Ending` of the deciding rank is marked as ``skipped``, so that it is not taken for the cause of another's failure.
    """
    for outcome in outcomes:
        outcome.skipped = _is_result(outcome.error)
    results = [outcome for outcome in outcomes if outcome.skipped]
    if not results or any(map(_is_failure, outcomes)):
        return None
    return min(results, key=lambda outcome: outcome.when_s).error


def ends_session(error: BaseException | None) -> bool:
    """Whether a rank has called ``pytest.exit``."""
    return error is not None and type(error) is _raised_by("exit")


def _is_failure(outcome: Ending) -> bool:
    lives = outcome.exitcode is None
    return outcome.failed and not (lives or outcome.hung or outcome.is_victim)


def _is_result(error: BaseException | None) -> bool:
    return isinstance(error, unittest.SkipTest) or any(type(error) is _raised_by(name) for name in _RESULTS)


def _raised_by(name: str) -> type[BaseException] | None:
    """Return the class that a function of pytest raises; None if nobody has imported pytest."""
    function = getattr(sys.modules.get("pytest"), name, None)
    return getattr(function, "Exception", None)


def _reduce(error: BaseException) -> tuple[Any, ...]:
    name = next(name for name in (*_RESULTS, "fail") if type(error) is _raised_by(name))
    return _restored, (name, error.args, error.__dict__)


def _restored(name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    kind = getattr(importlib.import_module("pytest"), name).Exception
    error: BaseException = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error
