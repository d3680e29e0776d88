"""Answers scrapes with the metrics of jobs; in the launcher's process of ``phalanx run --metrics``, and for ``top``."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

import phalanx
from phalanx import _env
from phalanx.diagnose.metrics.families import Families
from phalanx.diagnose.metrics.totals import BOUNDS_S, Totals
from phalanx.diagnose.snapshots import Held, held_by
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.watch import JobView, Watch
from phalanx.diagnose.training import Training
from phalanx.failure.losses import load_losses
from phalanx.record.run_folder import num_attempts
from phalanx.train.report.metrics import numbers_of
from phalanx.wire.web_server import serve

_MOST_NAMES = 200  # of logged values; a script may log under any number of names
_MOST_CHARACTERS = 200  # of such a name


class JobMetrics:
    """The metrics of one job, whose counters go on as long as this object lives.

    Args:
        name: Value of the label ``job``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._totals: dict[int, Totals] = {}
        self._training = Training()
        self._logged: dict[str, float] = {}
        self._saved: tuple[int, float] | None = None  # step of the newest checkpoint, and its time
        self._snapshot: tuple[int, int] | None = None  # attempt and step of the newest snapshot
        self._snapshot_s = 0.0  # when that snapshot was first seen, by the monotonic clock

    def add(self, job: JobView, watch: Watch, found: Families) -> None:
        """Add what a look has seen of the job."""
        place = (self.name, _env.host_name())
        about = {"launcher": job.launcher, "folder": job.folder, "version": phalanx.__version__}
        found.add("phalanx_job", place, about)
        found.add("phalanx_job_ranks", place, job.world_size or None)
        for rank in job.ranks:
            if (news := watch.news_of(rank.pid)) is not None:
                self._totals.setdefault(rank.rank, Totals()).add(news)
            _add_rank(rank, place, found)
        self._add_totals(job.ranks, place, found)
        self._add_logged([rank.pid for rank in job.ranks[:1]], place, found)
        if job.folder:
            _add_losses(job.folder, place, found)
        self._add_snapshots(held_by(job.launcher_pid), place, found)

    def _add_totals(self, ranks: Sequence[RankView], place: tuple[str, str], found: Families) -> None:
        for number, totals in self._totals.items():
            rank = (*place, str(number))
            found.add("phalanx_steps", rank, round(totals.num_steps))
            found.add("phalanx_last_step_timestamp_seconds", rank, _time_of(totals.step_ended_ns / 1e9))
            found.add("phalanx_waiting_seconds", rank, totals.wait_s)
            found.add("phalanx_record_events", rank, totals.num_events)
            found.add("phalanx_record_events_read", rank, totals.num_read)
            for op, num_bytes in totals.num_bytes.items():
                found.add("phalanx_collective_bytes", (*rank, op), num_bytes)
            for phase, seconds in totals.phases_s.items():
                found.add("phalanx_phase_seconds", (*rank, phase), seconds)
        every = self._totals.values()
        if every:
            found.add("phalanx_samples", place, self._totals[min(self._totals)].num_samples)
        for op in dict.fromkeys(op for totals in every for op in totals.seconds):
            counts = [round(sum(one.durations[op, index] for one in every)) for index in range(len(BOUNDS_S) + 1)]
            seconds = sum(totals.seconds[op] for totals in every)
            found.add_histogram("phalanx_collective_duration_seconds", (*place, op), BOUNDS_S, counts, seconds)
        found.add("phalanx_steps_planned", place, next((rank.num_steps for rank in ranks if rank.num_steps), None))

    def _add_logged(self, pids: Iterable[int], place: tuple[str, str], found: Families) -> None:
        for record in self._training.look(pids):
            for name, value in numbers_of(record["kind"], record).items():
                if name in self._logged or len(self._logged) < _MOST_NAMES:
                    self._logged[name] = value
            if record["kind"] == "save":
                self._saved = (record["step"], record["time"])
        for name, value in self._logged.items():
            found.add("phalanx_logged_value", (*place, name[:_MOST_CHARACTERS]), value)
        if self._saved is not None:
            found.add("phalanx_checkpoint_step", place, self._saved[0])
            found.add("phalanx_checkpoint_timestamp_seconds", place, self._saved[1])

    def _add_snapshots(self, held: Held, place: tuple[str, str], found: Families) -> None:
        if (newest := held.newest) is not None:
            if self._snapshot != (newest.attempt, newest.step):
                self._snapshot, self._snapshot_s = (newest.attempt, newest.step), time.monotonic()
            found.add("phalanx_snapshot_step", place, newest.step)
            found.add("phalanx_snapshot_timestamp_seconds", place, _time_of(self._snapshot_s))
            found.add("phalanx_snapshot_size_bytes", place, newest.size_bytes)
        if held.num_wanted:
            found.add("phalanx_replicas_wanted", place, held.num_wanted)
            found.add("phalanx_replicas", place, held.copied.num_replicas if held.copied is not None else 0)
            found.add("phalanx_replicated_step", place, held.copied.step if held.copied is not None else None)


def _add_rank(rank: RankView, place: tuple[str, str], found: Families) -> None:
    labels = (*place, str(rank.rank))
    found.add("phalanx_rank_up", labels, int(rank.state != "gone"))
    found.add("phalanx_rank_state_seconds", (*labels, rank.state), rank.since_s or 0.0)
    found.add("phalanx_step", labels, rank.step)
    found.add("phalanx_straggler_cost_ratio", labels, rank.cost)
    found.add("phalanx_rank_cpus", labels, None if rank.cpu_percent is None else rank.cpu_percent / 100)
    found.add("phalanx_rank_resident_memory_bytes", labels, rank.rss_bytes)
    for gpu in rank.gpus:
        found.add("phalanx_rank_gpu_memory_bytes", (*labels, str(gpu.index)), gpu.used_bytes)


def _add_losses(folder: str, place: tuple[str, str], found: Families) -> None:
    losses = load_losses(Path(folder))
    found.add("phalanx_restarts", place, max(0, num_attempts(folder) - 1))
    found.add("phalanx_losses", place, len(losses))
    for phase in dict.fromkeys(phase for loss in losses for phase in loss.phases_s):
        seconds = math.fsum(loss.phases_s.get(phase, 0.0) for loss in losses)
        found.add("phalanx_recovery_seconds", (*place, phase), seconds)


def _time_of(monotonic_s: float) -> float | None:
    """Return a time of day that is as long ago as `monotonic_s`, even if the clock has been set since; None for 0."""
    return time.time() - (time.monotonic() - monotonic_s) if monotonic_s else None


class Jobs(Collector):
    """The metrics of all jobs of a watch, gathered when they are asked for.

    Args:
        watch: Source of the numbers; it must count.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()  # two scrapes may come at the same time
        self._jobs: dict[tuple[str, int], JobMetrics] = {}

    def describe(self) -> Iterator[Any]:
        return iter(())  # otherwise the registry would gather all metrics just to learn their names

    def collect(self) -> Iterator[Any]:
        with self._lock:
            views = {(job.name, job.launcher_pid or job.ranks[0].pid): job for job in self._watch.look()}
            for gone in self._jobs.keys() - views.keys():
                del self._jobs[gone]
            found = Families()
            for key, view in views.items():
                if key not in self._jobs:
                    self._jobs[key] = JobMetrics(self._name(*key))
                self._jobs[key].add(view, self._watch, found)
        return iter(found)

    def compare(self) -> None:
        """Find stragglers, for the next scrape: that takes longer than all else in a scrape."""
        with self._lock:
            self._watch.compare()

    def _name(self, name: str, pid: int) -> str:
        """Return a name that no other job has: two jobs may run the same script."""
        return f"{name} ({pid})" if name in {job.name for job in self._jobs.values()} else name


class _Answer:
    """The parts of an answer; the server calls `close` after it has sent them."""

    def __init__(self, parts: Iterable[bytes], close: Callable[[], None]) -> None:
        self._parts, self.close = parts, close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)


def serve_metrics(watch: Watch, listener: socket.socket) -> None:
    """Answer scrapes at ``/metrics`` until this process ends."""
    registry, jobs = CollectorRegistry(), Jobs(watch)
    registry.register(jobs)
    answer = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics" or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"The metrics are at /metrics.\n"]
        return _Answer(answer(environ, start), jobs.compare)

    serve(app, listener, num_threads=2)


def main() -> None:
    """Serve the metrics of a launcher's job, on the socket and for the pid that the command line names."""
    fd, pid = sys.argv[1:3]
    serve_metrics(Watch(pid, 1.0, counts=True), socket.socket(fileno=int(fd)))
