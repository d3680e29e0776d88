"""Runs the operations of a group that spans several hosts, in the order of the calls, with handles like the core's."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx import _core
from phalanx._errors import GroupAborted
from phalanx.backend.deadlines import END_S, LOOK_S

_MOST_IDLE = 10  # number of checks outside any ``with`` block after which the watch sleeps


class Task:
    """A running operation, with the interface of the core's handles.

    Args:
        check: Function that raises if the calling thread would wait for the operation forever.

    Attributes:
        keep: Tensors that an engine may read and write for this operation. The thread that runs the operation holds the
            task, and so the tensors, until the engine has returned, even if the operation was declared over before.
    """

    keep: object = None
    source = -1  # for a receive, the rank that sent the message

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self.value: Any = None
        self.done = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # reentrant: a signal handler may interrupt the thread that holds it
        self._listeners: list[tuple[_core.Completions, int]] = []

    def error(self) -> BaseException | None:
        return self._error

    def notify(self, completions: _core.Completions, number: int) -> None:
        """Push `number` to `completions` when the operation is over."""
        with self._changed:
            if not self.done:
                self._listeners.append((completions, number))
                return
        completions.push(number)

    def require_reachable(self) -> None:
        """Raise if the operation is still running and can't finish while this thread waits for it."""
        if not self.done:
            self._check()

    def wait(self, timeout_s: float = 0) -> bool:
        """Wait at most `timeout_s` (0: until the operation is over); return whether it is over.

        The error of the operation is not raised.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout_s or None)

    def finish(self, error: BaseException | None = None) -> None:
        with self._changed:
            if self.done:
                return
            self._error = error
            self.done = True
            self._changed.notify_all()
        for completions, number in self._listeners:
            completions.push(number)


class _Thread(ABC):
    """A thread that starts on first use and runs until `close`."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def _need(self) -> None:
        """Start the thread unless it has started or was closed; wake it if it sleeps. The caller holds `_changed`."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether no thread is running."""
        return self._thread is None or not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Run the thread until `_is_closed`."""

    def close(self) -> None:
        """End the thread once it has done its work."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=END_S)


class Watch(_Thread):
    """Calls `look` periodically while a ``with`` block runs, for a wait in the block that can't call `look` itself.

    The thread starts with the first block, and sleeps when no block has run for a while.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__("phalanx-watch")
        self._look = look
        self._num_idle = _MOST_IDLE
        self._is_open = False

    def __enter__(self) -> None:
        self._is_open = True
        if self._num_idle >= _MOST_IDLE:
            with self._changed:
                self._num_idle = 0
                self._need()

    def __exit__(self, *_: object) -> None:
        self._is_open = False

    def _run(self) -> None:
        while True:
            with self._changed:
                may_sleep = self._num_idle >= _MOST_IDLE and not self._is_open
                self._changed.wait(None if may_sleep else LOOK_S)
                if self._is_closed:
                    return
                self._num_idle = 0 if self._is_open else self._num_idle + 1
            if self._is_open:
                with contextlib.suppress(Exception):  # the waiting thread raises the same error
                    self._look()


class Tasks(_Thread):
    """Runs operations one after the other on a thread that starts with the first operation.

    Args:
        name: Name of the thread.
        check: Argument `check` of each task.
    """

    def __init__(self, name: str, check: Callable[[], object]) -> None:
        super().__init__(name)
        self._check = check
        self._queue: deque[tuple[Task, Callable[[], Any]]] = deque()
        self._runner: int | None = None  # thread that runs an operation; a lock could not say which thread holds it
        self._waiting: set[int] = set()  # threads that wait for an operation
        self._num_pending = 0
        self.current: Task | None = None  # the task that the thread runs

    def begin_here(self) -> bool:
        """If no operation is running or queued, let the caller run one until `end_here`; return whether it may."""
        with self._changed:
            if self._is_closed or not self.is_idle:
                return False
            self._runner = threading.get_ident()
            return True

    def end_here(self) -> None:
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no operation is running or queued, on this thread or a caller's."""
        return self._num_pending == 0 and self._runner is None

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside an operation or waits for one; can be true in a signal handler."""
        return threading.get_ident() in (self._runner, *self._waiting)

    def wait(self, task: Task, timeout_s: float) -> bool:
        """Wait for a task, as `Task.wait` does."""
        self._waiting.add(threading.get_ident())
        try:
            return task.wait(timeout_s)
        finally:
            self._waiting.discard(threading.get_ident())

    def submit(self, work: Callable[[], Any], keep: object = None) -> Task:
        """Queue an operation. After `close`, raise GroupAborted, because the thread may have ended."""
        task = Task(self._check)
        task.keep = keep
        with self._changed:
            if self._is_closed:
                raise GroupAborted("the group has ended")
            self._queue.append((task, work))
            self._num_pending += 1
            self._need()
        return task

    def drain(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no operation is running or queued; return whether that succeeded."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_s)

    def close(self) -> None:
        super().close()
        self._check = lambda: None  # breaks a reference cycle that would keep the group's connections alive

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runner is None if self._queue else self._is_closed)
                if not self._queue:
                    return
                task, work = self._queue.popleft()
                self._runner = threading.get_ident()
            self.current = task
            error: BaseException | None = None
            try:
                task.value = work()
            except BaseException as caught:
                error = caught
            self.current = None
            with self._changed:
                self._num_pending -= 1
                self._runner = None
                self._changed.notify_all()
            task.finish(error)
            del task, work, error  # this thread sleeps next, and must not keep the operation's tensors alive
