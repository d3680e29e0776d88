"""A wrapper of torch's Store that reads and writes JSON of a checked shape, with a time limit for every answer.

Most calls of a store have no deadline: if the process that serves the store is suspended (SIGSTOP), they wait inside
native code. So a separate thread makes the call, and the caller waits for a limited time. If no answer arrives in time,
the thread keeps waiting and the caller does not.

All waits here poll the store. The store's own `wait` can't watch for anything but keys, and in TCPStore, it prints a
warning whenever it times out. ``python -m bench.joining`` measures what it costs to join a group in this way.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import Store

from phalanx.wire.messages import Shape, understand
from phalanx.wire.waiting import StoreSilentError, wait_until

T = TypeVar("T")
_ANSWER_S, _WRITE_S = 1.0, 5.0  # time limits for the answer to a read and to a write
_IDLE_S = 0.2  # time without a request after which the thread ends
# how long a caller waits for the thread to begin and to end
_BEGIN_S, _END_S = 0.5, 0.1
_MANY = 50  # number of ranks at which pauses are twice as long


class StoreGoneError(ConnectionError):
    """The store is gone: the process that served it has ended."""


def shared_pause(shortest_s: float, num_ranks: int) -> float:
    """Return a pause between requests that grows with the number of ranks, because one store serves all of them."""
    return shortest_s * (1 + num_ranks / _MANY)


def connect_within(limit_s: float, connect: Callable[[], T], look: Callable[[], None] = lambda: None) -> T:
    """Return the store that `connect` returns, within a time limit: torch's timeout does not cover every step.

    Args:
        look: Function that is called every tenth of a second during the wait. If it raises an exception, the wait ends.

    Raises:
        StoreSilentError: `connect` takes longer, because the store's process is suspended, for example. `connect`
            continues in its thread.
        Exception: `connect` or `look` raised it.
    """
    answer = (clerk := _Clerk()).take(connect)
    try:
        if wait_until(lambda: answer.done() or None, time.monotonic() + limit_s, seldom=look) is None:
            raise StoreSilentError(f"it accepts connections, but did not answer within {limit_s:.3g} s: is it stopped?")
        return answer.result()
    finally:
        clerk.dismiss()


class JsonStore:
    """Reads and writes JSON in a store of torch, with time limits. Threads and signal handlers may share an object.

    Once the store has failed, every method raises `StoreGoneError` without asking the store again, because TCPStore
    prints a traceback on each failure. If no answer arrives in time, a method raises `StoreSilentError`. Until the late
    answer arrives, further reads raise this error at once.

    Attributes:
        raw: torch's store, for code that must call it directly.
        answer_s: Time limit for an answer, in seconds.
        is_gone: Whether the store has failed.
    """

    def __init__(self, store: Store) -> None:
        self.raw = store
        self.answer_s = _ANSWER_S
        self.is_gone = False
        self._clerk = _Clerk()
        self._given_up: concurrent.futures.Future[Any] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether a request that timed out is still unanswered."""
        return self._given_up is not None and not self._given_up.done()

    def get(self, key: str, shape: Shape) -> Any:
        """Return the value of a key, read as `shape`; None if the key has no value.

        Raises:
            GarbledError: The value does not have the shape.
        """
        said = self.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if said is None else understand(said, shape)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the unparsed values of all keys, read in one request; an empty list if a key has no value."""
        return self.ask(lambda store: _get_all(store, [*keys]))

    def has(self, *keys: str) -> bool:
        """Whether all keys have values."""
        return bool(self.ask(lambda store: store.check([*keys])))

    def count(self, counter: str) -> int:
        return int(self.ask(lambda store: store.add(counter, 0)))

    def set(self, key: str, value: Any, limit_s: float = _WRITE_S) -> None:
        text = json.dumps(value)
        self.ask(lambda store: store.set(key, text), limit_s)

    def set_all(self, values: Mapping[str, Any], limit_s: float = _WRITE_S) -> None:
        """Set the values of several keys, in the order of `values`, in one request."""
        texts = {key: json.dumps(value) for key, value in values.items()}
        self.ask(lambda store: _set_all(store, texts), limit_s)

    def add(self, counter: str, limit_s: float = _WRITE_S) -> int:
        """Add 1 to a counter and return the sum."""
        return int(self.ask(lambda store: store.add(counter, 1), limit_s))

    def close(self) -> None:
        """End the thread, unless the store is blocking it. The next request starts another thread."""
        self._clerk.dismiss()

    def ask(self, question: Callable[[Store], T], limit_s: float | None = None) -> T:
        """Call `question` with the store on the thread, and return its result.

        Args:
            limit_s: Seconds to wait for the result, including the time for earlier questions. None means `answer_s`, or
                0 if the store is silent.
        """
        if self.is_gone:
            raise StoreGoneError("it has failed before")
        if limit_s is None and self.is_silent:
            raise StoreSilentError("it has not answered yet")
        store = self.raw
        answer = self._clerk.take(lambda: question(store))
        if answer not in concurrent.futures.wait([answer], self.answer_s if limit_s is None else limit_s).done:
            self._given_up = answer
            raise StoreSilentError("it does not answer")
        if (error := answer.exception()) is not None:
            self.is_gone = True
            raise StoreGoneError(str(error)) from error
        result: T = answer.result()
        return result


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    if not store.check(keys):
        return []
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def _set_all(store: Any, texts: dict[str, str]) -> None:
    if store.has_extended_api():
        store.multi_set([*texts], [*texts.values()])
        return
    for key, text in texts.items():
        store.set(key, text)


class _Clerk:
    """A thread that makes the requests to a store: it starts with the first request and ends when no more arrive.

    If memory is short, a new thread may fail before it runs its first line, and `threading.Thread.start` would wait for
    this thread forever. So `_thread` starts the thread, and if it does not begin in time, the caller makes the request
    itself.
    """

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._questions = queue.SimpleQueue()
        # Reentrant, because a signal handler may interrupt a request and make another. If this starts a second thread,
        # both threads serve the same queue.
        self._lock = threading.RLock()
        self._is_running, self._has_ended = False, threading.Event()

    def take(self, question: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self._questions.put((future, question))
            must_start, self._is_running = not self._is_running, True
        if must_start:
            self._has_ended = threading.Event()
            has_begun = threading.Event()
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._run, (has_begun, self._has_ended))
                has_begun.wait(_BEGIN_S)
            if not has_begun.is_set():
                self._questions.put(None)
                self._run(has_begun, self._has_ended)
        return future

    def dismiss(self) -> None:
        """End the thread now, unless it is blocked in a request to the store."""
        if self._is_running:
            self._questions.put(None)
            self._has_ended.wait(_END_S)

    def _run(self, has_begun: threading.Event, has_ended: threading.Event) -> None:
        has_begun.set()
        while True:
            try:
                item = self._questions.get(timeout=_IDLE_S)
            except queue.Empty:
                item = None
            if item is None:
                with self._lock:
                    if self._questions.empty():
                        self._is_running = False
                        has_ended.set()
                        return
                continue
            future, question = item
            try:
                future.set_result(question())
            except BaseException as error:
                future.set_exception(error)
            del item, future, question  # otherwise they would keep the caller's objects alive while this thread waits
