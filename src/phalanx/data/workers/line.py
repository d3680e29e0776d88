"""`Line`: what connects a rank with one worker process. Nothing of it is shared with another worker.

torch lets all workers write into one pipe, under a lock of multiprocessing. A worker that is killed while it holds the
lock, or in the middle of a message, takes all others with it. Here each worker has a pipe of its own, with one reader
and one writer. So there is no lock, nothing lies in ``/dev/shm``, and a message that is cut off ends only its own pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from multiprocessing import queues
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from phalanx.failure.last_words import site_of
from phalanx.host.shared_blocks import unnamed_file

NO_TASK = -1
ALL_LOADED = -1
_MOST_READ_BYTES = 1 << 20  # at once
_PROGRESS_BYTES = 16  # before what is written at a crash


class Line:
    """Two pipes and a page between the rank and a worker process. A worker that takes another's place gets a new line.

    Args:
        is_counted: Whether torch takes the samples of a batch one by one.

    Attributes:
        tasks: Queue of tasks for the worker.
        results: Queue of what the worker sends.
        progress: Page in which the worker writes how far it is.
        index: Samples that this worker is working on; known in the worker only.
    """

    def __init__(self, is_counted: bool) -> None:
        self.is_counted = is_counted
        self.tasks, self.results, self.progress = PrivateQueue(), PrivateQueue(), Progress()
        self.tasks.cancel_join_thread()
        self.index: Any = None

    def keep_ends_of_rank(self) -> None:
        """Close what only the worker uses, so that its pipes end when it ends."""
        self.tasks.reader.close()
        self.results.writer.close()
        os.set_blocking(self.results.reader.fileno(), False)

    def keep_ends_of_worker(self) -> None:
        self.tasks.writer.close()
        self.results.reader.close()

    def close(self) -> None:
        """Close the rank's ends."""
        self.tasks.close()
        self.results.reader.close()


class PrivateQueue(queues.Queue):
    """multiprocessing's queue, for one reader and one writer, who need no locks."""

    def __init__(self) -> None:
        super().__init__(ctx=_NoLocks())
        self._ignore_epipe = True  # the other side may have ended
        self._arrived = bytearray()

    @property
    def reader(self) -> Connection:
        return self._reader  # type: ignore[attr-defined]

    @property
    def writer(self) -> Connection:
        return self._writer  # type: ignore[attr-defined]

    def get_arrived(self) -> Any:
        """Return the next object that has arrived in whole. `get` would wait for the rest of one that was cut off.

        Raises:
            BlockingIOError: There is none yet.
            EOFError: The pipe has ended.
        """
        self._read(4)
        (num_bytes,), at = struct.unpack_from("!i", self._arrived), 4
        if num_bytes == -1:  # more than fit into four bytes
            self._read(12)
            (num_bytes,), at = struct.unpack_from("!Q", self._arrived, 4), 12
        self._read(at + num_bytes)
        message, self._arrived = self._arrived, bytearray()
        return ForkingPickler.loads(memoryview(message)[at:])

    def _read(self, num_bytes: int) -> None:
        """Read until so many bytes have arrived since the last object."""
        while (missing := num_bytes - len(self._arrived)) > 0:
            part = os.read(self.reader.fileno(), min(missing, _MOST_READ_BYTES))
            if not part:
                raise EOFError
            self._arrived += part


class _NoLock:
    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


class _NoLocks:
    """The locks that multiprocessing's queue takes from a context."""

    def Lock(self) -> _NoLock:
        return _NoLock()

    def BoundedSemaphore(self, value: int = 1) -> _NoLock:
        return _NoLock()


class UnnamedFile:
    """A file without a name that the processes which this one starts have too, however they are started."""

    def __init__(self) -> None:
        try:
            self._fd = unnamed_file("phalanx-loader")
        except (OSError, AttributeError):  # a sandbox, or another system
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())

    def __getstate__(self) -> Any:
        return DupFd(self._fd)

    def __setstate__(self, sent: Any) -> None:
        self._fd = sent.detach()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # the interpreter is ending, or `__init__` failed
            os.close(self._fd)


class Flag(UnnamedFile):
    """An event that nobody waits for. A process that its owner has forked sets a copy: the workers are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()

    def is_set(self) -> bool:
        return os.fstat(self._fd).st_size > 0

    def set(self) -> None:
        if os.getpid() != self._owner:
            copy = Flag()
            os.dup2(copy._fd, self._fd)
        os.ftruncate(self._fd, 1)


class Progress(UnnamedFile):
    """How far a worker is, and the line of Python at which native code has crashed; read when the worker has died."""

    def __init__(self) -> None:
        super().__init__()
        os.ftruncate(self._fd, _PROGRESS_BYTES)
        self._map()
        self.begin(NO_TASK)

    def __setstate__(self, sent: Any) -> None:
        super().__setstate__(sent)
        self._map()

    def _map(self) -> None:
        self._numbers = memoryview(mmap.mmap(self._fd, _PROGRESS_BYTES)).cast("q")

    def note_crashes(self) -> None:
        """Have a crash of this process noted here, rather than where the rank that has forked it notes its own."""
        os.lseek(self._fd, _PROGRESS_BYTES, os.SEEK_SET)
        faulthandler.disable()  # otherwise it would keep its place behind torch's handlers
        faulthandler.enable(self._fd, all_threads=False)

    @property
    def crash_site(self) -> str:
        """The user's line at which the worker has crashed, such as ``"/home/me/data.py:31"``; empty if unknown."""
        text = os.pread(self._fd, _MOST_READ_BYTES, _PROGRESS_BYTES).decode(errors="replace")
        return site_of(text.splitlines()[::-1])  # the newest call comes first

    @property
    def task(self) -> int:
        """Number of the task that was begun last, `NO_TASK` if there is none."""
        return self._numbers[0]

    @property
    def num_begun(self) -> int:
        """Number of its samples that were begun, as far as they are counted; `ALL_LOADED` after the last one."""
        return self._numbers[1]

    def begin(self, task: int) -> None:
        self._numbers[1] = 0
        self._numbers[0] = task

    def counting(self, samples: list[Any]) -> CountedSamples:
        """Return the samples of the task, which are counted when torch takes one after the other."""
        counted = CountedSamples(samples)
        counted.numbers = self._numbers
        return counted


class CountedSamples(list[Any]):
    """A list that notes how far an iteration is."""

    numbers: memoryview[int]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([*super().__iter__()],)  # also for a copy

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers
        for number, sample in enumerate(super().__iter__(), 1):
            numbers[1] = number
            yield sample
        numbers[1] = ALL_LOADED
