"""Decisions of a rank about the whole test: skip it, expect its failure, end the session. Does not import pytest."""

from __future__ import annotations

import copyreg
import importlib
import sys
import unittest
from collections.abc import Sequence
from typing import Any

from phalanx.failure.ending import Ending

# functions of pytest that decide about the whole test; fail() is left out, because it only fails its rank
_RESULTS = ("skip", "xfail", "exit")


def make_portable(error: BaseException) -> None:
    """Make an exception of pytest's functions picklable; pickle could not find its class by name otherwise."""
    for name in (*_RESULTS, "fail"):
        if type(error) is _raised_by(name):
            copyreg.pickle(type(error), _reduce)


def result_of(outcomes: Sequence[Ending]) -> BaseException | None:
    """Return the exception with which a rank decided about the whole test; None if no rank did so, or if a rank failed.

    Ranks that failed only because the deciding rank left, or that still wait for it, do not count as failed. The
    `Ending` of the deciding rank is marked as ``skipped``, so that it does not count as the cause of another rank's
    failure.
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
    """Return the class of the exception that a function of pytest raises; None if pytest has not been imported."""
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
