"""One rank: ``python -m bench.worker KIND SOCKET RANK WORLD_SIZE INIT_METHOD``. It sleeps until it must measure.

KIND is "torch", "calls", "mpi", or a list of engines to measure through torch.distributed, such as "gloo,phalanx".

The parent sends commands as lines of JSON over a socket, so a rank that waits for its turn uses no CPU. The rank ends
when the socket is closed, even if the parent was killed.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import time
from datetime import timedelta
from itertools import repeat

import torch
import torch.distributed as dist

from bench import plan
from bench.engines import (
    Buffers,
    CoreEngine,
    DirectEngine,
    Engine,
    FrontEndEngine,
    MemcpyEngine,
    MpiEngine,
    Run,
    TorchEngine,
)

_TIMEOUT = timedelta(seconds=300)
_WARM_SHARE = 8  # before a measurement, an eighth of its iterations runs as a warm-up


def torch_engines(kind: str, rank: int, world_size: int, init_method: str) -> dict[str, Engine]:
    """Return all engines that share one set of processes; their groups all exist at the same time."""
    dist.init_process_group("cpu:gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    if kind == "calls":
        phalanx = dist.new_group(backend="phalanx", timeout=_TIMEOUT)
        return {"phalanx": TorchEngine(phalanx), "front_end": FrontEndEngine(phalanx), "direct": DirectEngine(phalanx)}
    if kind != "torch":
        others = {name: dist.new_group(backend=name, timeout=_TIMEOUT) for name in kind.split(",") if name != "gloo"}
        return {name: TorchEngine(group) for name, group in {"gloo": dist.group.WORLD, **others}.items()}
    phalanx = dist.new_group(backend="phalanx", timeout=_TIMEOUT)
    through_torch = TorchEngine(phalanx)
    return {
        "phalanx": through_torch,
        "phalanx_no_recorder": through_torch,
        "gloo": TorchEngine(dist.group.WORLD),
        "core": CoreEngine(phalanx),
        "core_unchecked": CoreEngine(phalanx, compares_calls=False),
        "memcpy": MemcpyEngine(phalanx),
    }


class Worker:
    """Prepares one point at a time and measures the engines on it."""

    def __init__(self, engines: dict[str, Engine], rank: int, world_size: int) -> None:
        self._engines, self._rank, self._world_size = engines, rank, world_size
        self._runs: dict[str, Run] = {}
        self._op = ""
        self._buffers: Buffers | None = None

    def prepare(self, op: str, size_bytes: int) -> None:
        """Drop the buffers of the previous point, and make the buffers of this point."""
        self._runs.clear()
        self._buffers = None
        self._op = "all_reduce" if op == plan.CALL_CHECK else op
        self._buffers = Buffers(self._op, size_bytes, self._rank, self._world_size)

    def measure(self, engine: str, iterations: int) -> float:
        """Return the seconds that one operation takes on this rank."""
        runner = self._engines[engine]
        run = self._runs.get(engine)
        if run is None:
            run = self._runs[engine] = self._first(engine)
        for _ in repeat(None, iterations // _WARM_SHARE):
            run()
        runner.barrier()
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            run()
        elapsed = time.perf_counter() - start
        runner.finish()
        ways = 2 if self._op == "send_recv" else 1  # a message is sent to the peer and back
        return elapsed / iterations / ways

    def _first(self, engine: str) -> Run:
        """Run an engine once, before it is timed, and check its result."""
        run = self._engines[engine].operation(self._op, self._buffers)
        self._buffers.fill()
        run()
        if engine not in ("memcpy", "front_end"):  # these two engines have no result
            self._buffers.check(engine)
        return run


def main() -> None:
    kind, socket_path, rank_text, size_text, init_method = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == "mpi":
        from mpi4py import MPI

        rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        engines: dict[str, Engine] = {"mpi": MpiEngine()}
    else:
        rank, world_size = int(rank_text), int(size_text)
        engines = torch_engines(kind, rank, world_size, init_method)
    worker = Worker(engines, rank, world_size)
    gc.collect()
    gc.disable()
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as lines:
        connection.connect(socket_path)

        def answer(**facts: object) -> None:
            lines.write(json.dumps(facts) + "\n")
            lines.flush()

        answer(rank=rank)
        for line in lines:
            command, *args = json.loads(line)
            answer(value=getattr(worker, command)(*args))
    if kind != "mpi":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
