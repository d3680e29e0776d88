"""torch's Store as processes of a job use it: JSON of a checked shape in and out, and waits and questions that end.

A store has no deadline of its own for most of what it is asked: where the process that serves it is stopped, the call
waits inside native code. So a thread asks, which may be left behind, and whoever wants the answer waits for a while.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import Store

T = TypeVar("T")
Shape = Any
"""A type; a dict of shapes by key, where more keys may be; ``[shape]``, a list of such; a tuple of the shapes of a
list; or a function that returns the value as it is to be read, and raises ValueError if it can't be."""

_ANSWER_S, _WRITE_S = 1.0, 5.0  # for the store to answer, and to take what is written
_IDLE_S = 0.2  # before the thread that asks ends
_BEGIN_S, _END_S = 0.5, 0.1  # for it to begin, and to end
_FIRST_PAUSE_S = 0.0002
_NAMES = {str: "a text", int: "a whole number", dict: "a table", list: "a list"}


class GarbledError(ValueError):
    """What another process has written is not what this library writes."""


class StoreGoneError(ConnectionError):
    """The store can't be asked any more: the process that served it has ended."""


class StoreSilentError(TimeoutError):
    """The store does not answer yet: the process that serves it may be stopped, and go on."""


def understand(text: bytes | str, shape: Shape) -> Any:
    """Return the JSON in `text`, read by its shape.

    Raises:
        GarbledError: It is none, or does not have the shape.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"it is no JSON: {type(error).__name__}") from None
    return read_value(value, shape)


def read_value(value: Any, shape: Shape) -> Any:
    """Return a value of JSON, read by its shape.

    Raises:
        GarbledError: It does not have the shape.
    """
    if isinstance(shape, dict):
        require(isinstance(value, dict), "a table", value)
        require(shape.keys() <= value.keys(), f"a table with {', '.join(shape)}", value)
        return {**value, **{key: read_value(value[key], one) for key, one in shape.items()}}
    if isinstance(shape, list):
        require(isinstance(value, list), "a list", value)
        return [read_value(one, shape[0]) for one in value]
    if isinstance(shape, tuple):
        require(isinstance(value, list) and len(value) == len(shape), f"a list of {len(shape)}", value)
        return [read_value(one, of_one) for one, of_one in zip(value, shape, strict=True)]
    if isinstance(shape, type):
        require(type(value) is shape, _NAMES.get(shape, shape.__name__), value)  # true is no number
        return value
    try:
        return shape(value)
    except GarbledError:
        raise
    except ValueError as error:
        raise GarbledError(str(error)) from None


def fits(value: Any, shape: Shape) -> bool:
    """Whether a value has a shape."""
    with contextlib.suppress(GarbledError):
        read_value(value, shape)
        return True
    return False


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Return the shape of what is one of the values."""

    def read(value: Any) -> Any:
        require(value in values, f"one of {', '.join(map(str, values))}", value)
        return value

    return read


def require(is_so: bool, what: str, value: Any) -> None:
    """Raise `GarbledError`, which says what the value should be, unless it is."""
    if not is_so:
        raise GarbledError(f"{repr(value)[:80]} is not {what}")


def wait_until(
    look: Callable[[], T | None],
    deadline: float,
    *,
    seldom: Callable[[], None] = lambda: None,
    seldom_s: float = 0.1,
    most_s: float = 0.02,
) -> T | None:
    """Return what `look` finds, once that is not None; None at the deadline.

    Args:
        look: Asked ever more seldom; a store that does not answer is one in which nothing is found.
        deadline: On the monotonic clock.
        seldom: Called every `seldom_s` meanwhile; raises what ends the wait.
        most_s: The longest pause between two looks.
    """
    pause_s, next_s = _FIRST_PAUSE_S, time.monotonic() + seldom_s
    while True:
        with contextlib.suppress(StoreSilentError):
            if (found := look()) is not None:
                return found
        if time.monotonic() >= next_s:
            with contextlib.suppress(StoreSilentError):
                seldom()
            next_s = time.monotonic() + seldom_s
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)


class JsonStore:
    """A store of torch's that holds JSON, and answers in a limited time.

    Every method raises `StoreGoneError` once the store has failed, at once from then on, since TCPStore prints a
    traceback each time; and `StoreSilentError` where no answer comes, at once while a question is yet unanswered.

    Attributes:
        raw: torch's store, for what speaks with it itself.
        is_gone: Whether the store has failed.
    """

    def __init__(self, store: Store) -> None:
        self.raw = store
        self.is_gone = False
        self._clerk = _Clerk()
        self._last: concurrent.futures.Future[Any] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether a question is yet unanswered."""
        return self._last is not None and not self._last.done()

    def get(self, key: str, shape: Shape) -> Any:
        """Return what the key says, read by its shape; None if it says nothing.

        Raises:
            GarbledError: It says something else.
        """
        said = self.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if said is None else understand(said, shape)

    def has(self, *keys: str) -> bool:
        """Whether all keys say something."""
        return bool(self.ask(lambda store: store.check([*keys])))

    def count(self, counter: str) -> int:
        return int(self.ask(lambda store: store.add(counter, 0)))

    def set(self, key: str, value: Any, limit_s: float = _WRITE_S) -> None:
        text = json.dumps(value)
        self.ask(lambda store: store.set(key, text), limit_s)

    def add(self, counter: str, limit_s: float = _WRITE_S) -> int:
        """Add one and return the sum."""
        return int(self.ask(lambda store: store.add(counter, 1), limit_s))

    def delete(self, *keys: str) -> None:
        self.ask(lambda store: [store.delete_key(key) for key in keys], _WRITE_S)

    def close(self) -> None:
        """Leave no thread behind, unless the store holds it up. Questions may follow."""
        self._clerk.dismiss()

    def ask(self, question: Callable[[Store], T], limit_s: float | None = None) -> T:
        """Return what the store answers.

        Args:
            limit_s: Time for the answer, and for those of earlier questions. By default a second, and none where an
                earlier question is yet unanswered.
        """
        if self.is_gone:
            raise StoreGoneError("it has failed before")
        if limit_s is None and self.is_silent:
            raise StoreSilentError("it has not answered yet")
        store = self.raw
        self._last = answer = self._clerk.take(lambda: question(store))
        if answer not in concurrent.futures.wait([answer], _ANSWER_S if limit_s is None else limit_s).done:
            raise StoreSilentError("it does not answer")
        if (error := answer.exception()) is not None:
            self.is_gone = True
            raise StoreGoneError(str(error)) from error
        result: T = answer.result()
        return result


class _Clerk:
    """The thread that asks: started when there is a question, it ends when there has been none for a while.

    Where memory is short a new thread may fail before its first line, and `threading.Thread` would wait for that for
    ever. So the thread is a bare one, and where it does not begin, questions are asked by whoever has them.
    """

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._questions = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_begun, self._has_ended = threading.Event(), threading.Event()
        self._is_running = False

    def take(self, question: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self._questions.put((future, question))
            must_start, self._is_running = not self._is_running, True
        if must_start:
            self._has_begun.clear()
            self._has_ended.clear()
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._run, ())
                self._has_begun.wait(_BEGIN_S)
            if not self._has_begun.is_set():
                self._questions.put(None)
                self._run()
        return future

    def dismiss(self) -> None:
        """End the thread now, unless a question holds it up."""
        if self._is_running:
            self._questions.put(None)
            self._has_ended.wait(_END_S)

    def _run(self) -> None:
        self._has_begun.set()
        while True:
            try:
                item = self._questions.get(timeout=_IDLE_S)
            except queue.Empty:
                item = None
            if item is None:
                with self._lock:
                    if self._questions.empty():
                        self._is_running = False
                        self._has_ended.set()
                        return
                continue
            future, question = item
            try:
                future.set_result(question())
            except BaseException as error:
                future.set_exception(error)
            del item, future, question  # they refer to who asked
