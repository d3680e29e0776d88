"""`phalanx.spawn`: runs a function on several ranks of this machine, for a script, a notebook or a test.

Each rank imports the script, as with ``torch.multiprocessing.spawn``, so top-level code such as a seed takes effect in
each rank. A function that a notebook's cell or ``python -c`` defines is sent by value (cloudpickle).
"""

from __future__ import annotations

import atexit
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from phalanx import _env
from phalanx.failure.report import first_true_failure
from phalanx.host.cpus import divide, read_machine
from phalanx.launch.command.neighbors import SPAWN, Claim, Presence, crowding
from phalanx.launch.deadlines import CAUSE_S, GRACE_S, KILL_S
from phalanx.launch.environment import thread_environment
from phalanx.launch.spawn.workers import Workers

_RIGHT = "right: phalanx.spawn(fn, args=(first, second), nprocs=2)"
_said: set[str] = set()  # printed remarks about other launchers
_INSTEAD = "\nor call fn(phalanx.init().rank) alone: a launcher has started this script on each rank"


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    warm: bool = False,
) -> Any:
    """Run ``fn(rank, *args)`` in `nprocs` processes, like ``torch.multiprocessing.spawn``, and return the results.

    Each rank has torchrun's environment, so ``init_process_group()`` needs no arguments. Cores are divided among the
    ranks through OMP_NUM_THREADS, unless the user has set this variable. No rank outlives this process, or the failure
    of another rank. Processes that a rank starts end with the rank; if they leave the rank's process group, they end
    with this process.

    Args:
        fn: Function of a module, a script or a notebook, or a lambda. A script must guard its call of `spawn` by a test
            for ``__name__ == "__main__"``.
        args: Arguments after the rank; they are pickled.
        nprocs: Number of ranks, at least 1.
        join: Whether to wait for the ranks and return their results in rank order; otherwise a `SpawnContext` is
            returned at once.
        daemon: Whether the ranks are daemonic, as in ``multiprocessing.Process``: they may have no children.
        start_method: Accepted for compatibility with torch's signature, and otherwise ignored; as in torch, any value
            but "spawn" causes a warning. Ranks are always forked from a server process that has imported torch.
        warm: Whether the server itself is forked from a process that has already imported torch and outlives this
            script, so that the first call of a script is as fast as later ones. PHALANX_WARM=1 has the same effect.

    Raises:
        RankError: A rank raised or died. The error names the first rank that failed on its own, not because of another
            rank, and has the remote traceback; its ``error`` is the exception itself.
        TypeError: `fn` is not a function, or `fn` or `args` can't be sent to another process.
        ValueError: `nprocs` is not a whole number of at least 1.

    Example:
        >>> def total(rank, scale):
        ...     with phalanx.init():
        ...         tensor = torch.tensor(rank * scale)
        ...         dist.all_reduce(tensor)
        ...         return tensor.item()
        >>> phalanx.spawn(total, args=(10,), nprocs=2)
        [10, 10]
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}; {_RIGHT}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a whole number of at least 1, got {nprocs!r}; {_RIGHT}")
    if start_method != "spawn":
        message = f"phalanx.spawn starts ranks in one way only; leave out start_method={start_method!r}, it is ignored"
        warnings.warn(message, FutureWarning, stacklevel=2)
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise TypeError(f"args must be a tuple, got {args!r}; right: phalanx.spawn(fn, args=({args!r},))")
    context = SpawnContext(fn, args, nprocs, daemon=daemon, warm=warm)
    if not join:
        return context
    context.join()
    return context.results


class SpawnContext:
    """Ranks that ``spawn(..., join=False)`` has started.

    Attributes:
        results: Results of the ranks, in rank order, once `join` has returned True.

    Example:
        >>> context = phalanx.spawn(lambda rank: rank * 10, nprocs=2, join=False)
        >>> len(context.pids())
        2
        >>> context.join(timeout=30)
        True
        >>> context.results
        [0, 10]
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], nprocs: int, *, daemon: bool, warm: bool) -> None:
        inherited = _env.environment()
        given = inherited.get("OMP_NUM_THREADS", "")
        shares = divide(nprocs, read_machine(), pin=False, omp_num_threads=given).shares
        share = shares[0]
        num_threads = int(given) if given.isdigit() and int(given) else share.num_threads
        self._workers = Workers(
            fn,
            args,
            nprocs,
            environ=inherited,
            defaults=thread_environment(inherited, share),
            num_threads=num_threads,
            daemon=daemon,
            warm=warm,
        )
        claim = Claim.of(SPAWN, shares)
        self._presence = Presence(claim)
        _say_once(crowding(claim, self._presence.others))
        self._is_daemon = daemon
        self._joined = False
        self.results: list[Any] = []
        atexit.register(self._finish)  # this reference also keeps the object alive until then

    @property
    def processes(self) -> list[Any]:
        """One ``multiprocessing.Process`` for each rank."""
        return [handle.process for handle in self._workers.handles]

    def pids(self) -> list[int]:
        """Return the process id of each rank."""
        return [outcome.pid for outcome in self._workers.outcomes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the ranks, and return whether all have ended.

        When a rank fails, the other ranks are ended. Ctrl-C is passed on to the ranks.

        Args:
            timeout: Seconds to wait at most; None: no limit.

        Raises:
            RankError: A rank raised or died.
            ValueError: `timeout` is negative or not a number.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be at least 0 s, got {timeout:g} s")
        if self._joined:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            finished = self._wait(deadline)
        except BaseException as error:
            try:
                self._workers.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM, GRACE_S)
            finally:
                self._close()
            raise
        if not finished:
            return False
        self._close()
        if self._workers.failures:
            is_rank = _env.LAUNCH_VARIABLE in _env.environment()
            self._workers.check_guard("phalanx.spawn(fn, nprocs=2)", _INSTEAD if is_rank else "")
            raise first_true_failure(self._workers.outcomes)
        self.results = [outcome.value for outcome in self._workers.outcomes]
        return True

    def _wait(self, deadline: float | None) -> bool:
        workers = self._workers
        while not workers.all_ended:
            failures = workers.failures
            give_up_s = min((outcome.when_s for outcome in failures), default=0.0) + CAUSE_S
            cause_is_known = any(not outcome.is_victim for outcome in failures)
            if failures and (cause_is_known or time.monotonic() >= give_up_s):
                for handle in workers.handles:
                    handle.outcome.ended_by_us = not handle.ended
                workers.end(signal.SIGTERM, GRACE_S)
                workers.end(signal.SIGKILL, KILL_S)
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            wake_s = give_up_s if failures else deadline
            workers.pump(wake_s if deadline is None or wake_s is None else min(wake_s, deadline))
        return True

    def _finish(self) -> None:
        """Wait for ranks that nobody has joined, as multiprocessing does when the interpreter ends."""
        if self._is_daemon:
            self._workers.close()
        while not self._workers.all_ended:
            self._workers.pump(None)
        self._close()

    def _close(self) -> None:
        self._joined = True
        atexit.unregister(self._finish)
        self._presence.close()
        self._workers.close()


def _say_once(pieces: list[str]) -> None:
    """Print a remark that cores are short on this machine, unless it was printed before."""
    if pieces and pieces[0] not in _said:
        _said.add(pieces[0])
        print(f"phalanx.spawn: {'; '.join(pieces)}", file=sys.stderr)
