"""The GPUs that a process uses, from nvidia-smi, which runs in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Sequence

from phalanx.wire.waiting import wait_until

_EVERY_S = 5.0
_LIMIT_S = 20.0
_CARDS = ("--query-gpu=uuid,index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_PROCESSES = ("--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that a process uses.

    Attributes:
        busy_percent: Share of the time in which the GPU ran a kernel of any process; None if it is not known.
        used_bytes: Memory of the GPU that the process uses; None if it is not known.
    """

    index: int
    busy_percent: float | None
    used_bytes: int | None


class Gpus:
    """The GPUs of each process in the last output of nvidia-smi; none if nvidia-smi is not installed."""

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._asked: tuple[subprocess.Popen[str], ...] = ()
        self._asked_at = 0.0
        self._of: dict[int, tuple[Gpu, ...]] = {}

    def of(self, pid: int) -> tuple[Gpu, ...]:
        return self._of.get(pid, ())

    def look(self, wait_s: float = 0.0) -> None:
        """Read finished output, and start nvidia-smi again every few seconds.

        Args:
            wait_s: Seconds to wait for the output.
        """
        if self._program is None:
            return
        now = time.monotonic()
        if not self._asked and now - self._asked_at >= _EVERY_S:
            self._asked_at = now
            self._asked = tuple(self._ask(query) for query in (_CARDS, _PROCESSES))
        have_ended = wait_until(
            lambda: all(asked.poll() is not None for asked in self._asked) or None, time.monotonic() + wait_s
        )
        if self._asked and have_ended:
            cards, processes = (asked.communicate()[0] for asked in self._asked)
            self._asked, self._of = (), gpus_by_process(cards, processes)
        elif self._asked and now - self._asked_at > _LIMIT_S:  # the driver seems to hang
            self.close()
            self._program = None

    def close(self) -> None:
        for asked in self._asked:
            asked.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # nvidia-smi may hang in the kernel
                asked.communicate(timeout=0.5)
        self._asked = ()

    def _ask(self, query: Sequence[str]) -> subprocess.Popen[str]:
        assert self._program is not None
        return subprocess.Popen(
            [self._program, *query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def gpus_by_process(cards: str, processes: str) -> dict[int, tuple[Gpu, ...]]:
    """Return the GPUs of each process from nvidia-smi's two tables; other lines are skipped."""
    known = {row[0]: row for row in _rows(cards, 4)}
    found: dict[int, tuple[Gpu, ...]] = {}
    for pid, uuid, used in _rows(processes, 3):
        if pid.isdecimal() and uuid in known and known[uuid][1].isdecimal():
            _, index, busy, _ = known[uuid]
            gpu = Gpu(int(index), _number(busy), None if (mib := _number(used)) is None else int(mib) << 20)
            found[int(pid)] = (*found.get(int(pid), ()), gpu)
    return found


def _rows(text: str, num_fields: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == num_fields]


def _number(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
