"""Keeps operations in flight alive until they are over, joins several into one, and reports them to the profiler.

**Memory of an operation that starts.** The core works on addresses in a thread of its own, so the tensors must live
until the operation is over: the work keeps the tensors, and `Flight` keeps the work. Between the start of the operation
and the creation of its work, only the calling frame keeps the tensors, so this frame must not fail in between.
Therefore, everything needed from the core is looked up before the start: afterwards, another thread may have left the
group. If a signal handler raises in between, `Flight` keeps the tensors until this rank leaves the group
(`keep_after`).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx import _torch
from phalanx._errors import PhalanxError
from phalanx.backend.calls.memory import Tensors
from phalanx.backend.calls.tasks import Task
from phalanx.backend.calls.work import PhalanxWork, finished

_NUM_LOOKS = 4  # number of earlier works that are checked for completion at each start


class Flight:
    """The running operations of one group."""

    def __init__(self) -> None:
        self._works: OrderedDict[PhalanxWork, None] = OrderedDict()
        self._coalescing: list[PhalanxWork] | None = None
        self._kept: list[object] = []
        self._has_left = False

    def begin(
        self,
        handle: Any,
        wait: Callable[..., Any],
        result: Tensors,
        settle: Callable[[], None] | None,
        keep: object,
    ) -> PhalanxWork:
        """Return the work of an operation that the core has started.

        The work is kept until the operation is over, even if callers drop it.

        Args:
            handle: The core's handle of the operation.
            wait: Function of the core that waits for such a handle.
            result: Tensors that the operation writes.
            settle: Function that runs once the operation is over.
            keep: Tensors whose memory the operation uses, kept alive until it is over.
        """
        if isinstance(handle, Task):  # the task's thread may still be inside the engine after the work was dropped
            handle.keep = keep
        work, works = PhalanxWork(handle, wait, result, settle, keep, self.let_go), self._works
        if works:
            self._look(works)
        works[work] = None
        if self._coalescing is not None:
            self._coalescing.append(work)
        if self._has_left:  # another thread left the group during the start
            self._leave_works()
        return work

    def keep_after(self, error: BaseException, memory: object) -> None:
        """Keep the tensors of an operation whose start raised `error`, if the operation may be running nevertheless.

        The tensors are kept until this rank leaves the group. If the core refused the operation, it is not running. If
        a signal handler raised the error, the operation may already have started.
        """
        if not isinstance(error, PhalanxError):
            self._kept.append(memory)

    def _look(self, works: OrderedDict[PhalanxWork, None]) -> None:
        """Drop the finished works among the next few; checking all would be slow, because there may be thousands."""
        with contextlib.suppress(KeyError):  # another thread may have taken the last work
            for _ in range(min(_NUM_LOOKS, len(works))):
                other, _none = works.popitem(last=False)
                if other.over:
                    other.let_go()
                else:
                    works[other] = None

    def let_go(self, work: PhalanxWork) -> None:
        self._works.pop(work, None)

    def start_coalescing(self) -> None:
        """Collect the operations that follow into one handle."""
        self._coalescing = []

    def end_coalescing(self) -> PhalanxWork:
        works, self._coalescing = self._coalescing or [], None
        return joined(works) if works else finished([])

    def wait_for_all(self) -> None:
        """Wait until all operations that are running now are over. Only the work of an operation raises its error."""
        for work in list(self._works):
            with contextlib.suppress(Exception):
                work.wait()

    def leave(self) -> None:
        """Drop everything, because a work keeps the core alive, and with it the memory of the group."""
        self._has_left = True
        self._leave_works()
        self._kept.clear()
        self._coalescing = None

    def _leave_works(self) -> None:
        with contextlib.suppress(KeyError):  # another thread may have taken the last work
            while self._works:
                self._works.popitem()[0].let_go()


class Joined(PhalanxWork):
    """The work of several operations; it is over when all of them are."""

    _handle = property(lambda self: self._works[-1]._handle, lambda self, _: None)  # the last work's handle

    def __init__(self, works: list[PhalanxWork], result: Tensors, settle: Callable[[], None] | None = None) -> None:
        super().__init__(None, None, result, settle)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            self._finish()
        return True

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def fulfil(self) -> None:
        for work in self._works:
            work.is_completed()  # for its side effect: it copies results out of stand-ins
        super().fulfil()


def joined(works: list[PhalanxWork]) -> PhalanxWork:
    """Return one work for several operations; its value is the list of all their results."""
    return Joined(works, [tensor for work in works for tensor in work._result])


def profiled(event: str, inputs: Tensors, settle: Callable[[], None] | None) -> Callable[[], None]:
    """Open a profiler event with the inputs' shapes; return a function that calls `settle` and closes the event."""
    events = [_torch.begin_event(event, inputs)]

    def close() -> None:
        if settle is not None:
            settle()
        if not events:  # a signal handler has closed the event
            return
        events.pop()()

    return close
