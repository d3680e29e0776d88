"""Jobs whose ranks do what a test tells them, one order after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from phalanx.diagnose.jobs import Rank, find_job

LIMIT_S = 180  # the start of a job where others want several times the CPUs
SCRIPT = """
import os, select, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from phalanx.record import writer

left, loading = [], []

def next_order():
    while not left:
        left.extend(os.read(orders, 4096).decode().splitlines())
    return left.pop(0).split(maxsplit=1)

def obey(order):
    what, *rest = order
    if what == "phase":
        with writer.phase(rest[0]):
            obey(next_order())
    elif what == "steps":
        for step in range(1, int(rest[0]) + 1):
            event = writer.begin_step(step, 32)
            time.sleep(0.01)
            writer.end(event)
    elif what == "compute":
        while not select.select([orders], [], [], 0)[0]:
            pass
    elif what == "reduce":
        dist.all_reduce(torch.ones(5))  # the line
    elif what == "group":
        dist.destroy_process_group()
        dist.init_process_group(rest[0])
    elif what == "load":
        loading.append(iter(DataLoader(range(9), num_workers=1)))
        next(loading[0])
    elif what == "end":
        sys.exit()

dist.init_process_group(sys.argv[1])
with open(f"pid_{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
orders = os.open(f"orders_{os.environ['RANK']}", os.O_RDONLY)
while True:
    obey(next_order())
"""
LINE = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# the line" in line)
LAUNCHERS = {
    "phalanx run": ["-m", "phalanx", "run"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


class Puppets:
    """A job that has begun; it is ended with the block.

    Attributes:
        pid: Its launcher's.
    """

    def __init__(
        self, folder: Path, launcher: str = "phalanx run", backend: str = "phalanx", num_ranks: int = 2
    ) -> None:
        (folder / "puppet.py").write_text(SCRIPT)
        self._fds = []
        for rank in range(num_ranks):
            os.mkfifo(folder / f"orders_{rank}")
            self._fds.append(os.open(folder / f"orders_{rank}", os.O_RDWR))
        command = [sys.executable, *LAUNCHERS[launcher], "--nproc-per-node", str(num_ranks), "puppet.py", backend]
        self._job = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.pid: int = self._job.pid

    def wait_for_ranks(self) -> tuple[Rank, ...]:
        """Return its ranks, once both wait for orders."""

        def ranks() -> tuple[Rank, ...]:
            with contextlib.suppress(LookupError):
                job = find_job(str(self.pid))
                self.pid = job.launcher_pid  # of a warm start, another process than the one that was started
                return job.ranks
            return ()

        return until(ranks, lambda found: len([rank for rank in found if is_ready(rank)]) == len(self._fds))

    def order(self, rank: int, words: str) -> None:
        os.write(self._fds[rank], f"{words}\n".encode())

    def end(self) -> None:
        """End the job as its user would."""
        for rank in range(len(self._fds)):
            self.order(rank, "end")
        self._job.wait(LIMIT_S)

    def __enter__(self) -> Puppets:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._job.send_signal(signal.SIGTERM)
        self._job.wait(LIMIT_S)
        for fd in self._fds:
            os.close(fd)


def is_ready(rank: Rank) -> bool:
    """Whether a rank has opened its orders."""
    with contextlib.suppress(OSError):
        links = [os.readlink(f"/proc/{rank.pid}/fd/{number}") for number in os.listdir(f"/proc/{rank.pid}/fd")]
        return any(link.endswith(f"orders_{rank.rank}") for link in links)
    return False


def until(look, is_wanted):
    """Look until what is seen is what is wanted, and return it."""
    deadline = time.monotonic() + LIMIT_S
    while not is_wanted(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    return seen
