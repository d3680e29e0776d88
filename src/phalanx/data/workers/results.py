"""`WorkersContext`: what torch's iterator takes for multiprocessing, so that its workers may die.

torch makes one queue for all batches, then for each worker a queue of tasks and a process. It gets a `Results`, and for
each worker its `Tasks` and a `Worker`. Whatever torch does with them (order, prefetching, persistent workers, pinned
memory, timeouts) stays torch's.

**A death** is seen where the rank waits for a batch, at once: the wait ends when a process does. What the dead worker
has sent in whole is still received. As long as there are retries, a new process takes its place: it has the same number
and seed, and gets the tasks that were not answered, in the same order. torch notices nothing, so each batch comes
exactly once. Without retries, an error that says at which batch the worker died is the result of each batch that torch
asks it for. So torch raises the error in the turn of the first batch that is lost, as it does if the dataset raises
one, in any thread that reads, and behind the thread that pins memory. The other workers go on meanwhile.

**torch's handler of SIGCHLD** would raise an error in the main thread at whatever line it is, in the middle of a step.
So it does not watch these workers.
"""

from __future__ import annotations

import collections
import math
import multiprocessing
import os
import queue
import select
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils import data as torch_data

from phalanx._text import complain
from phalanx._torch import ExceptionWrapper
from phalanx._torch.lookup import leave_to_phalanx
from phalanx.data.workers.line import NO_TASK, Flag, Line
from phalanx.data.workers.worker import Tasks, Worker, number_of, place_of

_LOOK_S = 0.5  # between two looks at the workers, for a death that no descriptor shows
FETCHING = ", in fetch\n"
"""Part of an error's traceback that shows that torch was fetching a batch, rather than calling worker_init_fn."""


class WorkersContext(BaseContext):
    """A context of multiprocessing for one iterator of a loader.

    Args:
        loader: Loader that starts the workers.
        rank: Rank of this process, for messages.
        num_retries: Number of deaths in an epoch that are made good.
        forget: Function that is called with the pid of a dead worker.
    """

    def __init__(
        self, loader: torch_data.DataLoader[Any], rank: int, num_retries: int, forget: Callable[[int], None]
    ) -> None:
        leave_to_phalanx()
        wanted = loader.multiprocessing_context
        self._context = wanted or multiprocessing.get_context(multiprocessing.get_start_method())
        self._has_samples = not isinstance(loader.dataset, torch_data.IterableDataset)
        takes_one_by_one = loader.batch_sampler is not None and not getattr(loader.dataset, "__getitems__", None)
        self._is_counted = self._has_samples and takes_one_by_one
        self.results = Results(rank, num_retries, forget)
        self._is_asked_for_results = True

    def Queue(self, maxsize: int = 0) -> Any:
        if self._is_asked_for_results:
            self._is_asked_for_results = False
            return self.results
        results = self.results
        worker = Worker(
            len(results.workers), self._context, self._has_samples, self._is_counted, results.lend, results.begin_epoch
        )
        results.workers.append(worker)
        return Tasks(worker)

    def Event(self) -> Any:
        return Flag()

    def Process(self, **start: Any) -> Any:
        return self.results.workers[-1].prepare(start)


class Results:
    """The queue of all batches, as both sides see it; each worker writes into a pipe of its own.

    Attributes:
        workers: All workers, in the order of their numbers.
        failure: Message of the last death that was not made good; empty if there is none.
    """

    def __init__(self, rank: int, num_retries: int, forget: Callable[[int], None]) -> None:
        self.workers: list[Worker] = []
        self.failure = ""  # not the error, which would refer to its frames, and they to this object
        self._rank, self._num_retries, self._num_left, self._forget = rank, num_retries, num_retries, forget
        self._line: Line | None = None
        self._owner = os.getpid()
        self._for_dead: collections.deque[Any] = collections.deque()  # results in the place of dead workers
        self._from_rank, self._to_rank = Pipe(duplex=False)  # torch wakes the thread that pins memory
        self._poll = select.poll()
        self._has_begun = False
        self._watched: dict[int, Worker] = {}
        self._ready: collections.deque[int] = collections.deque()

    def lend(self, line: Line) -> None:
        """Let the process that is started next write into a line."""
        self._line = line

    def __getstate__(self) -> Any:
        return self._line

    def __setstate__(self, line: Line) -> None:
        self._line, self._owner = line, 0

    def put(self, item: Any) -> None:
        if os.getpid() == self._owner:
            self._to_rank.send(item)
            return
        assert self._line is not None
        if isinstance(item[1], ExceptionWrapper) and FETCHING in item[1].exc_msg:
            item[1].where += place_of(self._line)
        self._line.results.put(item)

    def cancel_join_thread(self) -> None:
        if os.getpid() != self._owner and self._line is not None:
            self._line.results.cancel_join_thread()

    def close(self) -> None:
        if os.getpid() != self._owner and self._line is not None:
            self._line.results.close()

    # ---- in the rank

    def begin_epoch(self) -> None:
        self._num_left = self._num_retries

    def get(self, block: bool = True, timeout: float = math.inf) -> Any:
        """Return what a worker has sent: the number of a batch, and the batch.

        Raises:
            queue.Empty: Nothing came in time.
        """
        if not self._has_begun:
            self._has_begun = True
            self._poll.register(self._from_rank, select.POLLIN)
            for worker in self.workers:
                self._watch(worker)
        until = time.monotonic() + timeout
        while True:
            if self._for_dead:
                return self._for_dead.popleft()
            fd = self._next_ready(until)
            if fd == self._from_rank.fileno():
                return self._from_rank.recv()
            found = self._find_dead() if fd is None else self._watched[fd]
            if found is None:
                if time.monotonic() >= until:
                    raise queue.Empty
                continue
            item = found.receive()
            if item is None and (found.has_hung_up or not found.is_running()):
                self._lose(found)
                until = time.monotonic() + timeout  # the batch is loaded once more
            if item is not None:
                return item

    def _next_ready(self, until: float) -> int | None:
        if not self._ready:
            wait_s = max(0.0, min(until - time.monotonic(), _LOOK_S))
            self._ready.extend(fd for fd, _ in self._poll.poll(math.ceil(wait_s * 1000)))
        return self._ready.popleft() if self._ready else None

    def _find_dead(self) -> Worker | None:
        return next((worker for worker in self._watched.values() if not worker.is_running()), None)

    def _lose(self, worker: Worker) -> None:
        """Replace a dead worker or, if no retry is left, give it up."""
        self._unwatch(worker)
        if worker.is_told_to_end:
            return
        death = worker.death()
        self._forget(death.pid)
        if self._num_left > 0:
            self._num_left -= 1
            complain(death.notice(self._rank, self._num_left))
            worker.replace()
            self._watch(worker)
            return
        self.failure = failure = death.failure(self._rank, self._num_retries)

        def answer(item: Any) -> None:
            number = number_of(item)
            self._for_dead.append((item, None) if number == NO_TASK else (number, _Failure(failure)))

        worker.give_up(answer)

    def _watch(self, worker: Worker) -> None:
        for fd in worker.fds:
            self._watched[fd] = worker
            self._poll.register(fd, select.POLLIN)

    def _unwatch(self, worker: Worker) -> None:
        for fd in [fd for fd, of in self._watched.items() if of is worker]:
            del self._watched[fd]
            self._poll.unregister(fd)
        self._ready.clear()


class _Failure(ExceptionWrapper):
    """A death, for torch's iterator to raise as the result of a batch."""

    def __init__(self, message: str) -> None:
        self._message = message

    def reraise(self) -> None:
        raise RuntimeError(self._message)
