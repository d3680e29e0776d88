"""`Worker`: one worker of a loader. torch takes it for a process; if it dies, another process may take its place."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torch.utils import data as torch_data

from phalanx._torch.lookup import UnwatchedPid
from phalanx.data.workers.deaths import Death, words_of_batch
from phalanx.data.workers.line import ALL_LOADED, NO_TASK, Line

_REAP_S = 1.0  # a pipe ends a moment before its process can be waited for


@dataclasses.dataclass
class Task:
    """What a worker was given and has not answered.

    Attributes:
        item: Message that torch has put into the worker's queue.
        num_deaths: Number of workers that died of it.
    """

    item: Any
    num_deaths: int = 0

    @property
    def number(self) -> int:
        """Torch's number of the batch; `NO_TASK` if the worker is to begin another epoch."""
        return number_of(self.item)


def number_of(item: Any) -> int:
    return item[0] if type(item) is tuple and type(item[0]) is int else NO_TASK


class Worker:
    """A worker as its rank sees it: the present process, the line to it, and its tasks.

    Args:
        number: Torch's number of the worker.
        context: Context of multiprocessing that starts processes.
        has_samples: Whether tasks name samples, rather than places in a stream.
        is_counted: Whether torch takes the samples of a batch one by one.
        lend_line: Function that puts a line where a new process finds it.
        begin_epoch: Function that is called when torch tells a persistent worker that an epoch begins.

    Attributes:
        is_told_to_end: Whether torch no longer needs the worker.
        has_hung_up: Whether such a worker has closed its pipe; its process may take longer to end.
    """

    daemon = True

    def __init__(
        self,
        number: int,
        context: Any,
        has_samples: bool,
        is_counted: bool,
        lend_line: Callable[[Line], None],
        begin_epoch: Callable[[], None],
    ) -> None:
        self.number = number
        self.line = Line(is_counted)
        self.is_told_to_end = self.has_hung_up = False
        self._context, self._has_samples = context, has_samples
        self._lend_line, self._begin_epoch = lend_line, begin_epoch
        self._tasks: collections.deque[Task] = collections.deque()
        self._lock = threading.RLock()  # a thread that pins memory receives, while torch's iterator gives
        self._pid_of_rank = os.getpid()
        self._process: Any = None
        self._answer_for_dead: Callable[[Any], None] | None = None
        self._start: dict[str, Any] = {}

    # ---- what torch does with a process

    def prepare(self, start: dict[str, Any]) -> Worker:
        """Note how to start a process; return this object in its place."""
        self._start = start
        return self

    def start(self) -> None:
        self._process = self._context.Process(**self._start)
        self._process.daemon = True
        self._lend_line(self.line)
        self._process.start()
        self.line.keep_ends_of_rank()

    @property
    def pid(self) -> int:
        return UnwatchedPid(self._process.pid)

    def is_alive(self) -> bool:
        """Whether torch need not care: until it ends the workers, `Results` does, and may replace a dead one."""
        return self._is_of_this_process and (not self.is_told_to_end or self.is_running())

    def join(self, timeout: float | None = None) -> None:
        if self._is_of_this_process:
            self._process.join(timeout)

    def terminate(self) -> None:
        if self._is_of_this_process:
            self._process.terminate()

    # ---- what the rank does

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of which one is ready when the worker has sent something or has ended."""
        return self.line.results.reader.fileno(), self._process.sentinel

    @property
    def _is_of_this_process(self) -> bool:
        """False in a process that the rank has forked, which may collect the iterator that it has inherited."""
        return self._pid_of_rank == os.getpid()

    def is_running(self) -> bool:
        return self._is_of_this_process and bool(self._process.is_alive())

    def give(self, item: Any) -> None:
        """Give the worker a task; None tells it to end."""
        if not self._is_of_this_process:
            return
        with self._lock:
            if item is None:
                self.is_told_to_end = True
            elif self._answer_for_dead is not None:
                self._answer_for_dead(item)
                return
            else:
                self._tasks.append(Task(item))
                if self._tasks[-1].number == NO_TASK:
                    self._begin_epoch()
            self.line.tasks.put(item)

    def receive(self) -> Any:
        """Return what the worker has sent; None if it has sent nothing in whole, yet or before it ended."""
        try:
            item = self.line.results.get_arrived()
        except BlockingIOError:
            if wait([self._process.sentinel], 0):
                self._process.join(_REAP_S)
            return None
        except Exception:  # the pipe ends, or the memory of a batch is gone
            self._process.join(_REAP_S)
            self.has_hung_up = self.is_told_to_end
            if self.is_running() and not self.has_hung_up:
                raise
            return None
        with self._lock:
            answered = next((task for task in self._tasks if task.number == number_of(item)), None)
            if answered is not None:
                self._tasks.remove(answered)
        return item

    def death(self) -> Death:
        """Return how the process has died and which batch it was working on; that batch counts one more death."""
        progress = self.line.progress
        task = next((task for task in self._tasks if task.number == progress.task != NO_TASK), None)
        is_begun = task is not None
        task = task or next((task for task in self._tasks if task.number != NO_TASK), None)
        if task is not None:
            task.num_deaths += 1
        return Death(
            worker=self.number,
            pid=int(self._process.pid),
            exitcode=self._process.exitcode,
            samples=task.item[1] if task is not None and self._has_samples else None,
            num_begun=progress.num_begun if is_begun else 0,
            is_begun=is_begun,
            num_deaths=task.num_deaths if task is not None else 0,
            site=progress.crash_site,
        )

    def replace(self) -> None:
        """Let a new process do what the dead one has not done."""
        with self._lock:
            self.line.close()
            self.line = Line(self.line.is_counted)
            self.start()
            epoch_at = max((at for at, task in enumerate(self._tasks) if task.number == NO_TASK), default=0)
            for _ in range(epoch_at):  # torch no longer waits for what it asked for before it began another epoch
                self._tasks.popleft()
            for task in self._tasks:
                self.line.tasks.put(task.item)

    def give_up(self, answer: Callable[[Any], None]) -> None:
        """Have a function answer the tasks that the dead process has not answered, and those that torch still gives it.

        Args:
            answer: Function that is called with the message of each task.
        """
        with self._lock:
            self._answer_for_dead = answer
            while self._tasks:
                answer(self._tasks.popleft().item)

    def close(self) -> None:
        """Close the line, and forget how to start a process: what that needs refers to this object."""
        self._start, self._lend_line, self._begin_epoch = {}, lambda line: None, lambda: None
        self._answer_for_dead = None
        self.line.tasks.close()


class Tasks:
    """The queue in which torch puts the tasks of one worker, as both sides see it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._line = worker.line
        self._is_open = False

    # ---- in the rank

    def put(self, item: Any) -> None:
        self._worker.give(item)

    def cancel_join_thread(self) -> None:
        """A line does so itself."""

    def close(self) -> None:
        self._worker.close()

    def __getstate__(self) -> Any:
        return self._worker.line

    # ---- in the worker

    def __setstate__(self, line: Line) -> None:
        self._line, self._is_open = line, False

    def get(self, timeout: float | None = None) -> Any:
        if not self._is_open:
            self._begin()
        try:
            item = self._line.tasks.get(timeout=timeout)
        except EOFError:  # the rank has ended, or has dropped the iterator among other garbage
            self._line.results.cancel_join_thread()
            sys.exit()
        number = number_of(item)
        if number == NO_TASK:
            return item
        line, index = self._line, item[1]
        line.progress.begin(number)
        if not isinstance(getattr(torch_data.get_worker_info(), "dataset", None), torch_data.IterableDataset):
            line.index = index
        return (number, line.progress.counting(index)) if line.is_counted and type(index) is list else item

    def _begin(self) -> None:
        if hasattr(self, "_worker"):  # a forked process: this worker may be the second of its number
            self._line = self._worker.line
        self._line.keep_ends_of_worker()
        self._line.progress.note_crashes()
        self._is_open = True


def place_of(line: Line) -> str:
    """Return which samples a worker is at, to add to torch's words about an error in a worker."""
    index, num_begun = line.index, line.progress.num_begun
    if index is None:
        return ""
    if type(index) is list and num_begun not in (0, ALL_LOADED):
        return f", at sample {index[num_begun - 1]}"
    return f", {words_of_batch(index)}"
