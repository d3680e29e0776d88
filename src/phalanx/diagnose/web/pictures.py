"""What the page shows: jobs that are looked at once, and then while anybody watches, and the curves of their trainings.

A look costs as much as one of `top`, however many pages are open. With many ranks, looks are rarer, so that they take
3 % of a CPU. Everything kept is bounded, so a page that stays open for a day does not grow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from phalanx.diagnose.snapshots import Held, held_by
from phalanx.diagnose.top.watch import JobView, Watch
from phalanx.diagnose.training import Training
from phalanx.train.report.metrics import Record, numbers_of, resumed_at
from phalanx.train.report.plots import Point

_CLOSE_S = 2.0
_STALE_S = 10.0  # a page that is opened shows a look that is at most this old
_LONGEST_S = 5.0  # pause between two looks, also after the first one, which takes longer than the others
_SHARE = 0.03  # largest share of a CPU that the looks may take
_MOST_POINTS = 2000
_MOST_CURVES = 40
_MOST_ENDED = 20  # jobs that have ended and are still shown
_READ_BYTES = 16 << 20  # of the metrics that earlier steps have left


class Curve:
    """The values of one name over steps, with at most `_MOST_POINTS` points."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, step: int, value: float) -> None:
        """Add a value; points of steps that are repeated are dropped."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self.points.append((step, value))
        if len(self.points) > _MOST_POINTS:
            self.points = [
                point for at in range(0, len(self.points), 4) for point in _extremes(self.points[at : at + 4])
            ]


def _extremes(points: list[Point]) -> list[Point]:
    """Return the lowest and the highest of some points, in their order, so that no spike is lost."""
    return sorted({min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])})


class Seen:
    """A job, as it was seen last, and the story of its training.

    Attributes:
        key: Text that names the job in addresses.
        view: View of the job in the last look.
        has_ended: Whether the job has ended, as far as the last look tells.
        curves: Curves by the names of the values.
        marks: Texts about the steps from which later attempts resumed.
        phases: Last record of a training step that has the time of each phase by rank.
        saves: Last record of a checkpoint on disk.
        held: Snapshots in the launcher's memory.
        curves_drawn: HTML of the curves, and the time at which it was drawn.
    """

    def __init__(self, key: str, view: JobView) -> None:
        self.key, self.view = key, view
        self.has_ended = False
        self.curves: defaultdict[str, Curve] = defaultdict(Curve)
        self.marks: dict[int, str] = {}
        self.phases: Record = {}
        self.saves: Record = {}
        self.held = Held()
        self.curves_drawn: tuple[str, float] = ("", 0.0)
        self._training = Training(_READ_BYTES)

    @property
    def trainer_folder(self) -> str:
        """Folder of the job's Trainer; empty if it has none."""
        return self._training.folder

    @property
    def is_behind(self) -> bool:
        """Whether there are more records to read."""
        return self._training.is_behind

    def look(self, view: JobView) -> None:
        """Take in what a look has seen."""
        self.view = view
        self.has_ended = not view.state and all(rank.state == "gone" for rank in view.ranks)
        if not self.has_ended:
            self.held = held_by(view.launcher_pid)

    def end(self) -> None:
        """Note that a look did not find the job."""
        self.has_ended = True
        gone = [dataclasses.replace(rank, state="gone", since_s=None) for rank in self.view.ranks]
        self.view = dataclasses.replace(self.view, ranks=gone)

    def records(self) -> list[Record]:
        """Read and return new records of the training."""
        return self._training.look(rank.pid for rank in self.view.ranks[:1])

    def add(self, record: Record) -> None:
        """Add a record of the training."""
        if record["kind"] == "start" and record["attempt"]:
            self.marks[resumed_at(record)] = f"attempt {record['attempt']} resumes here"
        for name, value in numbers_of(record["kind"], record).items():
            if name in self.curves or len(self.curves) < _MOST_CURVES:
                self.curves[name].add(record["step"], value)
        if record.get("phases_by_rank") and record.get("phases_s"):
            self.phases = record
        if record["kind"] == "save":
            self.saves = record


class Pictures:
    """The jobs of a watch, looked at again and again while anybody listens.

    Args:
        watch: Source of what is seen.
        interval_s: Shortest time between two looks.

    Attributes:
        lock: Lock to hold while `jobs` is read.
        jobs: Jobs by key, newest last; jobs that have ended stay for a while.
        number: Number of looks so far.
    """

    def __init__(self, watch: Watch, interval_s: float) -> None:
        self._watch, self._interval_s = watch, interval_s
        self.lock = threading.Condition()
        self.jobs: dict[str, Seen] = {}
        self.number = 0
        self._num_listeners = 0
        self._is_closed = self._is_wanted = False
        self._looked_s = -math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def listened(self) -> Iterator[None]:
        """Have the jobs looked at again and again in the body."""
        with self.lock:
            self._num_listeners += 1
            self.lock.notify_all()
        try:
            yield
        finally:
            with self.lock:
                self._num_listeners -= 1

    def after(self, number: int, timeout_s: float) -> int | None:
        """Wait for a look after that number; return the number of the newest look, None once this object is closed."""
        with self.lock:
            self.lock.wait_for(lambda: self.number > number or self._is_closed, timeout_s)
            return None if self._is_closed else self.number

    def await_fresh(self, timeout_s: float) -> None:
        """Wait for a look, unless there was one lately."""
        with self.lock:
            oldest_s = time.monotonic() - _STALE_S
            self._is_wanted = self._looked_s < oldest_s
            self.lock.notify_all()
            self.lock.wait_for(lambda: self._looked_s >= oldest_s or self._is_closed, timeout_s)

    def close(self) -> None:
        """End the thread and all waits. Idempotent."""
        with self.lock:
            self._is_closed = True
            self.lock.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._num_listeners or not self.number or self._is_closed)
                self._is_wanted = False
            if self._is_closed:
                return
            began_s = time.thread_time()
            views = self._watch.look()
            took_s = time.thread_time() - began_s
            with self.lock:
                self._take(views)
            self._read_on()
            self._publish()
            if any(job.is_behind for job in self.jobs.values()):
                while any(job.is_behind for job in self.jobs.values()) and not self._is_closed:
                    self._read_on()
                self._publish()
            with self.lock:
                pause_s = max(self._interval_s, min(took_s / _SHARE, _LONGEST_S))
                self.lock.wait_for(lambda: self._is_closed or self._is_wanted, pause_s)

    def _publish(self) -> None:
        with self.lock:
            self.number, self._looked_s = self.number + 1, time.monotonic()
            self.lock.notify_all()

    def _read_on(self) -> None:
        """Read a part of the new records of each job; pages are drawn meanwhile."""
        for job in self.jobs.values():
            records = job.records()
            with self.lock:
                for record in records:
                    job.add(record)

    def _take(self, views: list[JobView]) -> None:
        found = {str(view.launcher_pid or view.ranks[0].pid): view for view in views}
        for key, view in found.items():
            if key not in self.jobs or self.jobs[key].view.folder != view.folder:
                self.jobs[key] = Seen(key, view)
            self.jobs[key].look(view)
        for key in self.jobs.keys() - found.keys():
            self.jobs[key].end()
        ended = [key for key, job in self.jobs.items() if job.has_ended]
        for key in ended[:-_MOST_ENDED]:
            del self.jobs[key]
