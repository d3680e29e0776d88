"""An all_reduce with each engine, on ranks of the doctor's own: run a few times, check the result, take the time.

The ranks are processes that are killed at a deadline, because an engine that hangs is a finding.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx.doctor.deadline import UnansweredError, within

SIZE_BYTES = 1 << 20
_NUM_WARM_UP, _NUM_TIMED = 3, 15
_NUM_TIMED_BETWEEN_HOSTS = 5
_ITEM_BYTES = 4
_GLOO_S = 5.0
ABANDONED = "it waited for another host, which had failed"

# For mpirun. Only mpi4py, so that a broken torch does not hide a working MPI.
MPI_PROGRAM = f"""
import array, json, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
given, got = (array.array("f", [x]) * {SIZE_BYTES // _ITEM_BYTES} for x in (comm.rank + 1.0, 0.0))
times = []
for _ in range({_NUM_WARM_UP + _NUM_TIMED}):
    comm.Barrier()
    began = time.perf_counter()
    comm.Allreduce(given, got)
    times.append(time.perf_counter() - began)
right = comm.size * (comm.size + 1) / 2
is_right = got[0] == got[-1] == right
if comm.rank == 0:
    library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
    timed = sorted(times[{_NUM_WARM_UP}:])
    told = dict(size=comm.size, is_right=is_right, seconds=timed[len(timed) // 2], library=library)
    print("doctor:" + json.dumps(told))
"""


def all_reduce(engine: str, store: Any, rank: int, world_size: int, timeout_s: float, device: str = "cpu") -> float:
    """Return the median time in seconds of an all_reduce of `SIZE_BYTES`, in a process group created for it.

    Raises:
        ArithmeticError: The sum is wrong.
        Exception: torch or the engine has failed.
    """
    import torch
    import torch.distributed as dist

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        if device != "cpu":
            torch.cuda.synchronize()

    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(engine, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return _time(reduce, rank, world_size, _NUM_TIMED, device)
    finally:
        dist.destroy_process_group()


def all_reduce_by_gloo(store: Any, rank: int, world_size: int) -> float:
    """Return the same for Gloo between hosts, with a group that is registered nowhere, so that it can be abandoned."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_GLOO_S))
    return _time(lambda tensor: group.allreduce([tensor]).wait(), rank, world_size, _NUM_TIMED_BETWEEN_HOSTS)


def _time(reduce: Callable[[Any], object], rank: int, world_size: int, num_timed: int, device: str = "cpu") -> float:
    import torch

    tensor = torch.empty(SIZE_BYTES // _ITEM_BYTES, device=device)
    together = torch.zeros(1, device=device)
    want = world_size * (world_size + 1) / 2
    times = []
    for _ in range(_NUM_WARM_UP + num_timed):
        tensor.fill_(rank + 1.0)
        reduce(together)  # so that all begin at once, and waiting for another rank's check is not counted
        began_s = time.perf_counter()
        reduce(tensor)
        times.append(time.perf_counter() - began_s)
        if not bool((tensor == want).all()):
            raise ArithmeticError(f"the sum over {world_size} ranks is {tensor[0].item():g}, and {want:g} is right")
    return sorted(times[_NUM_WARM_UP:])[num_timed // 2]


def answered(call: Callable[[], float], others_failed: Callable[[], bool]) -> dict[str, Any]:
    """Return ``{"seconds": ...}`` of `call`, or ``{"error": text}`` if it failed, hung or was abandoned.

    Args:
        call: Function that returns a duration in seconds.
        others_failed: Function, called now and then, that says whether `call` can no longer succeed.
    """
    try:
        return {"seconds": within(2 * _GLOO_S, call, others_failed)}
    except UnansweredError as error:
        return {"error": ABANDONED if others_failed() else str(error)}
    except Exception as error:
        return {"error": one_line(error)}


def run_ranks(engine: str, world_size: int, deadline_s: float) -> dict[str, Any]:
    """Return ``{"seconds": median}`` of an engine on ranks forked from this process, or ``{"error": text}``.

    Args:
        engine: Backend for ``init_process_group``.
        world_size: Number of ranks.
        deadline_s: Seconds after which ranks that are still running are killed.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as folder:

        def rank_main(rank: int) -> dict[str, Any]:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            device = "cpu"
            if engine == "nccl":
                torch.cuda.set_device(rank)
                device = f"cuda:{rank}"
            store = dist.FileStore(os.path.join(folder, "store"), world_size)
            return {"seconds": all_reduce(engine, store, rank, world_size, deadline_s, device)}

        results = in_processes(rank_main, world_size, deadline_s)
    failed = [result for result in results if "error" in result]
    return failed[0] if failed else {"seconds": max(result["seconds"] for result in results)}


def in_processes(fn: Callable[[int], dict[str, Any]], num: int, deadline_s: float) -> list[dict[str, Any]]:
    """Return the result of ``fn(number)`` in each of `num` forked processes, or ``{"error": text}``."""
    from phalanx.launch.outcome import signal_name
    from phalanx.launch.warden import die_with_parent

    ends_s, parent = time.monotonic() + deadline_s, os.getpid()
    pids, pipes = [], []
    for number in range(num):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                os.write(theirs, json.dumps(_attempt(fn, number)).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        pids.append(pid)
        pipes.append(ours)
    results = [_read_result(pipe, ends_s, deadline_s) for pipe in pipes]
    for pid, result in zip(pids, results, strict=True):
        if result.get("hung"):
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not result:
            died = signal_name(-code) if code < 0 else f"exit code {code}"
            result["error"] = f"a rank died: {died}"
    return results


def _attempt(fn: Callable[[int], dict[str, Any]], number: int) -> dict[str, Any]:
    try:
        return fn(number)
    except BaseException as error:
        return {"error": one_line(error)}


def _read_result(pipe: int, ends_s: float, deadline_s: float) -> dict[str, Any]:
    """Return the result that a process wrote; empty if it died first."""
    try:
        if not select.select([pipe], [], [], max(0.0, ends_s - time.monotonic()))[0]:
            return {"error": f"no answer within {deadline_s:g} s", "hung": True}
        data = os.read(pipe, 1 << 16)
        return json.loads(data) if data else {}
    finally:
        os.close(pipe)


def one_line(error: BaseException) -> str:
    """Return the class and message of an error in one line, without torch's C++ stack and source locations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\[/\S+:\d+\] ", "", lines[0]) if lines else ""
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
