"""What a group on several hosts does in Python, in the order of calls: handles like those of the core."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx import _core

_LOOK_S = 0.1
_MOST_IDLE = 10  # looks without a block, before the watch sleeps


class Task:
    """An operation on its way, with the face of the core's handles."""

    source = -1  # of a message

    def __init__(self) -> None:
        self.value: Any = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._listener: tuple[_core.Completions, int] | None = None

    @property
    def done(self) -> bool:
        return self._is_over.is_set()

    def error(self) -> BaseException | None:
        return self._error

    def notify(self, completions: _core.Completions, number: int) -> None:
        """Leave `number` there when done."""
        with self._lock:
            if not self.done:
                self._listener = (completions, number)
                return
        completions.push(number)

    def wait(self, timeout_s: float = 0) -> bool:
        """Wait, at most `timeout_s` (0: until it is over); return whether it is. Does not raise what it failed with."""
        return self._is_over.wait(timeout_s or None)

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self.done:
                return
            self._error = error
            self._is_over.set()
            listener = self._listener
        if listener is not None:
            listener[0].push(listener[1])


class _Thread:
    """A thread that exists once it was needed, until `close`."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def _need(self) -> None:
        """Start the thread, or wake it; under `_changed`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, after what it has to do."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1)


class Watch(_Thread):
    """Calls `look` now and then while a block runs under it, for waits that can't look themselves.

    Its thread exists once there was such a block, and goes to sleep when there has been none for a while.
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
                self._changed.wait(None if may_sleep else _LOOK_S)
                if self._is_closed:
                    return
                self._num_idle = 0 if self._is_open else self._num_idle + 1
            if self._is_open:
                with contextlib.suppress(Exception):  # who waits meets the same
                    self._look()


class Tasks(_Thread):
    """Runs asynchronous operations one after the other, on a thread that exists once there was one."""

    def __init__(self) -> None:
        super().__init__("phalanx-bridge")
        self._queue: deque[tuple[Task, Callable[[], Any]]] = deque()
        self._turn = threading.Lock()
        self._num_pending = 0

    def begin_here(self) -> bool:
        """Hold back the thread until `end_here`, and return True, if nothing runs or waits."""
        with self._changed:
            return self._num_pending == 0 and self._turn.acquire(blocking=False)

    def end_here(self) -> None:
        self._turn.release()

    def submit(self, work: Callable[[], Any]) -> Task:
        task = Task()
        with self._changed:
            self._queue.append((task, work))
            self._num_pending += 1
            self._need()
        return task

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits, at most `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_pending == 0, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                task, work = self._queue.popleft()
            error: BaseException | None = None
            with self._turn:
                try:
                    task.value = work()
                except BaseException as caught:
                    error = caught
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()
            task.finish(error)
