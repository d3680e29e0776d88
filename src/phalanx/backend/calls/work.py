"""Handles of running operations, and the threads that fulfill their futures.

Once its operation is over or this rank has left the group, a handle drops the core and keeps only the outcome, so a
forgotten handle keeps no group alive. The threads that fulfill futures end with the last group.
``csrc/process/parking.h`` explains how such threads survive the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch.distributed import Work

from phalanx import _core
from phalanx._errors import ArgumentError, hand_over
from phalanx.backend.deadlines import END_S, FUTURES_POLL_S, SETTLE_S
from phalanx.wire.waiting import wait_until


class Completer:
    """Fulfills the futures of finished operations, in threads that start when somebody asks for a future.

    The native threads never take the GIL; they push the number of a finished operation into a queue, which the
    completer's threads read. A callback of a future may wait for another future (PowerSGD's does), so there is always
    one more thread than running callbacks. Callers never take the completer's lock. If a caller held the lock, a signal
    handler that interrupts the caller could wait for a future that the threads could not fulfill without the lock.
    """

    def __init__(self) -> None:
        self._queue = _core.Completions()
        self._works: dict[int, PhalanxWork] = {}
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._lock = threading.Lock()

    def expect(self, work: PhalanxWork, handle: _core.Work) -> None:
        """Fulfill `work` once `handle` is done."""
        number = next(self._numbers)
        self._works[number] = work
        if not self._threads:  # two callers may both start a thread; a surplus thread ends after its first work
            self._start_thread()
        handle.notify(self._queue, number)

    @property
    def may_end(self) -> bool:
        """Whether `close` may end the threads: some exist, and no operation that they wait for is still running."""
        return bool(self._threads) and all(work.over for work in list(self._works.values()))

    def fulfil_all(self) -> None:
        """Fulfill works whose end was not noticed, because the threads had already ended."""
        while self._works:
            self._works.popitem()[1].fulfil()

    def close(self) -> None:
        """End the threads, because no group is left."""
        self._queue.close()
        for thread in list(self._threads):
            if thread is not threading.current_thread():  # a callback in this thread may have destroyed the last group
                thread.join(timeout=END_S)

    def settle(self) -> None:
        """Wait briefly until the callbacks of finished operations have run; the threads continue."""
        wait_until(lambda: self._is_settled or None, time.monotonic() + SETTLE_S, most_s=FUTURES_POLL_S)

    @property
    def _is_settled(self) -> bool:
        return self._num_idle == len(self._threads) and not any(work.over for work in list(self._works.values()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="phalanx-futures", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _run(self) -> None:
        with self._lock:
            self._num_idle += 1
        while (number := self._queue.pop()) >= 0:
            with self._lock:
                self._num_idle -= 1
                if self._num_idle == 0:
                    with contextlib.suppress(RuntimeError):  # since 3.12, no thread can start while Python ends
                        self._start_thread()
            work = self._works.pop(number, None)
            if work is not None:  # None: `fulfil_all` has taken it
                work.fulfil()
            del work  # this thread sleeps next, and must not keep the work alive
            with self._lock:
                if self._num_idle > 1:  # this thread is surplus: it was needed only while callbacks waited
                    self._threads.discard(threading.current_thread())
                    return
                self._num_idle += 1


_completer = Completer()
_num_forks = 0  # generations of forks between the first process and this one


def end_threads() -> None:
    """End the threads that fulfill futures, once no group is left; the next future starts new ones."""
    global _completer
    if _completer.may_end:
        former, _completer = _completer, Completer()
        former.close()
        former.fulfil_all()


def settle_futures() -> None:
    """Let the callbacks of finished operations run, because the interpreter is about to end."""
    _completer.settle()


_left_in_parent: list[Completer] = []


def _begin_anew() -> None:
    """Start afresh in a forked child, which does not inherit the threads.

    The old completer is kept, because destroying a queue on which a thread of the parent waits would hang.
    """
    global _completer, _num_forks
    _left_in_parent.append(_completer)
    _completer = Completer()
    _num_forks += 1


os.register_at_fork(after_in_child=_begin_anew)


class Over:
    """Stands in for the handle of an operation that is over, so that its work keeps nothing of the group alive."""

    __slots__ = ("_error", "source")
    done = True

    def __init__(self, error: BaseException | None, source: int) -> None:
        self._error, self.source = error, source

    def error(self) -> BaseException | None:
        return self._error

    def require_reachable(self) -> None:
        pass


class PhalanxWork(Work):
    """An operation that was started: ``wait()``, ``is_completed()``, ``get_future()``, ``exception()``.

    Args:
        handle: Handle of the core; None if the operation is over.
        wait: Function of a handle and a timeout in seconds (0: no timeout). It blocks until the handle is done and
            raises the operation's error; after the timeout, it returns False.
        result: Tensors of the operation, the value of the future.
        settle: Function that runs after success, before the result is visible; it copies results out of stand-ins.
        keep: Tensors that the core reads or writes, kept until the operation is over.
        release: Function called with this work once the operation is over.
    """

    # Set when a future is first asked for: a list that holds the inner future until it is fulfilled (empty afterwards),
    # and the future that the caller gets.
    _futures: tuple[list[torch.futures.Future], torch.futures.Future]
    _settle: Callable[[], None] | None = None
    _lock: threading.RLock | None = None
    _num_forks: int

    def __init__(
        self,
        handle: Any,
        wait: Callable[[_core.Work, float], bool] | None,
        result: list[torch.Tensor],
        settle: Callable[[], None] | None = None,
        keep: object = None,
        release: Callable[[PhalanxWork], None] | None = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._wait = wait
        self._result = result
        self._keep = keep
        self._release = release
        if settle is not None:
            self.settle_with(settle)

    def settle_with(self, settle: Callable[[], None]) -> None:
        """Add a function that runs after success, before the result is visible; earlier functions run first."""
        before, self._settle = self._settle, settle
        if before is not None:

            def both() -> None:
                before()
                settle()

            self._settle = both
        if self._lock is None:
            # One lock per work: a signal handler may interrupt the thread that holds a lock, and wait for another work.
            # Reentrant: the handler may also finish this work.
            self._lock = threading.RLock()
            self._num_forks = _num_forks

    def _finish(self) -> None:
        if self._settle is not None and self._lock is not None:
            is_forked = self._num_forks != _num_forks  # the thread that holds the lock may exist only in the parent
            with contextlib.nullcontext() if is_forked else self._lock:
                if self._settle is not None:
                    self._settle()  # may run twice: a signal handler that interrupts this call may finish the work, too
                    self._settle = None
        self._keep = None
        release = self._release
        if release is not None:
            self._part(None)
            release(self)

    def _part(self, error: BaseException | None) -> None:
        """Drop the references to the core, because the operation is over; keep its `error`."""
        self._wait = self._release = None  # before the handle is replaced, because `wait` reads the handle first
        self._handle = Over(error, getattr(self._handle, "source", -1))

    def let_go(self) -> None:
        """Drop the references to the core if the operation is over. A later `wait` copies the results."""
        handle, wait = self._handle, self._wait
        if wait is None:
            return
        error: BaseException | None = None
        try:
            if not wait(handle, FUTURES_POLL_S):
                return
        except Exception as failure:
            error = failure.with_traceback(None)
        is_unheard = not handle.done  # the group ended without a notice that would fulfill the future
        self._part(error)
        if is_unheard and "_futures" in self.__dict__:
            self.fulfil()

    @property
    def over(self) -> bool:
        """Whether the core is done with the operation, successfully or not."""
        return self._handle is None or self._handle.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over; raise its error. A `timeout` of 0 means none, as in torch."""
        handle, wait = self._handle, self._wait  # the handle first, because `_part` replaces it last
        if handle is None:
            return True
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds < 0:
            raise ArgumentError(f"timeout must be at least 0 s (0: forever), got {seconds:g} s")
        if wait is None:
            if (error := self.exception()) is not None:
                raise error
        else:
            try:
                is_over = wait(handle, seconds)
            finally:
                del wait  # a traceback may keep this frame, and must not keep the core with it
            if not is_over:
                raise TimeoutError(f"the operation is still running after {seconds} s; wait for it again")
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._handle is None:
            return True
        if not self._handle.done:
            return False
        if self._handle.error() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._handle.error() if self._handle is not None and self._handle.done else None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the rank in the group from which this receive got its message."""
        return self._handle.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the result, a list of tensors; a wait for it raises a failure as RuntimeError."""
        future = self._future()
        if self._result and self._result[0].dtype is torch.float16 and _is_native(sys._getframe().f_back):
            return _typed()(future, self._result)
        return future

    def _future(self) -> torch.futures.Future[Any]:
        if not self.over:
            self._handle.require_reachable()
        if "_futures" in self.__dict__:
            return self._futures[1]
        over: torch.futures.Future = torch.futures.Future()
        # A callback raises the error: C++ code that waits (torch's DistributedDataParallel) sees that as a failure,
        # whereas only Python sees set_exception().
        future = over.then(lambda _: self._outcome())
        untold = [over]
        made = self.__dict__.setdefault("_futures", (untold, future))  # atomic, so no lock is needed
        if made[0] is not untold:
            return made[1]
        if self.over:
            self.fulfil()  # now, because the caller may ask whether the future is done
        else:
            _completer.expect(self, self._handle)
        return future

    def fulfil(self) -> None:
        """Give the future its value, once the operation is over. Idempotent."""
        with contextlib.suppress(IndexError):  # empty: another thread has fulfilled it
            self._futures[0].pop().set_result(None)

    def _outcome(self) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise hand_over(error)
        self._finish()
        return self._result


def _is_native(caller: FrameType | None) -> bool:
    """Whether C++ code called `get_future`, rather than the Python code of the frame `caller`."""
    return caller is None or "get_future" not in caller.f_code.co_names


@functools.cache
def _typed() -> Any:
    """Return a function ``(future, tensors) -> future`` whose result holds the list as a value that C++ understands.

    A value that Python sets is an opaque object to C++, which matters only to torch's built-in FP16 hook. A future that
    C++ can read has to be made by TorchScript and costs ten times as much, so only that hook gets one.
    """
    return torch.jit.CompilationUnit(
        """
def result(over: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(over)
    return tensors

def typed(over: Future[Tensor], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(result, over, tensors)
"""
    ).typed


def finished(result: list[torch.Tensor]) -> PhalanxWork:
    """Return the work of an operation that was over before the call returned, such as a blocking one."""
    return PhalanxWork(None, None, result)
