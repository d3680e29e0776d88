"""The environment of a rank: torchrun's contract, variable by variable.

Ranks are crowded if together they have more threads than there are CPUs, or than a cgroup quota pays for. Only then
does the launcher make OpenMP threads sleep while they wait. libgomp, which ships with torch's wheels, lets waiting
threads spin for 3 ms. libgomp shortens this time only if its own process has too many threads, because it can't know
about other ranks. With spinning, two ranks of two threads on two cores take 1.5 to 2 times as long. A rank that is
alone on its cores is faster if its threads spin, so in that case the launcher leaves the policy unset. libgomp reads
the policy when it is loaded, so the policy must be in the environment of the process that forks the ranks: the forker,
or the server of `phalanx.spawn`. A server keeps the policy with which it was started.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from phalanx import _env
from phalanx.host.cpus import Share
from phalanx.rendezvous.launched import Launch

# MKL, OpenBLAS and numexpr use this variable, too, unless their own variables are set.
THREADS_VARIABLE = "OMP_NUM_THREADS"
# Variables by which users choose how OpenMP threads wait; GOMP_ belongs to GCC's runtime, KMP_ to LLVM's and Intel's.
WAIT_VARIABLES = frozenset(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"))
# Variables by which users bind OpenMP threads to CPUs. The runtime reads them when it is loaded.
_BIND_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "KMP_HW_SUBSET")


def binds_threads(environ: Mapping[str, str]) -> bool:
    """Return whether OpenMP, once the forker loads it, would bind threads to CPUs; all ranks would share those CPUs."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false" or environ.get("OMP_PLACES", "").startswith("{"):
        return False  # nothing is bound, or the user lists the CPUs: ranks would share these even without a forker
    return any(map(environ.get, _BIND_VARIABLES))


def thread_environment(inherited: Mapping[str, str], share: Share) -> dict[str, str]:
    """Return `inherited` plus OMP_NUM_THREADS, the size of thread pools, unless the user has set this variable.

    If ranks are crowded, OpenMP threads sleep while they wait, unless the user has chosen how they wait.
    """
    threads = {THREADS_VARIABLE: str(share.num_threads)}
    if share.is_crowded and WAIT_VARIABLES.isdisjoint(inherited):
        threads["OMP_WAIT_POLICY"] = "PASSIVE"
    return {**threads, **inherited}


def shared_environment(inherited: Mapping[str, str], share: Share) -> dict[str, str]:
    """Return the environment that all ranks of a node share; variables that the user has set are kept.

    Every rank gets the number of threads in `share`, which is the same for all ranks. Ranks write into pipes, so their
    streams are made unbuffered; otherwise the last output of a dying rank could be lost. A crash in native code prints
    the stacks of Python's threads.
    """
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    # An outer launch may have set this variable; this launch sets its own value for each rank.
    inherited = {name: value for name, value in inherited.items() if name != _env.ALLOCATION_VARIABLE}
    return {**defaults, **thread_environment(inherited, share)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of all ranks, with the facts that the launcher gives to the ranks of one node.

    Attributes:
        first_rank: Rank of this node's local rank 0.
        node_rank: Number of this node among ``num_nodes``.
        restart_count: 0 for the first attempt.
        epoch: Identity of this attempt for `checkpoint.disk.claim.Claimant`; None: the attempt has no identity.
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
        """Return the variable that tells a rank where this launch keeps its notes; the value is "" on several nodes."""
        if self.num_nodes > 1:
            return {_env.LAUNCH_VARIABLE: ""}  # set, so that the value of an outer launch is not inherited
        launch = Launch(launcher, notes, rank, self.world_size, self.master_addr, self.master_port)
        return {_env.LAUNCH_VARIABLE: launch.to_text()}


def rank_environment(attempt: Attempt, local_rank: int, error_file: str) -> dict[str, str]:
    """Return the variables of one rank, which are added to the shared environment.

    Args:
        error_file: File into which ``@record`` of ``torch.distributed.elastic`` writes an exception.

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
        # Rank 0 itself serves the store, and each attempt has a new store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        _env.EPOCH_VARIABLE: json.dumps(attempt.epoch) if attempt.epoch else "",
    }
