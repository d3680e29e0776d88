"""A job on this node, with every number decided."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Mapping

from phalanx._text import filled
from phalanx.host.block_pool import MemoryPolicy
from phalanx.host.cpus import Division
from phalanx.launch.script_head import Head

MESSAGE_COLUMNS = 80 - len("phalanx run: ")
"""Width of the launcher's messages on a terminal of 80 columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One node's part of a job, as the flags of ``phalanx run`` describe it.

    Attributes:
        command: Command of every rank: the interpreter with its script or module, or any program.
        typed: Command line of the launcher as the user typed it; empty: unknown.
        remark: Line to print about `typed`; empty: print nothing.
        preload: Whether ranks are forked from one process that has imported torch; otherwise each rank executes
            `command`.
        head: Variables that the script sets before it imports torch; the forker sets them, too, before its own import
            of torch.
        local_rank_argument: Whether each rank gets ``--local-rank=N`` as its first argument.
        divide: Function that divides threads and CPUs among the given number of local ranks.
        memory: Policy for large blocks of memory that ranks free: whether blocks are kept, and lie in huge pages.
        is_tuned: Whether ``phalanx tune`` chose the number of ranks, the number of threads and the memory policy.
        num_local_ranks: Number of ranks on this node.
        min_local_ranks: Smallest number of ranks with which this node continues if some ranks can't be restarted.
        regrow_after_s: Seconds after which a node with fewer ranks tries `num_local_ranks` again; 0: it never tries.
        min_nodes: Smallest number of nodes.
        max_nodes: Largest number of nodes.
        node_rank: Number of this node, for the static rendezvous.
        rdzv_backend: Rendezvous of several nodes, "static" or "c10d".
        rdzv_endpoint: Address of the rendezvous, "host:port", or several with commas between them; empty: the job has
            one node.
        rdzv_conf: Further settings of the rendezvous, under the names that torch gives them.
        run_id: Name of the job, TORCHELASTIC_RUN_ID.
        role: Role of the ranks, ROLE_NAME.
        master_addr: Host on which rank 0 serves the store.
        master_port: Port of the store; 0: a free port, which the supervisor reserves.
        num_replicas: Number of other nodes that keep a copy of each part of a sharded state.
        host_label: Name of this node's failure domain; empty: the node is a domain of its own.
        local_addr: Address of this node; empty: the address from which it connects to the other nodes.
        max_restarts: Number of times that the ranks are restarted after a failure.
        keeps: Whether ranks that did not cause a failure may continue in the same process.
        spares: Number of nodes beyond `max_nodes` that wait to take the place of a lost node.
        drain_file: File whose appearance takes this node out of the job; empty: no file is watched.
        drain_url: URL whose answer may take this node out of the job, see `notices`; empty: no URL is polled.
        drains: Whether the first SIGTERM takes this node out of a job of several nodes; the other nodes continue.
        grace_s: Seconds between SIGTERM and SIGKILL.
        signals: Signals that are passed on to the ranks; SIGUSR1 and SIGUSR2 do not end the job.
        metrics: Address at which the metrics of this node are served, "host:port" or "port"; empty: they are not.
        log_dir: Folder in which the run's folder is made; empty: ``logs/<name of the script>``.
        redirects: Streams kept off the terminal, for each local rank; 1 is stdout, 2 is stderr, 3 is both.
        tees: Streams shown although redirected, for each local rank.
        shown_ranks: Local ranks whose output is shown; None: all local ranks.
    """

    command: tuple[str, ...]
    divide: Callable[[int], Division]
    memory: MemoryPolicy = dataclasses.field(default_factory=MemoryPolicy)
    is_tuned: bool = False
    typed: str = ""
    remark: str = ""
    preload: bool = True
    head: Head = dataclasses.field(default_factory=Head)
    local_rank_argument: bool = False
    num_local_ranks: int = 1
    min_local_ranks: int = 1
    regrow_after_s: float = 0.0
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    run_id: str = "none"
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    num_replicas: int = 0
    host_label: str = ""
    local_addr: str = ""
    max_restarts: int = 0
    keeps: bool = True
    spares: int = 0
    drain_file: str = ""
    drain_url: str = ""
    drains: bool = False
    grace_s: float = 30.0
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    metrics: str = ""
    log_dir: str = ""
    redirects: tuple[int, ...] = ()
    tees: tuple[int, ...] = ()
    shown_ranks: tuple[int, ...] | None = None

    @property
    def is_python(self) -> bool:
        """Whether ranks run a Python script or module, and not another program."""
        return self.command[0] == sys.executable

    @property
    def served_port(self) -> int:
        """The port on which this node must listen; 0: the node does not listen, or may choose any free port."""
        if self.max_nodes == 1:
            return self.master_port
        is_first = self.rdzv_backend == "static" and self.node_rank == 0
        return int(self.rdzv_endpoint.split(",")[0].rpartition(":")[2]) if is_first else 0

    def opening(self, *more: str) -> list[str]:
        """Return the first lines that the launcher prints: ranks and threads, anything unusual, and `more`."""
        notes = [f"{self.divide(self.num_local_ranks).note}{self.is_tuned * ', as tuned'}"]
        if not self.memory.keeps:
            notes.append(f"memory {self.memory}")
        if self.min_local_ranks < self.num_local_ranks:
            never = "" if self.max_restarts else ", but --max-restarts is 0"
            notes.append(f"{self.min_local_ranks} at least{never}")
        if self.head.doubt:
            script = os.path.basename(self.command[2 if self.command[1] == "-m" else 1])
            notes.append(f"{script} may set {self.head.doubt} before it imports torch, so each rank imports it anew")
        return filled([*notes, *more], MESSAGE_COLUMNS)
