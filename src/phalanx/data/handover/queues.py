"""Queues between a loader and its workers where ``/dev/shm`` is missing, full or read-only.

multiprocessing keeps its locks there, so its queues can't be made without it. A loader's queues need little of them:
each queue has one reader, only the queue of the batches has several writers, and no queue is bounded. So one lock is
left. It is a lock of the kernel on a memfd, which a killed worker does not keep.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
from multiprocessing.context import BaseContext
from multiprocessing.reduction import DupFd
from typing import Any

from phalanx.host.shared_blocks import unnamed_file

_PLENTY_BYTES = 1 << 20  # locks take a page each, a dozen for two workers


def context_for(wanted: Any) -> BaseContext | None:
    """Return a context whose queues need no ``/dev/shm``; None if there is room in it, so that `wanted` will do.

    Args:
        wanted: Context of multiprocessing that a loader would use, None for the default one.
    """
    context = wanted or multiprocessing.get_context(multiprocessing.get_start_method())
    if _has_room(context):
        return None
    return type("UnnamedContext", (_Unnamed, type(context)), dict(vars(context)))()


def _has_room(context: BaseContext) -> bool:
    try:
        context.Lock()
        found = os.statvfs("/dev/shm")
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= _PLENTY_BYTES


class _Unnamed:
    """What a context makes for the queues of a loader."""

    def Lock(self) -> _WriterLock:
        return _WriterLock()

    def BoundedSemaphore(self, value: int = 1) -> _Unbounded:
        return _Unbounded()

    def Event(self) -> _Flag:
        return _Flag()


class _UnnamedFile:
    """A memfd that the processes which this one starts have too, however they are started."""

    def __init__(self) -> None:
        self._fd = unnamed_file("phalanx-loader")

    def __getstate__(self) -> Any:
        return DupFd(self._fd)

    def __setstate__(self, sent: Any) -> None:
        self._fd = sent.detach()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # the interpreter is ending, or `__init__` failed
            os.close(self._fd)


class _WriterLock(_UnnamedFile):
    """A lock between processes; within a process, a queue has one thread that takes it."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if timeout is None and block:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        return True  # the reader of a queue passes a timeout, and it is the only one

    def release(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Unbounded:
    """Stands in for the semaphore that would bound a queue."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass


class _Flag(_UnnamedFile):
    """An event that nobody waits for."""

    def is_set(self) -> bool:
        return os.fstat(self._fd).st_size > 0

    def set(self) -> None:
        os.ftruncate(self._fd, 1)
