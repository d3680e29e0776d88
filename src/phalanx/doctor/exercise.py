"""Runs an all_reduce with each engine, on ranks that the doctor starts: checks it once, then times it in a loop.

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
ITEM_BYTES = 4
_NUM_WARM_UP = 3
_LOOP_S, _BUDGET_S = 0.01, 0.2  # durations of one loop, and of all loops together
_LEAST_S = 1e-6  # least duration to divide by, because a coarse clock may show 0
_GLOO_S = 5.0
ABANDONED = "it waited for another host, which had failed"


def all_reduce(engine: str, store: Any, rank: int, world_size: int, timeout_s: float, device: str = "cpu") -> float:
    """Return the seconds that an all_reduce of `SIZE_BYTES` takes, in a process group created for it.

    Raises:
        ArithmeticError: The sum is wrong.
        Exception: torch or the engine has failed.
    """
    import torch
    import torch.distributed as dist

    def reduce(tensor: torch.Tensor, op: Any) -> None:
        dist.all_reduce(tensor, op)
        if device != "cpu":
            torch.cuda.synchronize()

    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(engine, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return _check_and_time(reduce, rank, world_size, device)
    finally:
        dist.destroy_process_group()


def all_reduce_by_gloo(store: Any, rank: int, world_size: int) -> float:
    """Return the seconds of an all_reduce over Gloo between hosts, in an unregistered group, which can be abandoned."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_GLOO_S))
    return _check_and_time(lambda tensor, op: group.allreduce([tensor], op).wait(), rank, world_size)


def _check_and_time(reduce: Callable[[Any, Any], object], rank: int, world_size: int, device: str = "cpu") -> float:
    import torch
    from torch.distributed import ReduceOp

    def most(number: float) -> float:
        told = torch.tensor([number], dtype=torch.float64, device=device)
        reduce(told, ReduceOp.MAX)
        return told.item()

    tensor = torch.full((SIZE_BYTES // ITEM_BYTES,), rank + 1.0, device=device)
    reduce(tensor, ReduceOp.SUM)
    want = world_size * (world_size + 1) / 2
    for wrong in tensor[tensor != want][:1].tolist():
        raise ArithmeticError(f"the sum over {world_size} ranks is {wrong:g}, and {want:g} is right")
    tensor.zero_()  # repeated sums of zeros stay finite
    return time_calls(lambda: reduce(tensor, ReduceOp.SUM), most)


def time_calls(call: Callable[[], object], most: Callable[[float], float]) -> float:
    """Return the seconds that a call takes in a tight loop; the result is the same on all ranks.

    The result is from the fastest of several loops, because other programs may have slowed the other loops down.

    Args:
        call: Function that runs a collective, once.
        most: Function that returns the maximum of a number over the ranks, so that all ranks run equally many loops.
    """
    fastest_s = most(_loop_s(call, _NUM_WARM_UP)) / _NUM_WARM_UP
    spent_s = 0.0
    while spent_s < _BUDGET_S:
        num = max(1, int(_LOOP_S / max(fastest_s, _LEAST_S)))
        took_s = most(_loop_s(call, num))
        fastest_s = min(fastest_s, took_s / num)
        spent_s += max(took_s, _LEAST_S)
    return fastest_s


def _loop_s(call: Callable[[], object], num: int) -> float:
    began_s = time.perf_counter()
    for _ in range(num):
        call()
    return time.perf_counter() - began_s


def answered(call: Callable[[], float], others_failed: Callable[[], bool]) -> dict[str, Any]:
    """Return ``{"seconds": result}`` of `call`, or ``{"error": text}`` if `call` failed, hung or was abandoned.

    Args:
        call: Function that returns a duration in seconds.
        others_failed: Function, called about every half second, that returns whether `call` can no longer succeed.
    """
    try:
        return {"seconds": within(2 * _GLOO_S, call, others_failed)}
    except UnansweredError as error:
        return {"error": ABANDONED if others_failed() else str(error)}
    except Exception as error:
        return {"error": brief_error(error)}


def run_ranks(engine: str, world_size: int, deadline_s: float) -> dict[str, Any]:
    """Time an engine's all_reduce on forked ranks; return ``{"seconds": number}`` or ``{"error": text}``.

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
    return (failed or results)[0]


def in_processes(fn: Callable[[int], dict[str, Any]], num: int, deadline_s: float) -> list[dict[str, Any]]:
    """Call ``fn(number)`` in each of `num` forked processes; return the results, ``{"error": text}`` for a failure."""
    from phalanx._text import signal_name
    from phalanx.launch.processes.descendants import die_with_parent

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
            os.kill(pid, signal.SIGKILL)  # the process is not reaped yet, so no other process can have its pid
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not result:
            died = signal_name(-code) if code < 0 else f"exit code {code}"
            result["error"] = f"a rank died: {died}"
    return results


def _attempt(fn: Callable[[int], dict[str, Any]], number: int) -> dict[str, Any]:
    try:
        return fn(number)
    except BaseException as error:
        return {"error": brief_error(error)}


def _read_result(pipe: int, ends_s: float, deadline_s: float) -> dict[str, Any]:
    """Return the result that a process wrote; empty if the process died before it wrote one."""
    try:
        if not select.select([pipe], [], [], max(0.0, ends_s - time.monotonic()))[0]:
            return {"error": f"no answer within {deadline_s:g} s", "hung": True}
        data = os.read(pipe, 1 << 16)
        return json.loads(data) if data else {}
    finally:
        os.close(pipe)


def brief_error(error: BaseException) -> str:
    """Return the class and message of an error in one line, without torch's C++ stack and source locations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\[/\S+:\d+\] ", "", lines[0]) if lines else ""
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
