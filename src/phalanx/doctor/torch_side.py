"""The process that imports torch: reports versions, tries the engines on two local ranks, and meets the other hosts.

It sends one packet per result, so earlier results are not lost if it crashes or is killed. Nothing here may start a
thread before the last fork.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import time
from typing import Any

import phalanx
from phalanx._torch import replace
from phalanx.doctor.exercise import brief_error, in_processes, run_ranks
from phalanx.launch.processes.descendants import die_with_parent
from phalanx.wire.packets import PacketSocket

NUM_RANKS = 2
_GPU_DEADLINE_S = 15.0  # long, because the driver may have to be loaded


def main() -> None:
    """Run the process; its arguments are the number of the socket's descriptor, and the settings as JSON."""
    packets = PacketSocket(socket.socket(fileno=int(sys.argv[1])))
    settings = json.loads(sys.argv[2])
    die_with_parent(settings["parent"])
    began_s = time.monotonic()
    try:
        import torch
        import torch.distributed as dist

        facts = _versions(torch, dist)
    except BaseException as error:  # a broken installation may raise anything
        packets.send({"torch": {"error": brief_error(error)}})
        return
    packets.send({"torch": {**facts, "import_s": time.monotonic() - began_s}})
    tries_engines = settings["role"]["tries_engines"]
    for engine in ["phalanx", *["gloo"] * (facts["gloo"] and not facts["replaced_by"])] if tries_engines else []:
        packets.send({"begins": engine})
        packets.send({"engine": engine, **run_ranks(engine, NUM_RANKS, settings["engine_deadline_s"])})
    gpus = _look_at_gpus(facts)
    packets.send({"gpus": gpus})
    if gpus.get("devices") and facts["nccl"] and tries_engines:
        packets.send({"begins": "nccl"})
        size = min(NUM_RANKS, len(gpus["devices"]))
        deadline_s = settings["engine_deadline_s"] + _GPU_DEADLINE_S
        packets.send({"engine": "nccl", "world_size": size, **run_ranks("nccl", size, deadline_s)})
    packets.send({"engines": "done"})
    if settings["role"]["num_hosts"] > 1 and (go := packets.wait()) is not None:
        from phalanx.doctor.hosts.hosts import hold

        hold(settings["role"], go, packets.send)
        os._exit(0)  # not sys.exit, because Gloo may still be waiting in a thread


def _versions(torch: Any, dist: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "phalanx": phalanx.__version__,
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "gloo": False,
        "replaced_by": replace.origin(),
        "nccl": False,
        "mpi": False,
    }
    if dist.is_available():
        facts |= {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    try:
        importlib.import_module("phalanx.backend.groups")  # imported once, before the ranks are forked
    except Exception as error:
        facts["backend_error"] = brief_error(error)
    return facts


def _look_at_gpus(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the GPUs, or why there are none. A forked child asks, because a process that has used CUDA can't fork."""
    if not facts["cuda"]:
        return {"devices": []}

    def look(_: int) -> dict[str, Any]:
        import torch

        if not torch.cuda.is_available():
            try:
                torch.cuda.init()
            except Exception as error:
                return {"devices": [], "reason": brief_error(error)}
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        devices = [{"name": one.name, "size_bytes": one.total_memory} for one in found]
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if facts["nccl"] else ""
        return {"devices": devices, "nccl": nccl}

    return in_processes(look, 1, _GPU_DEADLINE_S)[0]


def command(descriptor: int, settings: dict[str, Any]) -> list[str]:
    """Return the command line that starts the process."""
    # With -m, a json.py in the current folder would shadow the standard library's json.
    program = "import sys; sys.path[:] = filter(None, sys.path); from phalanx.doctor.torch_side import main; main()"
    return [sys.executable, "-c", program, str(descriptor), json.dumps({**settings, "parent": os.getpid()})]
