"""The parent's side: sets of ranks, each of which measures when it is its turn."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from bench.plan import usable_cpus

ROOT = Path(__file__).parent.parent
_START_S = 120.0
_ANSWER_S = 300.0
_END_S = 15.0


def _environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # most containers run as root
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | mpi | extra


def mpirun_command(world_size: int) -> list[str]:
    """Return the best mpirun command for Open MPI: ranks are pinned and spin or, if they share cores, yield."""
    command = ["mpirun", "-n", str(world_size)]
    if world_size <= usable_cpus():
        return [*command, "--bind-to", "core"]
    return [*command, "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]


def find_mpi() -> tuple[str, str]:
    """Return Open MPI's version and "", or "" and the reason why Open MPI can't be measured."""
    if shutil.which("mpirun") is None:
        return "", "mpirun is not installed (Debian: apt-get install openmpi-bin)"
    show = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])"
    try:
        found = subprocess.run(
            [*mpirun_command(1), sys.executable, "-c", show],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return "", "mpirun does not start a process within 60 s"
    if found.returncode != 0:
        return "", f"mpirun with mpi4py fails: {(found.stderr.strip().splitlines() or ['no message'])[-1]}"
    return found.stdout.strip(), ""


class RankSet:
    """`world_size` processes of one kind (see `bench.worker`), which sleep until `measure` is called."""

    def __init__(self, kind: str, world_size: int, **environment: str) -> None:
        self.kind, self._world_size = kind, world_size
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen] = []
        self._lines: list = []  # connections to the ranks, in rank order
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            # The ranks meet in the folder. It is removed once they have met, so that nothing is left on disk if they
            # are killed.
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
                self._start(folder, environment)
            on_failure.pop_all()

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, folder: str, environment: dict[str, str]) -> None:
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{folder}/parent")
        listener.listen(self._world_size)
        self._launch(folder, _environment(**environment))
        self._meet(listener)

    def _launch(self, folder: str, environment: dict[str, str]) -> None:
        """Start the processes; they connect to the socket ``folder/parent``."""
        command = [sys.executable, "-m", "bench.worker", self.kind, f"{folder}/parent"]
        tail = [str(self._world_size), f"file://{folder}/meeting"]
        if self.kind == "mpi":
            commands = [[*mpirun_command(self._world_size), *command, "-", *tail]]
        else:
            commands = [[*command, str(rank), *tail] for rank in range(self._world_size)]
        for each in commands:
            self._processes.append(subprocess.Popen(each, env=environment, stdin=subprocess.DEVNULL))

    def _meet(self, listener: socket.socket) -> None:
        """Wait until every rank has connected; raise an error if a rank ends before that."""
        by_rank = {}
        deadline = time.monotonic() + _START_S
        while len(by_rank) < self._world_size:
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"a {self.kind} rank ended while it started; see its message above")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(by_rank)} of {self._world_size} {self.kind} ranks started in {_START_S} s")
            if not select.select([listener], [], [], 0.5)[0]:
                continue
            connection = self._stack.enter_context(listener.accept()[0])
            connection.settimeout(_ANSWER_S)
            lines = self._stack.enter_context(connection.makefile("rw"))
            by_rank[json.loads(lines.readline())["rank"]] = lines
        self._lines = [by_rank[rank] for rank in range(self._world_size)]

    def _ask(self, *command: object) -> list:
        """Make all ranks run `command` at the same time; return their answers in rank order."""
        try:
            for lines in self._lines:
                lines.write(json.dumps(command) + "\n")
                lines.flush()
            answers = [lines.readline() for lines in self._lines]
        except ConnectionError:
            answers = [""]
        if not all(answers):
            raise RuntimeError(f"a {self.kind} rank ended during {command}; see its message above")
        return [json.loads(answer)["value"] for answer in answers]

    def prepare(self, op: str, size_bytes: int) -> None:
        self._ask("prepare", op, size_bytes)

    def measure(self, engine: str, iterations: int) -> float:
        """Return the seconds of one operation on the slowest rank."""
        return max(self._ask("measure", engine, iterations))

    def close(self) -> None:
        """End the ranks: each ends when its socket is closed; a rank that does not end in time is killed."""
        with suppress(BrokenPipeError):  # raised by the socket of a rank that has died
            self._stack.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
