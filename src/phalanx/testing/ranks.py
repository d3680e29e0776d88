"""The side of the test: start the ranks, hear from them, signal them, end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver
from typing import Any

from phalanx.testing.outcome import Outcome, RankError, first_true_failure
from phalanx.testing.rank import Function, Inherited, Plan, rank_main

# What every rank needs, imported once in the server. None of it may start a thread there.
_PRELOAD = ("torch", "torch.distributed", "phalanx.testing.rank", "phalanx.backend")
_VICTIM_GRACE_S = 3.0  # after the first failure: time for the others to say what they saw
_DUMP_GRACE_S = 0.5  # after SIGABRT: time to write the stacks of a hung rank


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect_failures: bool = False,
    **options: Any,
) -> list[Any]:
    """Return what ``fn(rank, world_size, *args)`` returned on each rank, in rank order.

    Args:
        fn: A function at the top level of an importable module, such as a test module.
        world_size: Number of processes, at least 1.
        timeout_s: Every rank that has not ended by then is killed.
        expect_failures: Return one `Outcome` per rank and raise nothing, for ranks that
            are meant to raise or die. All ranks then have until `timeout_s`.
        options: `backend`, `init`, `init_method`, `group_timeout_s` and `env`,
            as in `spawn_ranks`.

    Raises:
        RankError: A rank raised, died or hung. It names the first true failure: a rank
            that died comes before one that raised, and one that raised because its peer
            was gone comes after both.
    """
    with spawn_ranks(fn, world_size, *args, **options) as ranks:
        outcomes = ranks.join(timeout_s, stop_at_failure=not expect_failures)
    if expect_failures:
        return outcomes
    if not all(outcome.ok for outcome in outcomes):
        raise first_true_failure(outcomes, timeout_s)
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "phalanx",
    init: bool = True,
    init_method: str | None = None,
    group_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Start the ranks and yield them; every one still alive at the end is killed.

    Args:
        fn: Called as ``fn(rank, world_size, *args)``, see `run_ranks`.
        backend: Given to ``init_process_group``; None starts plain processes.
        init: False leaves ``init_process_group`` to `fn`; ``env://`` is prepared either way.
        init_method: ``"file"`` (the default), ``"tcp"`` or ``"env"``, each on an address of
            this run's own, or any URL that torch takes.
        group_timeout_s: The timeout of the default group; None keeps the backend's.
        env: Variables added to this process's environment on every rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder:
        plan = Plan(
            call=pickle.dumps((Function.of(fn), args)),
            world_size=world_size,
            backend=backend if init else None,
            init_method=init_method or "file",
            group_timeout_s=group_timeout_s,
            folder=folder,
            master_port=_free_port(),
            environ={**os.environ, **(env or {})},
            cpus=os.sched_getaffinity(0),
        )
        ranks = Ranks(plan)
        try:
            ranks._start()
            yield ranks
        finally:
            ranks.close()


def start_server() -> None:
    """Start the process that ranks are forked from, unless it runs; it ends with this one."""
    loaded = [name for name in ("numpy", "pytest") if name in sys.modules]
    forkserver.set_forkserver_preload([*_PRELOAD, *loaded])
    forkserver.ensure_running()


def kill_rank(ranks: Ranks, rank: int, sig: int = signal.SIGKILL) -> None:
    """Send `sig` to one of the ranks that `spawn_ranks` yielded; the same as ``ranks.kill``."""
    ranks.kill(rank, sig)


class Ranks:
    """The living ranks of `spawn_ranks`, and the only way to signal and to step them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._handles: list[_Handle] = []

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def pids(self) -> list[int]:
        return [handle.outcome.pid for handle in self._handles]

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send `sig` to `rank`; nothing happens if it has ended."""
        self._handles[rank].send_signal(sig)

    def stop(self, rank: int) -> None:
        """Freeze `rank` with SIGSTOP."""
        self.kill(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """Let a stopped `rank` run again."""
        self.kill(rank, signal.SIGCONT)

    def wait_until_reached(self, point: str, ranks: Sequence[int] | None = None, timeout_s: float = 30.0) -> list[Any]:
        """Return the payloads with which `ranks` (all by default) called ``reached(point)``.

        Raises:
            RankError: One of them ended first, or had not come there after `timeout_s`.
        """
        wanted = [self._handles[rank] for rank in (range(len(self)) if ranks is None else ranks)]
        deadline = time.monotonic() + timeout_s
        while missing := [handle for handle in wanted if point not in handle.points]:
            ended = next((handle for handle in missing if handle.ended), None)
            if ended is not None or time.monotonic() >= deadline:
                late = (ended or missing[0]).outcome
                why = str(late) if ended else f"rank {late.rank} (pid {late.pid}) is elsewhere"
                raise RankError(
                    f"{why}; the test waited {timeout_s:g} s at most for it to reach {point!r}\n{late.traceback}",
                    late,
                    [handle.outcome for handle in self._handles],
                )
            self._pump(deadline)
        return [handle.points[point] for handle in wanted]

    def release(self, point: str, payload: Any = None, ranks: Sequence[int] | None = None) -> None:
        """Let `ranks` (all by default) return `payload` from ``await_release(point)``."""
        for rank in range(len(self)) if ranks is None else ranks:
            self._handles[rank].send(("release", point, payload))

    def join(self, timeout_s: float = 60.0, *, stop_at_failure: bool = False) -> list[Outcome]:
        """Return every rank's outcome in rank order, having killed those that hang.

        Args:
            timeout_s: The limit for all ranks together.
            stop_at_failure: Once a rank has failed, leave the others only a few seconds.
        """
        limit = deadline = time.monotonic() + timeout_s
        while not all(handle.ended for handle in self._handles):
            if time.monotonic() >= deadline:
                self._kill_hung()
                break
            self._pump(deadline)
            failed = any(h.ended and not h.outcome.ok for h in self._handles)
            if stop_at_failure and failed and deadline == limit:
                deadline = min(limit, time.monotonic() + _VICTIM_GRACE_S)
        return [handle.outcome for handle in self._handles]

    def close(self) -> None:
        """Kill the ranks that still live and give back every descriptor."""
        for handle in self._handles:
            handle.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while not all(handle.ended for handle in self._handles) and time.monotonic() < deadline:
            self._pump(deadline)
        for handle in self._handles:
            handle.close()

    def _start(self) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        for rank in range(self._plan.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, self._plan, theirs, Inherited(1), Inherited(2)))
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._handles.append(_Handle(rank, process, ours, self._plan.folder))

    def _pump(self, deadline: float) -> None:
        """Take in what the ranks have sent; return after the first news or at `deadline`."""
        sources: dict[Any, _Handle] = {}
        for handle in self._handles:
            sources.update((source, handle) for source in handle.sources())
        ready = connection.wait(list(sources), max(0.0, deadline - time.monotonic()))
        for handle in {id(sources[source]): sources[source] for source in ready}.values():
            handle.take_news()

    def _kill_hung(self) -> None:
        """End the ranks that passed the limit, asking each for its stacks first."""
        hung = [handle for handle in self._handles if not handle.ended]
        for handle in hung:
            handle.outcome.hung = True
            handle.outcome.when_s = time.monotonic()
            handle.send_signal(signal.SIGABRT)  # answered by faulthandler, even inside C
        deadline = time.monotonic() + _DUMP_GRACE_S
        while not all(handle.ended for handle in hung) and time.monotonic() < deadline:
            self._pump(deadline)
        self.close()


class _Handle:
    """One rank as the parent sees it; owns its pipe, its pidfd and its process object."""

    def __init__(self, rank: int, process: Any, pipe: connection.Connection, folder: str) -> None:
        self.outcome = Outcome(rank, process.pid)
        self.points: dict[str, Any] = {}
        self.ended = False
        self._process = process
        self._pipe = pipe
        self._stacks = os.path.join(folder, f"stacks_{rank}")
        try:
            self._pidfd: int | None = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._pidfd = None

    def sources(self) -> list[Any]:
        """What to wait on: nothing, once the rank has ended."""
        if self.ended:
            return []
        return [self._process.sentinel, *([] if self._pipe.closed else [self._pipe])]

    def send_signal(self, sig: int) -> None:
        # By pidfd, because the number of a dead rank may already be another process's.
        if self._pidfd is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the rank is gone: its outcome tells
            self._pipe.send_bytes(pickle.dumps(message))

    def take_news(self) -> None:
        ended = not self._process.is_alive()  # asked first: what it sent lies in the pipe by then
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._take(pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, ConnectionError):
            self._pipe.close()
        if ended:
            self.ended = True
            self.outcome.exitcode = self._process.exitcode
            self.outcome.when_s = self.outcome.when_s or time.monotonic()
            if not self.outcome.traceback:
                with contextlib.suppress(OSError), open(self._stacks, errors="replace") as stacks:
                    self.outcome.traceback = stacks.read()

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == "reached":
            self.points[message[1]] = message[2]
        elif message[0] == "returned":
            self.outcome.value = message[1]
        else:
            _, self.outcome.error, self.outcome.traceback, self.outcome.when_s = message

    def close(self) -> None:
        self._pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self.ended:
            with contextlib.suppress(ValueError):  # closed before
                self._process.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
