"""The supervisor's view of its node's agent: a process that says when ranks start and stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any

from phalanx._env import PREEMPTED_CODE
from phalanx.checkpoint.memory.layout import announce_restart, newest_attempt
from phalanx.failure.ending import Ending
from phalanx.host.ports import ReservedPort
from phalanx.launch.deadlines import AGENT_S, ANSWERS_S, NODES_S
from phalanx.launch.job import Job
from phalanx.launch.nodes.agent import RUN_AGENT
from phalanx.launch.nodes.causes import cause_of
from phalanx.launch.nodes.handshake import script_of
from phalanx.launch.processes.descendants import start_helper
from phalanx.launch.replicas.process import Replicas
from phalanx.launch.run.local_size import SharedSize, is_ahead, newest_steps
from phalanx.launch.run.supervisor import Supervisor
from phalanx.wire.packets import PacketSocket

_OTHERS_S = 0.5  # for other nodes to tell that they are leaving, too
_LOOK_S = 1.0  # between looks whether the agent has asked anything


class AgentClient:
    """The agent's process, and what it has ordered and we have not done yet.

    Attributes:
        may_restart: Whether a failure of the present attempt may be followed by another attempt.
    """

    def __init__(self, ranks: Supervisor, job: Job, size: SharedSize) -> None:
        self._ranks = ranks
        self._job = job
        self._size = size
        self.may_restart: bool = False
        self._pending: list[dict[str, Any]] = []
        self._reserved: ReservedPort | None = None
        self._replicas: Replicas | None = None
        self._running = self._stopped = False
        self._steps: dict[bytes, int] | None = None  # of the newest snapshots, if the next one is waited for
        self._heard_s = time.monotonic()  # when the agent has been heard last
        self._stopped_s = 0.0  # the longest time for which this process has not run
        self._num_asked = 0  # how often it has asked whether this process lives, since it began
        self._how = ""  # the last attempt has ended here
        self._leaves_at_s = 0.0  # at the latest; 0: this node stays
        self._leaves_from_s = 0.0  # once others that are leaving have been heard of
        self._is_next = True  # of the nodes that are leaving
        self._goes = False  # its ranks have ended for it to leave
        self._old_attempt = 0  # whose snapshots are older than the attempt after which it leaves; 0: there are none

    def __enter__(self) -> AgentClient:
        ranks, job = self._ranks, self._job
        if job.num_replicas and job.max_restarts:
            self._replicas = Replicas(
                ranks.events, ranks.say, ranks.snapshots_fd, job.run_id, job.num_replicas, ranks.keep_list
            )
        self._channel, theirs = PacketSocket.pair()
        replica_port = self._replicas.port if self._replicas is not None else 0
        settings = json.dumps({**_settings(job), "replica_port": replica_port})
        self._pid = start_helper(RUN_AGENT, [theirs.fileno()], settings)
        theirs.close()
        if self._job.drains:
            self._ranks.drain = lambda: self._leave("SIGTERM")
        self._ranks.announce_interrupt = lambda: self._channel.send({"interrupted": True})
        self._ranks.keep_list.append(self._pid)
        self._ranks.events.watch(self._channel.fileno(), self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.announce_interrupt = None
        with contextlib.suppress(KeyError):
            self._ranks.events.unwatch(self._channel.fileno())
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        if self._reserved is not None:
            self._reserved.close()
        if self._replicas is not None:
            self._replicas.close()

    def replicate(self, told: dict[str, Any]) -> None:
        """Have this node's snapshots kept on the nodes of a new attempt."""
        if self._replicas is not None:
            self._replicas.follow(told)

    def next(self) -> dict[str, Any] | None:
        """Return the next order; None when we are told to end."""
        patience_ends_s = time.monotonic() + NODES_S
        said = False
        num_asked, num_silent = self._num_asked, 0
        while not self._pending:
            if self._ranks.received is not None:
                return None
            if self._has_to_go:
                self._ranks.keep_reason("left the job, which was asked of it by SIGTERM (--drain)")
                self._ranks.say(f"this node has left the job; exit code {PREEMPTED_CODE}, start it again to join")
                raise SystemExit(PREEMPTED_CODE)
            if not self._channel.alive:
                return {"give_up": self._why_no_agent()}
            if num_silent * _LOOK_S >= ANSWERS_S:
                return {"give_up": f"the agent of this node (pid {self._pid}) has not answered for {ANSWERS_S:g} s"}
            began_s = time.monotonic()
            self._ranks.wait(min(_LOOK_S, _LOOK_S if said else max(0.0, patience_ends_s - time.monotonic())))
            if self._num_asked != num_asked or not num_asked:
                num_asked, num_silent = self._num_asked, 0
            else:  # looks are counted, not seconds: whoever stops this process, too, stops both for the same time
                num_silent += time.monotonic() - began_s >= _LOOK_S
            if not self._pending and not said and time.monotonic() >= patience_ends_s:
                said = True
                self._ranks.say(f"waiting for the other nodes at {self._job.rdzv_endpoint}")
        order = self._pending.pop(0)
        self._running = "start" in order
        self._stopped = False
        self._steps = None
        if self._leaves_at_s:
            self._steps = newest_steps(self._ranks.snapshots_fd)
            self._old_attempt = newest_attempt(self._ranks.snapshots_fd, own=True)
        self._attempt = order["start"]["restart_count"] if self._running else 0
        return order

    @property
    def _has_to_go(self) -> bool:
        """Whether this node leaves now that its ranks do not run.

        If they have ended for another reason, it stays for the next attempt: others may lack what it has.
        """
        is_late = time.monotonic() > self._leaves_at_s
        return self._leaves_at_s > 0 and self._how != "succeeded" and (self._goes or not self._how or is_late)

    def _may_go(self, now_s: float) -> bool:
        """Whether it is this node's turn to leave, and its ranks have loaded what others may lack."""
        newest = newest_attempt(self._ranks.snapshots_fd, own=True)
        has_loaded = self._old_attempt <= 0 or newest > self._old_attempt
        return now_s >= self._leaves_from_s and self._is_next and has_loaded

    def report(self, number: int, culprit: Ending | None) -> None:
        """Tell the agent how this node's ranks ended, of which start."""
        self._running = False
        if culprit is not None and culprit.ended_for_restart:  # the other nodes know of it, or will in a moment
            self._stopped, culprit = True, None
        self._how = "stopped" if self._stopped else "failed" if culprit else "succeeded"
        if self._ranks.received == signal.SIGINT and not self._ranks.was_preempted:
            self._how = "interrupted"
        cause = None
        if culprit is not None:
            lived_s = culprit.when_s - self._ranks.began_s
            what_follows = self._size.after_failure(culprit, lived_s=lived_s, may_leave=self.may_restart)
            cause = cause_of(culprit, **what_follows)
        if self._how != "succeeded" and (num_ranks := self._size.wanted_after(culprit)):
            self._channel.send({"ask_for": num_ranks})
        self._channel.send({"ended": self._how, "number": number, "cause": cause})

    def await_end(self) -> None:
        """Return when the other nodes know that the job has ended: they would take this one's end before for a loss."""
        deadline = time.monotonic() + self._job.grace_s
        while time.monotonic() < deadline and self._channel.alive and not self._ranks.is_killing:
            if any("finish" in order or "give_up" in order for order in self._pending):
                return
            self._ranks.wait(_LOOK_S)

    def look(self) -> bool:
        """Tell the agent, if it waits for that, when a snapshot has just been taken; at once if there are none.

        Returns:
            Whether the attempt ends here, since this node leaves; otherwise all nodes end it together.
        """
        if time.monotonic() - self._heard_s >= AGENT_S:
            self._ranks.kill_attempt()  # the agent was stopped, and the other nodes may be going on without this one
        if num_ranks := self._size.is_to_be_asked_for(time.monotonic() - self._ranks.began_s):
            self._channel.send({"ask_for": num_ranks})
        if self._steps is None:
            return False
        steps, now_s = newest_steps(self._ranks.snapshots_fd), time.monotonic()
        is_late = 0 < self._leaves_at_s < now_s
        if self._leaves_at_s and not is_late and not self._may_go(now_s):
            return False
        if not steps or is_ahead(steps, self._steps) or is_late:
            self._steps = None
            announce_restart(self._ranks.snapshots_fd, self._attempt)
            self._channel.send({"whole": True})
            self._goes = self._leaves_at_s > 0
            self._stopped |= self._goes
            return self._goes
        return False

    def _leave(self, why: str) -> None:
        """Have this node leave the job when its next snapshot is whole; the others go on from that."""
        if self._leaves_at_s:
            return
        self._ranks.drain = None  # from now on SIGTERM means what it always does
        self._ranks.say(f"{why}: this node leaves the job after the next snapshot, and the others go on")
        self._channel.send({"leave": True})
        now_s, patience_s = time.monotonic(), self._job.grace_s / 2
        self._leaves_at_s, self._leaves_from_s = now_s + patience_s, now_s + min(_OTHERS_S, patience_s)
        self._steps = newest_steps(self._ranks.snapshots_fd)

    def _why_no_agent(self) -> str:
        if self._stopped_s < ANSWERS_S:
            return "the agent of this node has ended"
        return (
            f"this launcher was stopped for {self._stopped_s:.0f} s (Ctrl-Z or SIGSTOP), so the others count this "
            "node as lost: start the command again to join them"
        )

    def _take(self) -> None:
        if self._num_asked:  # the agent asks once a second
            self._stopped_s = max(self._stopped_s, time.monotonic() - self._heard_s)
        for packet in self._channel.receive():
            if "reserve" in packet:
                if self._reserved is not None:
                    self._reserved.close()
                self._reserved = ReservedPort()
                self._channel.send({"reserved": self._reserved.port})
            elif "ping" in packet:
                self._heard_s = time.monotonic()
                self._ranks.clocks = packet["clocks"]
                self._num_asked += 1
                self._channel.send({"pong": True})
            elif "drain" in packet:
                self._leave(packet["drain"])
            elif "leftover" in packet:
                self._ranks.say(f"{packet['leftover']} was there before this job: it is no notice until it is touched")
            elif "all_leave" in packet:
                self._ranks.say("no other node stays, so the ranks are asked to save and to make room")
                self._leaves_at_s, self._steps = 0.0, None
                self._ranks.events.note(signal.SIGTERM)
            elif "next_to_leave" in packet:
                self._is_next = packet["next_to_leave"]
            elif "watch" in packet:
                self._steps = newest_steps(self._ranks.snapshots_fd)
            elif "stop" in packet or "joins" in packet:
                self._num_asked *= "joins" not in packet  # it begins anew, and may have to look for a name
                self._pending += [packet] if "joins" in packet else []
                self._stopped = True
                if self._running:
                    self._ranks.stop_attempt(keeps=True)
                for order in [order for order in self._pending if "start" in order]:
                    self._pending.remove(order)
                    self._channel.send({"ended": "stopped", "number": order["number"], "cause": None})
            else:
                self._pending.append(packet)
        if not self._channel.alive:
            self._ranks.events.unwatch(self._channel.fileno())
            self._ranks.kill_attempt()  # to the other nodes this one is dead, and they go on


def _settings(job: Job) -> dict[str, Any]:
    return {
        "rdzv_backend": job.rdzv_backend,
        "rdzv_endpoint": job.rdzv_endpoint,
        "rdzv_conf": dict(job.rdzv_conf),
        "run_id": job.run_id,
        "role": job.role,
        "min_nodes": job.min_nodes,
        "max_nodes": job.max_nodes,
        "node_rank": job.node_rank,
        "local_addr": job.local_addr,
        "host_label": job.host_label,
        "num_replicas": job.num_replicas,
        "num_local_ranks": job.num_local_ranks,
        "max_restarts": job.max_restarts,
        "spares": job.spares,
        "grace_s": job.grace_s,
        "drain_file": job.drain_file,
        "drain_url": job.drain_url,
        "script": script_of(job.command),
    }
