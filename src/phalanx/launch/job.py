"""What a launch shall do on this node: every number known, nothing left to guess."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping

from phalanx.launch.cpus import Division


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One node's part of a job; what the flags of ``phalanx run`` come to.

    Attributes:
        command: Of every rank: the interpreter with its script or module, or any program.
        preload: Fork the ranks from one process that has imported torch; else start each anew.
        local_rank_argument: Give each rank ``--local-rank=N`` as its first argument.
        divide: How threads and CPUs are divided among so many local ranks.
        num_local_ranks: Ranks on this node.
        min_local_ranks: What it goes on with at least when some of them can't come back.
        regrow_after_s: With fewer, when to try all of them again; 0: never.
        min_nodes: Nodes without which the job does not start.
        max_nodes: Nodes that it takes at most.
        node_rank: This node among them, for the static rendezvous.
        rdzv_backend: ``"static"`` or ``"c10d"``; matters with several nodes only.
        rdzv_endpoint: ``"host:port"``; empty: the master's address and port.
        rdzv_conf: Further settings of torch's rendezvous.
        run_id: Name of the job, TORCHELASTIC_RUN_ID.
        role: ROLE_NAME.
        master_addr: Where rank 0 serves the store.
        master_port: Its port; 0: a free one, held by the supervisor.
        local_addr: This node's own address; empty: found by torch.
        max_restarts: How often the ranks are started again after a failure.
        monitor_interval_s: How often the nodes look at each other.
        grace_s: Between SIGTERM and SIGKILL.
        signals: Handled and given on to the ranks; SIGUSR1 and SIGUSR2 do not end the job.
        log_dir: Holds the run's folder; empty: ``runs/<name of the script>``.
        redirects: For each local rank the streams kept off the terminal; 1 is stdout, 2 is stderr, 3 both.
        tees: For each local rank the streams shown although redirected.
        shown_ranks: Local ranks whose output is shown; None: all.
    """

    command: tuple[str, ...]
    divide: Callable[[int], Division]
    preload: bool = True
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
    local_addr: str = ""
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    grace_s: float = 30.0
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    log_dir: str = ""
    redirects: tuple[int, ...] = ()
    tees: tuple[int, ...] = ()
    shown_ranks: tuple[int, ...] | None = None

    @property
    def served_port(self) -> int:
        """The port that somebody is to listen on here; 0: none, or a free one."""
        if self.max_nodes == 1:
            return self.master_port
        is_first = self.rdzv_backend == "static" and self.node_rank == 0
        return int(self.rdzv_endpoint.rpartition(":")[2]) if is_first else 0

    @property
    def note(self) -> str:
        """One line that says how many ranks there are, and how threads and CPUs were divided."""
        note = self.divide(self.num_local_ranks).note
        if self.min_local_ranks == self.num_local_ranks:
            return note
        return f"{note}; {self.min_local_ranks} at least{'' if self.max_restarts else ', but --max-restarts is 0'}"
