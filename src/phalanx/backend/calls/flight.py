"""Operations in flight: keeps each alive until it is over, joins several into one, and reports them to the profiler.

**Memory of an operation that starts.** The core works on addresses in a thread of its own, so the tensors must live
until the operation is over: the work keeps them, and `Flight` keeps the work. Until the work exists, the calling frame
keeps the tensors, and must not fail. So everything needed from the core is looked up before the start, since another
thread may leave the group meanwhile. If a signal handler raises in between, `Flight` keeps the tensors until the group
is left (`keep_after`).
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
        """Return the work of an operation that the core has started; keep it until it is over, even if callers drop it.

        Args:
            handle: The core's handle of the operation.
            wait: Function of the core that waits for such a handle.
            result: Tensors that the operation writes.
            settle: Function that runs once the operation is over.
            keep: Tensors whose memory the operation uses, kept alive until it is over.
        """
        if isinstance(handle, Task):  # its thread may still be inside the engine when the work has been dropped
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
        """After a start that raised `error`, keep its tensors until the group is left, if the operation may be running.

        It is not running if the core refused it. It may be running if a signal handler raised, which can happen after
        the start.
        """
        if not isinstance(error, PhalanxError):
            self._kept.append(memory)

    def _look(self, works: OrderedDict[PhalanxWork, None]) -> None:
        """Check the next few works, and drop those that are finished: there may be thousands."""
        with contextlib.suppress(KeyError):  # another thread may have taken the last
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
        """Wait until each operation that runs now is over; its error is raised by the wait for its work."""
        for work in list(self._works):
            with contextlib.suppress(Exception):
                work.wait()

    def leave(self) -> None:
        """Drop everything: a work holds the core, and with it the memory of the group."""
        self._has_left = True
        self._leave_works()
        self._kept.clear()
        self._coalescing = None

    def _leave_works(self) -> None:
        with contextlib.suppress(KeyError):  # another thread may have taken the last
            while self._works:
                self._works.popitem()[0].let_go()


class Joined(PhalanxWork):
    """Several operations as one, which is over when all of them are."""

    _handle = property(lambda self: self._works[-1]._handle, lambda self, _: None)  # the last work's, while it has one

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
            work.is_completed()  # called because it copies results where needed
        super().fulfil()


def joined(works: list[PhalanxWork]) -> PhalanxWork:
    """Return one work for several operations; its value is the list of all their results."""
    return Joined(works, [tensor for work in works for tensor in work._result])


def profiled(event: str, inputs: Tensors, settle: Callable[[], None] | None) -> Callable[[], None]:
    """Open a profiler event with the inputs' shapes; return a function that settles and closes it."""
    events = [_torch.begin_event(event, inputs)]

    def close() -> None:
        if settle is not None:
            settle()
        if not events:  # a signal handler closed it
            return
        events.pop()()

    return close
