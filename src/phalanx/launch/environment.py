"""The environment of a rank: torchrun's contract, variable by variable.

Threads of OpenMP sleep while they wait only where ranks are crowded, that is, have more threads than there are CPUs or
than a quota pays for. libgomp, which torch's wheels bring, spins for 3 ms, and less only where the threads of its own
process are too many; it can't know the other ranks. Two ranks of two threads on two cores then take 1.5 to 2 times as
long. Alone on its cores a rank is faster when its threads spin, so there nothing is set. The policy is read when the
library is loaded: it is in the forker's environment, and in that of the server of `phalanx.spawn`, where the first
call decides.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from phalanx import _env
from phalanx.host.cpus import Share
from phalanx.rendezvous.launched import Launch

# MKL, OpenBLAS and numexpr obey it, too, unless their own variables are set.
THREADS_VARIABLE = "OMP_NUM_THREADS"
# Variables by which users choose how OpenMP threads wait; GOMP_ is GCC's runtime, KMP_ LLVM's and Intel's.
WAIT_VARIABLES = frozenset(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"))
# Variables by which users bind OpenMP threads to CPUs, among those that the runtime finds when it is loaded.
_BIND_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "KMP_HW_SUBSET")


def binds_threads(environ: Mapping[str, str]) -> bool:
    """Return whether OpenMP binds threads to the CPUs of the process that loads it, which forked ranks would share."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false" or environ.get("OMP_PLACES", "").startswith("{"):
        return False  # numbers of CPUs mean the same in every process
    return any(map(environ.get, _BIND_VARIABLES))


def thread_environment(inherited: Mapping[str, str], share: Share) -> dict[str, str]:
    """Return `inherited` with the size of thread pools, unless the user has set OMP_NUM_THREADS.

    Where ranks are crowded, threads of OpenMP sleep while they wait, unless the user has said how they do. By default
    they spin for milliseconds, since each runtime knows only the threads of its own process.
    """
    threads = {THREADS_VARIABLE: str(share.num_threads)}
    if share.is_crowded and WAIT_VARIABLES.isdisjoint(inherited):
        threads["OMP_WAIT_POLICY"] = "PASSIVE"
    return {**threads, **inherited}


def shared_environment(inherited: Mapping[str, str], share: Share) -> dict[str, str]:
    """Return what all ranks of a node have in common; what the user has set is kept.

    Threads are those of `share`, since every rank has as many.

    A rank writes into a pipe, so its streams are unbuffered: its last words are not lost with it. A crash in native
    code leaves the stacks of Python's threads.
    """
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    # Set by an outer launch; this launch sets its own for each rank.
    inherited = {name: value for name, value in inherited.items() if name != _env.ALLOCATION_VARIABLE}
    return {**defaults, **thread_environment(inherited, share)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the group, as the ranks of one node are told of it.

    Attributes:
        first_rank: Rank of this node's local rank 0.
        node_rank: Number of this node among ``num_nodes``.
        restart_count: 0 for the first attempt.
        epoch: Identity of this attempt, as `checkpoint.disk.claim.Claimant` takes it; None: it has none.
    """

    world_size: int
    num_local_ranks: int
    first_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int
    run_id: str = "none"
    restart_count: int = 0
    max_restarts: int = 0
    epoch: Mapping[str, Any] | None = None

    def launch(self, launcher: str, notes: str, rank: int) -> dict[str, str]:
        """Return the variable that tells a rank where this launch's notes are; empty if there are other nodes."""
        if self.num_nodes > 1:
            return {_env.LAUNCH_VARIABLE: ""}  # hides that of an outer launch
        launch = Launch(launcher, notes, rank, self.world_size, self.master_addr, self.master_port)
        return {_env.LAUNCH_VARIABLE: launch.to_text()}


def rank_environment(attempt: Attempt, local_rank: int, error_file: str) -> dict[str, str]:
    """Return the variables of one rank beside the shared environment.

    Args:
        error_file: File in which ``torch.distributed.elastic``'s ``@record`` writes an exception.

    Source: ``torch/distributed/elastic/agent/server/local_elastic_agent.py``.
    """
    rank, size = str(attempt.first_rank + local_rank), str(attempt.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(attempt.num_local_ranks),
        "GROUP_RANK": str(attempt.node_rank),
        "GROUP_WORLD_SIZE": str(attempt.num_nodes),
        "NODE_RANK": str(attempt.node_rank),
        "ROLE_NAME": attempt.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        # Rank 0 serves the store, which is new in each attempt.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        _env.EPOCH_VARIABLE: json.dumps(attempt.epoch) if attempt.epoch else "",
    }
