"""The environment that a rank finds: torchrun's contract, variable by variable."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def rank_environment(
    inherited: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    run_id: str,
    error_file: str,
) -> dict[str, str]:
    """Return the environment of one rank of a job on one node.

    Args:
        inherited: The environment of the supervisor; its OMP_NUM_THREADS is kept.
        error_file: Where ``torch.distributed.elastic``'s ``@record`` writes an exception.

    Source: ``torch/distributed/elastic/agent/server/local_elastic_agent.py``.
    """
    size = str(world_size)
    return {
        # A rank writes into a pipe: unbuffered, so that its last words are not lost with it.
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, num_usable_cpus() // world_size)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": error_file,
        # Rank 0 serves the store itself; the supervisor holds none.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def num_usable_cpus() -> int:
    """Return the number of CPUs that this process may run on, at least 1."""
    return len(os.sched_getaffinity(0)) or 1


def free_port() -> int:
    """Return a TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
