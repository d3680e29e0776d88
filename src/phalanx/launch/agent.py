"""One node's seat among several: torch's elastic agent, with the supervisor's ranks for its workers.

Runs as a process of its own, since it needs torch, threads and a store, none of which the supervisor or the warden may
have. Rendezvous, ranks of the nodes and changes of membership are torch's. What is added here: a failure on one node is
announced to all in the store, so that every node restarts or ends in the same attempt and names the same cause; and the
ranks of each attempt meet in a store of their own, on a port that their rank 0's node holds for them: the agents' store
still has the addresses of earlier attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any, cast

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from phalanx import _env, _torch
from phalanx.launch.deadlines import CAUSE_S, LEAVE_S, NAME_S
from phalanx.launch.nodes import read_cause
from phalanx.launch.packets import PacketSocket
from phalanx.launch.questions import Node, Questions

_NUM_FAILURES = "phalanx/failures"
_NUM_DONE = "phalanx/done"
_NUM_LEAVING = "phalanx/leaving"
_MASTER_PORT = "phalanx/master_port"
_NAME_PAUSE_S = 1.0
_LEAVE_POLL_S = 0.05


class NodeAgent(SimpleElasticAgent):
    """Asks the supervisor to start and stop ranks, and tells it how the job ended.

    Attributes:
        cause: Cause of the last failure that a node announced, as `nodes.cause_of` wrote it.
    """

    def __init__(self, spec: WorkerSpec, channel: PacketSocket) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self._channel = channel
        self._ended: dict[str, Any] | None = None  # how the supervisor says that this node's ranks ended
        self._done = False
        self.cause: dict[str, Any] | None = None
        self._node: Node | None = None
        Questions(os.getppid(), lambda: self._node)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        first, spec = worker_group.workers[0], worker_group.spec
        self._ended, self._done = None, False
        size = cast(int, worker_group.group_world_size)
        self._node = Node(self._attempt_store, cast(int, worker_group.group_rank), size, set())
        self._channel.send(
            {
                "start": {
                    "world_size": first.world_size,
                    "num_local_ranks": spec.local_world_size,
                    "first_rank": first.global_rank,
                    "node_rank": worker_group.group_rank,
                    "num_nodes": worker_group.group_world_size,
                    "role": spec.role,
                    "master_addr": worker_group.master_addr,
                    "master_port": self._agree_on_port(worker_group),
                    "run_id": spec.rdzv_handler.get_run_id(),
                    "restart_count": spec.max_restarts - _torch.attribute_of(self, "_remaining_restarts"),
                    "max_restarts": spec.max_restarts,
                }
            }
        )
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _agree_on_port(self, worker_group: WorkerGroup) -> int:
        """Return a port that is free on the node of rank 0, and held for it by that node's supervisor."""
        if worker_group.group_rank == 0:
            self._channel.send({"reserve": True})
            while (packet := self._channel.wait()) is not None and "reserved" not in packet:
                pass
            if packet is None:
                sys.exit(1)
            self._attempt_store.set(_MASTER_PORT, str(packet["reserved"]))
        return int(self._attempt_store.get(_MASTER_PORT))

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        if self._ended is not None or not worker_group.workers:
            return
        self._channel.send({"stop": True})
        while (packet := self._channel.wait()) is not None and "ended" not in packet:
            pass
        self._ended = packet or {"ended": "stopped"}

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, is_restart: bool = False
    ) -> None:
        self._stop_workers(_torch.attribute_of(self, "_worker_group"))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for packet in self._channel.receive():
            if "ended" in packet:
                self._ended = packet
        if not self._channel.alive:
            os._exit(1)
        how = self._ended["ended"] if self._ended else ""
        if how == "failed":
            self._announce(self._ended["cause"])  # type: ignore[index]
        if how == "failed" or self._num(_NUM_FAILURES):
            return self._failure(worker_group)
        if how == "succeeded" and not self._done:
            self._done = True
            self._attempt_store.add(_NUM_DONE, 1)
        # Until all are done, this node still belongs to the group: another may fail yet.
        if self._done and self._num(_NUM_DONE) >= cast(int, worker_group.group_world_size):
            return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})
        return RunResult(WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        """Leave together: the store goes with its node, and torch's own barrier prints what it meets then."""
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(Exception):  # it has gone: nobody needs us any more
            self._attempt_store.add(_NUM_LEAVING, 1)
            size = cast(int, _torch.attribute_of(self, "_worker_group").group_world_size)
            while self._num(_NUM_LEAVING) < size and time.monotonic() < deadline:
                time.sleep(_LEAVE_POLL_S)
            time.sleep(4 * _LEAVE_POLL_S)  # the others read it once more

    @property
    def _attempt_store(self) -> Store:
        return cast(Store, _torch.attribute_of(self, "_store"))  # there is one since the nodes have met

    def _num(self, key: str) -> int:
        return int(self._attempt_store.add(key, 0))

    def _announce(self, cause: dict[str, Any]) -> None:
        number = self._attempt_store.add(f"{_NUM_FAILURES}/next", 1)
        self._attempt_store.set(f"{_NUM_FAILURES}/{number}", json.dumps(cause))
        self._attempt_store.add(_NUM_FAILURES, 1)

    def _failure(self, worker_group: WorkerGroup) -> RunResult:
        deadline = time.monotonic() + CAUSE_S
        while True:
            numbers = range(1, self._num(_NUM_FAILURES) + 1)
            causes = [read_cause(self._attempt_store.get(f"{_NUM_FAILURES}/{n}")) for n in numbers]
            self.cause = min(causes, key=lambda cause: (cause["is_victim"], cause["returncode"] > 0))
            if not self.cause["is_victim"] or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if _torch.attribute_of(self, "_remaining_restarts") > 0:
            self._channel.send({"restart": self.cause})
        rank = self.cause["rank"]
        failure = ProcessFailure(rank, self.cause["pid"], self.cause["returncode"], error_file="")
        return RunResult(WorkerState.FAILED, failures={rank: failure})

    def _record_worker_events(self, result: RunResult) -> None:
        """Leave torch's event log out: it looks for the failed rank among this node's own."""


class _FreshStaticRendezvous(StaticTCPRendezvous):
    """The static rendezvous, with keys of its own in each attempt."""

    _round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        self._round += 1
        store = PrefixStore(f"round_{self._round}", info.store)
        assert info.bootstrap_store_info is not None  # the static rendezvous always has it
        return RendezvousInfo(store, info.rank, info.world_size, info.bootstrap_store_info)


def _rendezvous_handler(job: dict[str, Any]) -> RendezvousHandler:
    config = dict(job["rdzv_conf"])
    if job["rdzv_backend"] == "static":
        host, _, port = job["rdzv_endpoint"].rpartition(":")
        limit_s = int(config.get("timeout", NAME_S))
        return _FreshStaticRendezvous(host, int(port), job["node_rank"], job["max_nodes"], job["run_id"], limit_s)
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=job["rdzv_backend"],
            endpoint=job["rdzv_endpoint"],
            run_id=job["run_id"],
            min_nodes=job["min_nodes"],
            max_nodes=job["max_nodes"],
            local_addr=job["local_addr"] or None,
            **config,
        )
    )


def _await_name(channel: PacketSocket, job: dict[str, Any]) -> None:
    """Return once the host where the nodes meet has an address; torch would repeat a warning every few seconds.

    Raises:
        TimeoutError: It has none at the limit.
    """
    host = job["rdzv_endpoint"].rpartition(":")[0].strip("[]")
    config = job["rdzv_conf"]
    deadline = time.monotonic() + float(config.get("timeout", config.get("join_timeout", NAME_S)))
    is_told = False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (socket.gaierror, UnicodeError) as error:
            why = f"the name {host!r} does not resolve here ({error.args[-1]})"
        if time.monotonic() >= deadline:
            raise TimeoutError(why)
        if not is_told:
            channel.send({"unresolved": why})
            is_told = True
        time.sleep(_NAME_PAUSE_S)


def main() -> None:
    channel = PacketSocket(socket.socket(fileno=int(sys.argv[1])))
    job = json.loads(sys.argv[2])
    _env.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        _await_name(channel, job)
        handler = _rendezvous_handler(job)
        spec = WorkerSpec(
            role=job["role"],
            local_world_size=job["num_local_ranks"],
            rdzv_handler=handler,
            entrypoint="phalanx run",
            max_restarts=job["max_restarts"],
            monitor_interval=job["monitor_interval_s"],
        )
        agent = NodeAgent(spec, channel)
        result = agent.run()
        channel.send({"finish": agent.cause if result is None or result.is_failed() else None})
        handler.shutdown()
    except Exception as error:
        channel.send({"give_up": f"{type(error).__name__}: {error}"})
    # Not by the interpreter's end: threads of the store may hold it.
    sys.stdout.flush()
    os._exit(0)
