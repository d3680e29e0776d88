"""The test's side: starts ranks, signals them, lets them go on from point to point, and reports how they ended."""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx import _env
from phalanx.failure.ending import Ending, RankError
from phalanx.failure.report import first_true_failure, folded, headline
from phalanx.launch.deadlines import CAUSE_S, STACKS_S
from phalanx.launch.spawn.worker import Function
from phalanx.launch.spawn.workers import Workers
from phalanx.testing.rank import group_in_folder, run_in_group
from phalanx.testing.results import ends_session, result_of

HELD = "held by a debugger"
"""Name of the point that a rank reports with True when a debugger opens, and with False when the rank continues."""
_MAX_ROWS = 400  # maximum number of lines in a failure's report


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    expect_failures: bool = False,
    **options: Any,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args, **kwargs)`` on each rank and return the results, in rank order.

    Ranks import modules again: they have the environment, the working folder and ``sys.path`` of the test, but not the
    values that a test or a fixture has set in a module, such as by ``monkeypatch.setattr``. If a rank calls
    ``pytest.skip``, ``xfail``, ``importorskip`` or ``exit``, or raises ``unittest.SkipTest``, this decides about the
    whole test, unless another rank fails.

    Args:
        fn: Function at the top level of an importable module, such as a test module.
        world_size: Number of ranks, at least 1.
        args: Further arguments of `fn`; they must be picklable.
        kwargs: Keyword arguments of `fn`; they must be picklable.
        timeout_s: Seconds after which ranks that have not ended are killed.
        expect_failures: Whether the test expects ranks to raise or die. If so, one `Ending` for each rank is returned,
            failures are not raised, and a failure does not shorten the time of the other ranks.
        options: Keyword arguments of `spawn_ranks`.

    Raises:
        RankError: A rank raised, died or hung. The error names the first true failure. Ranks that were killed count
            first, then ranks that raised or exited, then ranks that raised because a peer was gone, then hung ranks.

    Example:
        >>> phalanx.testing.run_ranks(divmod, 2)  # divmod(rank, world_size)
        [(0, 0), (0, 1)]
    """
    __tracebackhide__ = True  # makes pytest show the test's own line instead of this function
    if unknown := [name for name in options if name not in OPTIONS]:
        given = ", ".join(f"{name!r}: {options[name]!r}" for name in unknown)
        raise TypeError(
            f"run_ranks() has no {' and no '.join(unknown)}; keyword arguments of the function go into kwargs, right: "
            f"run_ranks({getattr(fn, '__name__', 'fn')}, {world_size}, kwargs={{{given}}})"
        )
    with spawn_ranks(fn, world_size, *args, kwargs=kwargs, **options) as ranks:
        outcomes = ranks.join(timeout_s, stop_at_failure=not expect_failures)
    if expect_failures:
        return outcomes
    if not all(outcome.ok for outcome in outcomes):
        raise first_true_failure(outcomes, timeout_s, max_rows=_MAX_ROWS)
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str | None = "phalanx",
    init: bool = True,
    init_method: str | None = None,
    group_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    hosts: Sequence[int] = (),
    warm: bool = False,
) -> Iterator[Ranks]:
    """Start the ranks and yield them. At the end of the block, ranks that are still alive are killed.

    Args:
        fn: Function to run as ``fn(rank, world_size, *args, **kwargs)``, see `run_ranks`.
        world_size: Number of ranks, at least 1.
        args: Further arguments of `fn`; they must be picklable.
        kwargs: Keyword arguments of `fn`; they must be picklable.
        backend: Backend for ``init_process_group``; None starts plain processes.
        init: Whether to call ``init_process_group``. If not, `fn` may call it; the variables for ``env://`` are set in
            any case.
        init_method: "file", "tcp" or "env", each with an address of this run's own, or any URL that torch accepts; None
            means "file".
        group_timeout_s: Timeout of the default group, in seconds; None for the backend's default.
        env: Variables to add to the environment of every rank.
        hosts: Number of ranks on each simulated host, in rank order. Ranks of different hosts do not share memory, so
            traffic between hosts can be tested on one machine. If empty, all ranks are on one host.
        warm: Whether the server from which ranks are forked is itself forked from a process that outlives the tests,
            see `phalanx.spawn`. The first call decides for all later calls.

    Raises:
        ValueError: `world_size` is less than 1, or `hosts` does not add up to `world_size`.

    Example:
        >>> with phalanx.testing.spawn_ranks(divmod, 2) as ranks:
        ...     outcomes = ranks.join()
        >>> [outcome.value for outcome in outcomes]
        [(0, 0), (0, 1)]
    """
    if hosts and sum(hosts) != world_size:
        raise ValueError(f"hosts must add up to the {world_size} ranks, got {list(hosts)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    with group_in_folder(
        world_size, backend=backend, init=init, init_method=init_method, group_timeout_s=group_timeout_s, hosts=hosts
    ) as group:
        environ = {**_env.environment(), **(env or {})}
        call = (group, Function.of(fn), dict(kwargs or {}), *args)
        workers = Workers(run_in_group, call, world_size, environ=environ, num_threads=1, warm=warm)
        with contextlib.closing(workers):
            yield Ranks(workers)


OPTIONS: Mapping[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(spawn_ranks).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Keyword arguments of `spawn_ranks` with their defaults; `@pytest.mark.ranks` accepts most of them, too."""


class Ranks:
    """The running ranks that `spawn_ranks` yields. The test can signal them, and let them go on from point to point."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __len__(self) -> int:
        return len(self._workers.handles)

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [outcome.pid for outcome in self._workers.outcomes]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send `sig` to `rank`; nothing happens if the rank has ended."""
        self._workers.handles[rank].send_signal(sig)

    def stop(self, rank: int) -> None:
        """Suspend `rank` with SIGSTOP."""
        self.kill(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Continue a suspended `rank` with SIGCONT."""
        self.kill(rank, signal.SIGCONT)

    def wait_until_reached(self, point: str, ranks: Sequence[int] | None = None, timeout_s: float = 30.0) -> list[Any]:
        """Wait until ranks have called ``reached(point)``, and return their payloads.

        Args:
            point: Name of the point.
            ranks: Ranks to wait for; by default, all ranks.
            timeout_s: Maximum number of seconds to wait.

        Raises:
            RankError: A rank ended before it reached `point`, or did not reach it within `timeout_s`.
        """
        __tracebackhide__ = True
        wanted = [self._workers.handles[rank] for rank in (range(len(self)) if ranks is None else ranks)]
        deadline = time.monotonic() + timeout_s
        while missing := [handle for handle in wanted if point not in handle.points]:
            ended = next((handle for handle in missing if handle.ended), None)
            if ended is not None and (result := result_of(self._workers.outcomes)):
                raise result
            if ended is not None or time.monotonic() >= deadline:
                late = (ended or missing[0]).outcome
                lines = folded(late, _MAX_ROWS) if late.error else late.last_words.lines
                words = [f"rank {late.rank} (pid {late.pid}) did not reach {point!r} within {timeout_s:g} s", *lines]
                if ended:
                    words[0] = f"{headline(late)}; the test waited for it to reach {point!r}"
                raise RankError("\n".join(words), late, self._workers.outcomes)
            self._workers.pump(deadline)
        return [handle.points[point] for handle in wanted]

    def release(self, point: str, payload: Any = None, ranks: Sequence[int] | None = None) -> None:
        """Make ``await_release(point)`` return `payload` on `ranks`, by default on all ranks."""
        for rank in range(len(self)) if ranks is None else ranks:
            self._workers.handles[rank].send(("release", point, payload))

    def _forget(self, point: str) -> None:
        """Drop the payloads that ranks have sent with ``reached(point, payload)``."""
        for handle in self._workers.handles:
            handle.points.pop(point, None)

    def join(self, timeout_s: float = 60.0, *, stop_at_failure: bool = False) -> list[Ending]:
        """Wait for the ranks, kill those that hang, and return all outcomes in rank order.

        Args:
            timeout_s: Seconds after which ranks that have not ended are killed.
            stop_at_failure: Whether the other ranks get only a few more seconds once a rank has failed. Once a rank has
                skipped the test, the others get only a few more seconds in any case, and `join` then skips the test,
                too.
        """
        __tracebackhide__ = True
        workers = self._workers
        self.wait(timeout_s, stop_at_failure=stop_at_failure)
        if result := result_of(workers.outcomes):
            raise result
        workers.check_guard("phalanx.testing.run_ranks(fn, 2)")
        return workers.outcomes

    def wait(self, timeout_s: float, *, stop_at_failure: bool, before_kill: Callable[[], None] | None = None) -> None:
        """Wait for the ranks as `join` does, but do not raise an exception.

        Time during which a rank is in a debugger does not count; a rank reports this by ``reached(HELD, True)``.

        Args:
            timeout_s: Seconds after which ranks that have not ended are killed.
            stop_at_failure: Whether the other ranks get only a few more seconds once a rank has failed.
            before_kill: Function called before hung ranks are killed.

        Example:
            >>> with phalanx.testing.spawn_ranks(divmod, 2) as ranks:
            ...     ranks.wait(60.0, stop_at_failure=True)
            ...     outcomes = ranks.join()
            >>> [outcome.ok for outcome in outcomes]
            [True, True]
        """
        workers = self._workers
        limit = deadline = time.monotonic() + timeout_s
        while not workers.all_ended:
            if ends_session(result_of(workers.outcomes)):
                self._kill_hung()
                break
            if any(handle.points.get(HELD) and not handle.ended for handle in workers.handles):
                start = time.monotonic()
                workers.pump(None)
                limit, deadline = (when + time.monotonic() - start for when in (limit, deadline))
                continue
            if time.monotonic() >= deadline:
                if before_kill is not None:
                    before_kill()
                self._kill_hung()
                break
            workers.pump(deadline)
            if deadline == limit and ((stop_at_failure and workers.failures) or result_of(workers.outcomes)):
                deadline = min(limit, time.monotonic() + CAUSE_S)

    def _kill_hung(self) -> None:
        """Kill the ranks that have not ended, after a signal that makes each of them print its stacks."""
        for handle in self._workers.handles:
            if not handle.ended:
                handle.outcome.hung = True
                handle.outcome.when_s = time.monotonic()
        self._workers.end(signal.SIGABRT, STACKS_S)  # faulthandler then prints the stacks, even inside C code
        self._workers.close()
