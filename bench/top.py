"""``python -m bench.top``: what ``phalanx top`` costs the job that it watches, at one picture a second.

Two ranks with one thread each train the MLP 784-1024-10, and top shows them on a terminal of 80 x 24, all pinned to the
same two CPUs. Turns with top alternate with turns in which top is suspended, so that other load on the machine affects
both equally. The result compares the job's steps without and with top, as the median over the pairs of turns. Top's own
CPU time, which the job could have used, is reported, too.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from bench import record
from bench.report import machine_facts, verdict_line

_NUM_RANKS = 2
_MOST = 0.01
_START_S = 120.0
_SETTLING_S = 3.0


class _Job:
    """A job that trains, in a folder of its own.

    Attributes:
        pid: Process id of the job's launcher.
    """

    def __init__(self, folder: Path, cpus: set[int]) -> None:
        self._count = folder / "count"
        self._count.write_bytes(bytes(8))
        command = ["run", "--nproc-per-node", str(_NUM_RANKS), "--module", "bench.top_worker", "--count", self._count]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_LOG_DIR": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", *command],
            env=environ,
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        self.pid: int = self._process.pid
        deadline = time.monotonic() + _START_S
        while not self.num_steps:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the job does not train")
            time.sleep(0.1)

    @property
    def num_steps(self) -> int:
        """Number of steps that the job has made so far."""
        return int(struct.unpack("<Q", self._count.read_bytes())[0])

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


class _Top:
    """``phalanx top`` on a terminal of its own, suspended except during its turns."""

    def __init__(self, pid: int, interval_s: float, cpus: set[int]) -> None:
        self._terminal, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "top", str(pid), "--interval", str(interval_s)],
            stdin=theirs,
            stdout=theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        os.close(theirs)
        self._read_for(_SETTLING_S)
        self._process.send_signal(signal.SIGSTOP)

    @property
    def cpu_s(self) -> float:
        """CPU time that top's main thread, which does all of top's work, has used so far."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    def run_for(self, seconds: float) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._read_for(seconds)
        self._process.send_signal(signal.SIGSTOP)
        if self._process.poll() is not None:
            raise SystemExit("phalanx top has ended")

    def _read_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                with contextlib.suppress(OSError):  # EIO: top has ended
                    os.read(self._terminal, 65536)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


def measure(num_pairs: int, turn_s: float, interval_s: float) -> Iterator[tuple[float, float, float]]:
    """Yield, for each pair of turns, the steps per second without and with top, and top's share of a CPU."""
    cpus = set(sorted(os.sched_getaffinity(0))[:_NUM_RANKS])
    with contextlib.ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-bench-")))
        job = _Job(folder, cpus)
        ended.callback(job.end)
        top = _Top(job.pid, interval_s, cpus)
        ended.callback(top.end)

        def steps_per_s(with_top: bool) -> float:
            begun, first = time.perf_counter(), job.num_steps
            if with_top:
                top.run_for(turn_s)
            else:
                time.sleep(turn_s)
            return (job.num_steps - first) / (time.perf_counter() - begun)

        for number in range(num_pairs):
            spent = top.cpu_s
            speeds = {with_top: steps_per_s(with_top) for with_top in (number % 2 == 0, number % 2 == 1)}
            yield speeds[False], speeds[True], (top.cpu_s - spent) / turn_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of turns")
    parser.add_argument("--turn", type=float, default=4.0, metavar="SECONDS", help="length of a turn")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="of top's pictures")
    record.add_arguments(parser)
    args = parser.parse_args()
    pairs = list(measure(args.pairs, args.turn, args.interval))
    without, beside, share = (statistics.median(column) for column in zip(*pairs, strict=True))
    costs = [alone / watched - 1 for alone, watched, _ in pairs]
    cost = statistics.median(costs)
    low, _, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else (cost, cost, cost)
    error = (high - low) / len(costs) ** 0.5
    print(f"{without:.1f} steps/s without top, {beside:.1f} beside it (medians of {len(pairs)} turns)")
    rows = [
        ["a step without top", 1 / without, None], ["a step beside it", 1 / beside, None],
        ["what top costs the job", None, cost], ["top's own share of a CPU", None, share],
    ]  # fmt: skip
    table = record.Table("top", [("", "text"), ("median", "seconds"), ("share", "fraction")], rows)
    record.write(args.json, args.note, machine_facts(""), [table], {"pairs": pairs})
    print(f"top's own CPU time: {share:.2%} of a CPU")
    print(verdict_line(cost <= _MOST, f"top costs the job {cost:.2%} +- {error:.2%} (at most {_MOST:.0%})"))


if __name__ == "__main__":
    main()
