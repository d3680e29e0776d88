"""Ranks that are kept: one function after another runs in the same processes, which costs much less than new ranks.

If a function leaves state in a process, the next function finds that state. After a failure, the ranks end.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.failure.ending import RankError
from phalanx.failure.report import first_true_failure
from phalanx.launch.spawn.worker import Function, dumps, load_function
from phalanx.testing.rank import await_release, reached
from phalanx.testing.ranks import spawn_ranks

_NEVER_S = 1e6  # limit for a rank's wait for its next call: in effect none
_AFTER_HANG_S = 1.0  # when ranks hang: time for the other ranks to end, before the hanging ranks are killed
_MAX_ROWS = 400  # maximum number of lines in a failure's report, the same as for new ranks


class KeptRanks:
    """Ranks that wait for functions to run.

    Args:
        world_size: Number of ranks.
        hosts: Number of ranks on each simulated host; empty if all ranks are on one host.
        env: Variables to add to the environment of every rank.
    """

    def __init__(self, world_size: int, hosts: Sequence[int] = (), env: Mapping[str, str] | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._ranks = self._stack.enter_context(spawn_ranks(_serve, world_size, init=False, hosts=hosts, env=env))
        self._num_calls = itertools.count()

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        """Run ``fn(rank, *args)`` on each rank, and return the results in rank order.

        Raises:
            RankError: A rank raised, died or did not return within `timeout_s`. All ranks have then been ended.
        """
        __tracebackhide__ = True
        point = f"call {next(self._num_calls)}"
        self._ranks.release(point, dumps((Function.of(fn), args)))
        try:
            results = self._ranks.wait_until_reached(point, timeout_s=timeout_s)
            self._ranks._forget(point)
            return results
        except RankError as error:
            late = error
        self._tell_to_end()
        outcomes = self._ranks.join(_AFTER_HANG_S if late.exitcode is None else timeout_s, stop_at_failure=True)
        if all(outcome.ok for outcome in outcomes):  # all ranks ended without a failure, but after the limit
            raise late
        raise first_true_failure(outcomes, timeout_s, max_rows=_MAX_ROWS)

    def _tell_to_end(self) -> None:
        self._ranks.release(f"call {next(self._num_calls)}", None)

    def end(self, timeout_s: float) -> None:
        """Make the ranks return and wait until they have ended.

        Raises:
            RankError: A rank failed, or did not end within `timeout_s`.
        """
        self._tell_to_end()
        outcomes = self._ranks.join(timeout_s, stop_at_failure=True)
        if not all(outcome.ok for outcome in outcomes):
            raise first_true_failure(outcomes, timeout_s, max_rows=_MAX_ROWS)

    def close(self) -> None:
        """Kill the ranks that still run."""
        self._stack.close()


def _serve(rank: int, world_size: int) -> None:
    for number in itertools.count():
        task = await_release(f"call {number}", _NEVER_S)
        if task is None:
            return
        function, args = pickle.loads(task)
        value = load_function(function)(rank, *args)
        sys.stdout.flush()
        sys.stderr.flush()
        reached(f"call {number}", value)
        del function, args, value
